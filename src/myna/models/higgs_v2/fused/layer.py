"""Layers with a frozen base and a LoRA, near the speed limit of the card.

Matrix products have the adapters folded in, see `fold.py`; what lies between them is one pass over memory each, see
`passes.py`. Forward and backward are written out, so that only what the gradients of A and B need is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from myna.models.higgs_v2.fused import ops
from myna.models.higgs_v2.fused.linear import Group, make_group
from myna.models.higgs_v2.fused.ops import Norms, PackedInput
from myna.models.higgs_v2.packing import Needed, PackedAttention


class _Before(torch.autograd.Function):
    """A layer up to its attention: (stream, update) -> (stream with the update, q, k, v in sequence order)."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: FusedLoraLayer,
        texts: int,
        route: PackedAttention,
        stream: torch.Tensor,
        update: torch.Tensor | None,
        *_: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        group = layer.qkv
        wide = group.room(stream, group.inputs)
        stream, factor = ops.add_norm(stream, update, None, layer.first_norms, texts, wide)
        qkv = stream.new_empty(len(stream), group.outputs)
        group.project(wide, qkv)
        turned = ops.rotate(qkv, route.to_sequence, route.cos, route.sin, layer.head_size, layer.queries + layer.keys)
        ctx.layer, ctx.texts = layer, texts
        ctx.save_for_backward(stream, factor, wide.x, wide.low, route.to_sequence, route.cos, route.sin)
        heads = turned.view(len(turned), layer.queries + 2 * layer.keys, layer.head_size)
        keys = layer.queries + layer.keys
        return stream, heads[:, : layer.queries], heads[:, layer.queries : keys], heads[:, keys:]

    @staticmethod
    def backward(ctx: Any, *d_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_stream, dq, dk, dv = d_outputs
        stream, factor, x, low, order, cos, sin = ctx.saved_tensors
        layer, group = ctx.layer, ctx.layer.qkv
        d_qkv = group.room(stream, group.outputs)
        ops.rotate_back(dq, dk, dv, order, cos, sin, d_qkv)
        _, _, _, wants_stream, wants_update, *_ = ctx.needs_input_grad
        d = None
        if wants_stream or wants_update:
            d_normed = torch.empty_like(stream)
            group.back(d_qkv, d_normed)
            d = ops.norm_back(d_normed, stream, factor, layer.first_norms, ctx.texts, d_stream)
        else:
            # Below the first layer nothing learns.
            group.project_back(d_qkv)
        inputs = (d if wants_stream else None, d if wants_update else None)
        return None, None, None, *inputs, *group.gradients(PackedInput(x, low), d_qkv)


class _After(torch.autograd.Function):
    """A layer from its attention on: (stream, attended) -> (stream, what the FFNs would add to it).

    `order` is from rows of the stream to rows of what was attended to; None where they are the same.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layer: FusedLoraLayer,
        texts: int,
        order: torch.Tensor | None,
        stream: torch.Tensor,
        attended: torch.Tensor,
        *_: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        out, enter, leave = layer.out, layer.text_in, layer.text_out
        # Detached, or what is kept would be a view of an input, which autograd does not like to unpack.
        seen = out.around(attended.detach().flatten(1))
        update = torch.empty_like(stream)
        out.project(seen, update)

        wide = enter.room(stream, enter.inputs)
        stream, factor = ops.add_norm(stream, update, order, layer.second_norms, texts, wide)
        both = stream.new_empty(len(stream), enter.outputs)
        for ffn, rows in layer.ffns(texts):
            ffn.enter.project(wide.part(rows), both[rows])
        opened = leave.room(stream, leave.inputs)
        ops.gate(both, opened)
        update = torch.empty_like(stream)
        for ffn, rows in layer.ffns(texts):
            ffn.leave.project(opened.part(rows), update[rows])
        ctx.layer, ctx.texts, ctx.has_order = layer, texts, order is not None
        kept = [part for one in (seen, wide, opened) for part in (one.x, one.low)]
        ctx.save_for_backward(stream, factor, both, *kept, *([] if order is None else [order]))
        return stream, update

    @staticmethod
    def backward(ctx: Any, *d_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_stream, d_update = d_outputs
        stream, factor, both, *kept = ctx.saved_tensors
        seen, wide, opened = (PackedInput(*kept[at : at + 2]) for at in (0, 2, 4))
        layer, texts, out, enter, leave = ctx.layer, ctx.texts, ctx.layer.out, ctx.layer.text_in, ctx.layer.text_out

        d_leave = leave.around(d_update)
        d_opened = stream.new_empty(len(stream), leave.inputs)
        for ffn, rows in layer.ffns(texts):
            ffn.leave.back(d_leave.part(rows), d_opened[rows])
        d_both = enter.room(stream, enter.outputs)
        ops.gate_back(d_opened, both, d_both)
        d_normed = torch.empty_like(stream)
        found: list[torch.Tensor] = []
        for ffn, rows in layer.ffns(texts):
            ffn.enter.back(d_both.part(rows), d_normed[rows])
            found += ffn.enter.gradients(wide.part(rows), d_both.part(rows))
            found += ffn.leave.gradients(opened.part(rows), d_leave.part(rows))

        norms = layer.second_norms
        if ctx.has_order:
            d_seen = out.room(stream, out.outputs)
            d = ops.norm_back(d_normed, stream, factor, norms, texts, d_stream, kept[6], d_seen)
        else:
            d = ops.norm_back(d_normed, stream, factor, norms, texts, d_stream)
            d_seen = out.around(d)
        d_attended = stream.new_empty(len(stream), out.inputs)
        out.back(d_seen, d_attended)
        heads = d_attended.view(len(d_attended), layer.queries, layer.head_size)
        return None, None, None, d, heads, *out.gradients(seen, d_seen), *found


class Ffn(NamedTuple):
    enter: Group
    leave: Group


def can_fold(layer: Any) -> bool:
    """Whether a decoder layer is one to fold: plain LoRA, all the rest frozen, and something to gain by it."""
    linears = [module for module in layer.modules() if isinstance(module, LoraLayer)]
    adapters = {id(part) for linear in linears for kind in (linear.lora_A, linear.lora_B) for part in kind.parameters()}
    frozen = not any(parameter.requires_grad and id(parameter) not in adapters for parameter in layer.parameters())
    return bool(linears) and frozen and all(_is_plain(linear) for linear in linears)


def _is_plain(linear: Any) -> bool:
    dropout = [module for module in linear.lora_dropout.values() if isinstance(module, nn.Dropout) and module.p > 0]
    return not dropout and not linear.use_dora.get(linear.active_adapters[0], False) and not linear.merged


class FusedLoraLayer(nn.Module):
    """A decoder layer with its projections folded; the same function of the same weights as the layer it is made of."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention = layer.self_attn
        self.head_size: int = attention.head_dim
        self.qkv = make_group([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = make_group([attention.o_proj])
        text, audio = ([ffn.gate_proj, ffn.up_proj] for ffn in (layer.mlp, layer.audio_mlp))
        self.text_in, self.audio_in = make_group(text, audio), make_group(audio, text)
        text, audio = [layer.mlp.down_proj], [layer.audio_mlp.down_proj]
        self.text_out, self.audio_out = make_group(text, audio), make_group(audio, text)
        self.queries = self.out.inputs // self.head_size
        self.keys = (self.qkv.outputs // self.head_size - self.queries) // 2
        # Kept in a list, out of sight of `parameters()`: it is the model's, and the model holds it already.
        self._layer = [layer]

    @property
    def groups(self) -> list[Group]:
        return [self.qkv, self.out, self.text_in, self.text_out, self.audio_in, self.audio_out]

    @property
    def first_norms(self) -> Norms:
        return _norms(self._layer[0].input_layernorm, self._layer[0].audio_input_layernorm)

    @property
    def second_norms(self) -> Norms:
        return _norms(self._layer[0].post_attention_layernorm, self._layer[0].audio_post_attention_layernorm)

    def ffns(self, texts: int) -> Iterator[tuple[Ffn, slice]]:
        """The FFN of each modality with its rows of the stream."""
        yield Ffn(self.text_in, self.text_out), slice(None, texts)
        yield Ffn(self.audio_in, self.audio_out), slice(texts, None)

    def forward(
        self,
        stream: torch.Tensor,
        update: torch.Tensor | None,
        texts: int,
        route: PackedAttention,
        needed: Needed | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream, and what is still to be added to it: the next layer does that in passing.

        With `needed`, only those rows go further than the attention.
        """
        before, after = self.qkv.trained, [part for group in self.groups[1:] for part in group.trained]
        stream, q, k, v = _Before.apply(self, texts, route, stream, update, *before)  # type: ignore[no-untyped-call]
        attended = route.look_in_tiles(q, k, v)
        order: torch.Tensor | None = route.to_stream
        if needed is not None:
            attended, order = attended[route.to_stream[needed.rows]], None
            stream, texts = stream[needed.rows], needed.texts
        return _After.apply(self, texts, order, stream, attended, *after)  # type: ignore[no-untyped-call,no-any-return]


def _norms(text: Any, audio: Any) -> Norms:
    assert text.variance_epsilon == audio.variance_epsilon
    return Norms(text.weight, audio.weight, text.variance_epsilon)
