"""Decoder layer with a frozen base and fused LoRA.

`linear.py` holds the matrix products, which include LoRA, and the operations between them, one memory pass each.
Forward and backward are written out, so that only what the gradients of A and B need is saved.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from myna.models.higgs_v2.forward import OutputRows, PackedAttention
from myna.models.higgs_v2.fused import linear as ops
from myna.models.higgs_v2.fused.linear import FusedLinearGroup, ModalityNorms, PackedInput, make_linear_group


class _BeforeAttention(torch.autograd.Function):
    """Layer up to its attention: (stream, update) -> (stream with the update, q, k, v in sequence order)."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: "FusedLoraLayer",
        num_text: int,
        packing: PackedAttention,
        stream: Tensor,
        update: Tensor | None,
        *_: Tensor,
    ) -> tuple[Tensor, ...]:
        group, order, cos, sin = layer.qkv, packing.to_sequence, packing.cos, packing.sin
        normed = group.workspace(stream, group.inputs)
        stream, inverse_rms = ops.add_rms_norm(stream, update, None, layer.first_norms, num_text, normed)
        qkv = stream.new_empty(len(stream), group.outputs)
        group.matmul(normed, qkv)
        values_at = layer.queries + layer.keys
        rotated = ops.rotate_qkv(qkv, order, cos, sin, layer.head_size, values_at)
        ctx.layer, ctx.num_text = layer, num_text
        ctx.save_for_backward(stream, inverse_rms, normed.x, normed.projection, order, cos, sin)
        heads = rotated.view(len(rotated), layer.queries + 2 * layer.keys, layer.head_size)
        return stream, heads[:, : layer.queries], heads[:, layer.queries : values_at], heads[:, values_at:]

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        d_stream, dq, dk, dv = d_outputs
        stream, inverse_rms, x, projection, order, cos, sin = ctx.saved_tensors
        layer, group = ctx.layer, ctx.layer.qkv
        d_qkv = group.workspace(stream, group.outputs)
        ops.rotate_qkv_backward(dq, dk, dv, order, cos, sin, d_qkv)
        _, _, _, needs_stream, needs_update, *_ = ctx.needs_input_grad
        d = None
        if needs_stream or needs_update:
            d_normed = torch.empty_like(stream)
            group.matmul_backward(d_qkv, d_normed)
            d = ops.rms_norm_backward(d_normed, stream, inverse_rms, layer.first_norms, ctx.num_text, d_stream)
        else:
            # Nothing is trained below the first layer.
            group.project_gradient(d_qkv)
        inputs = (d if needs_stream else None, d if needs_update else None)
        return None, None, None, *inputs, *group.lora_gradients(PackedInput(x, projection), d_qkv)


class _AfterAttention(torch.autograd.Function):
    """Layer from its attention on: (stream, attended) -> (stream, the FFN output that is still to be added to it).
    `order` maps rows of the residual stream to rows of `attended`; None if they are the same."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: "FusedLoraLayer",
        num_text: int,
        order: Tensor | None,
        stream: Tensor,
        attended: Tensor,
        *_: Tensor,
    ) -> tuple[Tensor, ...]:
        out, gate_up, down = layer.out, layer.text_gate_up, layer.text_down
        # Detached, because autograd does not unpack a saved view of an input.
        heads = out.pack(attended.detach().flatten(1))
        update = torch.empty_like(stream)
        out.matmul(heads, update)

        normed = gate_up.workspace(stream, gate_up.inputs)
        stream, inverse_rms = ops.add_rms_norm(stream, update, order, layer.second_norms, num_text, normed)
        hidden = stream.new_empty(len(stream), gate_up.outputs)
        for ffn, rows in layer.ffns(num_text):
            ffn.gate_up.matmul(normed.select(rows), hidden[rows])
        activated = down.workspace(stream, down.inputs)
        ops.swiglu(hidden, activated)
        update = torch.empty_like(stream)
        for ffn, rows in layer.ffns(num_text):
            ffn.down.matmul(activated.select(rows), update[rows])
        ctx.layer, ctx.num_text, ctx.has_order = layer, num_text, order is not None
        saved = [tensor for packed in (heads, normed, activated) for tensor in (packed.x, packed.projection)]
        ctx.save_for_backward(stream, inverse_rms, hidden, *saved, *([] if order is None else [order]))
        return stream, update

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        d_stream, d_update = d_outputs
        stream, inverse_rms, hidden, *saved = ctx.saved_tensors
        heads, normed, activated = (PackedInput(*saved[at : at + 2]) for at in (0, 2, 4))
        layer, num_text = ctx.layer, ctx.num_text
        out, gate_up, down = layer.out, layer.text_gate_up, layer.text_down

        d_down = down.pack(d_update)
        d_activated = stream.new_empty(len(stream), down.inputs)
        for ffn, rows in layer.ffns(num_text):
            ffn.down.matmul_backward(d_down.select(rows), d_activated[rows])
        d_hidden = gate_up.workspace(stream, gate_up.outputs)
        ops.swiglu_backward(d_activated, hidden, d_hidden)
        d_normed = torch.empty_like(stream)
        gradients: list[Tensor] = []
        for ffn, rows in layer.ffns(num_text):
            ffn.gate_up.matmul_backward(d_hidden.select(rows), d_normed[rows])
            gradients += ffn.gate_up.lora_gradients(normed.select(rows), d_hidden.select(rows))
            gradients += ffn.down.lora_gradients(activated.select(rows), d_down.select(rows))

        arguments = (d_normed, stream, inverse_rms, layer.second_norms, num_text, d_stream)
        if ctx.has_order:
            d_out = out.workspace(stream, out.outputs)
            d = ops.rms_norm_backward(*arguments, saved[6], d_out)
        else:
            d = ops.rms_norm_backward(*arguments)
            d_out = out.pack(d)
        d_attended = stream.new_empty(len(stream), out.inputs)
        out.matmul_backward(d_out, d_attended)
        d_heads = d_attended.view(len(d_attended), layer.queries, layer.head_size)
        return None, None, None, d, d_heads, *out.lora_gradients(heads, d_out), *gradients


class FeedForward(NamedTuple):
    """FFN of one modality."""

    gate_up: FusedLinearGroup
    down: FusedLinearGroup


def can_fuse(layer: Any) -> bool:
    """Return whether a decoder layer can be fused: plain LoRA on some of its linears, everything else frozen."""

    def is_plain(linear: Any) -> bool:
        dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in linear.lora_dropout.values())
        return not dropout and not linear.use_dora.get(linear.active_adapters[0], False) and not linear.merged

    linears = [module for module in layer.modules() if isinstance(module, LoraLayer)]
    lora = {id(part) for linear in linears for factor in (linear.lora_A, linear.lora_B) for part in factor.parameters()}
    frozen = not any(parameter.requires_grad and id(parameter) not in lora for parameter in layer.parameters())
    return bool(linears) and frozen and all(map(is_plain, linears))


class FusedLoraLayer(nn.Module):
    """Decoder layer with fused LoRA, the same function of the same weights as the layer it is built from."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention = layer.self_attn
        self.head_size: int = attention.head_dim
        self.qkv = make_linear_group([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = make_linear_group([attention.o_proj])
        text, audio = ([ffn.gate_proj, ffn.up_proj] for ffn in (layer.mlp, layer.audio_mlp))
        self.text_gate_up, self.audio_gate_up = make_linear_group(text, audio), make_linear_group(audio, text)
        text, audio = [layer.mlp.down_proj], [layer.audio_mlp.down_proj]
        self.text_down, self.audio_down = make_linear_group(text, audio), make_linear_group(audio, text)
        self.queries = self.out.inputs // self.head_size
        self.keys = (self.qkv.outputs // self.head_size - self.queries) // 2
        # A list hides it from `parameters()`, since the model holds it already.
        self._layer = [layer]

    @property
    def groups(self) -> list[FusedLinearGroup]:
        return [self.qkv, self.out, self.text_gate_up, self.text_down, self.audio_gate_up, self.audio_down]

    @property
    def first_norms(self) -> ModalityNorms:
        return _norms(self._layer[0].input_layernorm, self._layer[0].audio_input_layernorm)

    @property
    def second_norms(self) -> ModalityNorms:
        return _norms(self._layer[0].post_attention_layernorm, self._layer[0].audio_post_attention_layernorm)

    def ffns(self, num_text: int) -> Iterator[tuple[FeedForward, slice]]:
        """Yield the FFN of each modality with its rows of the residual stream."""
        yield FeedForward(self.text_gate_up, self.text_down), slice(None, num_text)
        yield FeedForward(self.audio_gate_up, self.audio_down), slice(num_text, None)

    def forward(
        self,
        stream: Tensor,
        update: Tensor | None,
        num_text: int,
        packing: PackedAttention,
        output: OutputRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the update that is still to be added to it, which the next layer fuses into
        its norm. With `output`, only those rows are computed after the attention."""
        before, after = self.qkv.lora_parameters, [part for group in self.groups[1:] for part in group.lora_parameters]
        stream, q, k, v = _BeforeAttention.apply(self, num_text, packing, stream, update, *before)  # type: ignore[no-untyped-call]
        attended = packing.attend_tiled(q, k, v)
        order: Tensor | None = packing.to_stream
        if output is not None:
            attended, order = attended[packing.to_stream[output.rows]], None
            stream, num_text = stream[output.rows], output.num_text
        return _AfterAttention.apply(self, num_text, order, stream, attended, *after)  # type: ignore[no-untyped-call,no-any-return]


def _norms(text: Any, audio: Any) -> ModalityNorms:
    assert text.variance_epsilon == audio.variance_epsilon
    return ModalityNorms(text.weight, audio.weight, text.variance_epsilon)
