"""Layers with a frozen base and a LoRA, near the speed limit of the card.

Each group of linear layers that read the same input becomes one matrix product with its adapters folded in. For an
input x, frozen weights W and adapters A and B,

    y = [x, x A'] [W, B]'        and backwards        dx = [dy, dy B] [W; A]

W, A and B lie in one buffer, W at its top left, B to the right of it and A below, of which transformers' own weight is
then a view: nothing is held twice, and checkpoints stay what they are. No gradient of W is ever formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import nn

from myna.models.higgs_v2.route import Route

ALIGNMENT = 16
"""Columns of the folded part come in multiples of this, or the product leaves the card's fast path."""


class _Fold(torch.autograd.Function):
    """The product and its gradients; A and B are passed for their gradients alone, their values stand in `folded`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, folded: torch.Tensor) -> torch.Tensor:
        outputs, inputs = b.shape[0], a.shape[1]
        wide = torch.cat([x, x @ folded[outputs:, :inputs].t()], dim=1)
        ctx.save_for_backward(wide, folded)
        ctx.shape = (outputs, inputs)
        return wide @ folded[:outputs].t()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        wide, folded = ctx.saved_tensors
        outputs, inputs = ctx.shape
        d_low = dy @ folded[:outputs, inputs:]
        dx = torch.cat([dy, d_low], dim=1) @ folded[:, :inputs]
        return dx, d_low.t() @ wide[:, :inputs], dy.t() @ wide[:, inputs:], None


class Reorder(torch.autograd.Function):
    """Rows in another order. A permutation's gradient is a gather too, where indexing would scatter into zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return dy[inverse], None, None


class Group(nn.Module):
    """Linear layers of one input, as PEFT has adapted them, computed together."""

    folded: torch.Tensor

    def __init__(self, linears: Sequence[Any]) -> None:
        super().__init__()
        bases = [linear.get_base_layer() if isinstance(linear, LoraLayer) else linear for linear in linears]
        self.inputs = bases[0].in_features
        self.outputs = [base.out_features for base in bases]
        adapters = [_Adapter.of(linear) for linear in linears]
        self.ranks = [adapter.rank for adapter in adapters]
        self.padding = -sum(self.ranks) % ALIGNMENT
        # Plain lists: the parameters belong to PEFT's modules, which the model already holds.
        self._adapters = adapters
        fold = sum(self.ranks) + self.padding
        folded = bases[0].weight.new_zeros(sum(self.outputs) + fold, self.inputs + fold)
        self.slots: list[torch.Tensor] = []
        row, low = 0, 0
        for base, adapter in zip(bases, adapters, strict=True):
            rows = folded[row : row + base.out_features]
            rows[:, : self.inputs] = base.weight.data
            base.weight.data = rows[:, : self.inputs]
            if adapter.rank:
                self.slots.append(rows[:, self.inputs + low : self.inputs + low + adapter.rank])
                first = sum(self.outputs) + low
                self.slots.append(folded[first : first + adapter.rank, : self.inputs])
            row, low = row + base.out_features, low + adapter.rank
        self.register_buffer("folded", folded, persistent=False)

    def sources(self) -> list[torch.Tensor]:
        """What belongs into `slots` after every change of the adapters; the scale goes with A."""
        return [
            part
            for adapter in self._adapters
            if adapter.a is not None and adapter.b is not None
            for part in (adapter.b, adapter.a * adapter.scale)
        ]

    def low(self) -> torch.Tensor:
        """All A, scaled and stacked: (ranks, inputs). The scale stands here so that B can be copied as it is."""
        parts = [adapter.a * adapter.scale for adapter in self._adapters if adapter.a is not None]
        return F.pad(torch.cat(parts).to(self.folded.dtype), (0, 0, 0, self.padding))

    def high(self) -> torch.Tensor:
        """All B, each in its own rows and columns: (outputs, ranks)."""
        total, column, parts = sum(self.ranks) + self.padding, 0, []
        for adapter, outputs in zip(self._adapters, self.outputs, strict=True):
            if adapter.b is None:
                parts.append(self.folded.new_zeros(outputs, total))
            else:
                parts.append(F.pad(adapter.b.to(self.folded.dtype), (column, total - column - adapter.rank)))
            column += adapter.rank
        return torch.cat(parts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not any(self.ranks):
            return torch.split(F.linear(x, self.folded), self.outputs, dim=1)
        y: torch.Tensor = _Fold.apply(x, self.low(), self.high(), self.folded)  # type: ignore[no-untyped-call]
        return torch.split(y, self.outputs, dim=1)


@dataclass(frozen=True, slots=True)
class _Adapter:
    """PEFT's LoRA of one linear layer; rank 0 where it has none."""

    rank: int
    scale: float
    a: torch.Tensor | None
    b: torch.Tensor | None

    @classmethod
    def of(cls, linear: Any) -> _Adapter:
        if not isinstance(linear, LoraLayer):
            return cls(0, 1.0, None, None)
        name = linear.active_adapters[0]
        return cls(linear.r[name], linear.scaling[name], linear.lora_A[name].weight, linear.lora_B[name].weight)


@torch.no_grad()
def refresh(groups: Sequence[Group]) -> None:
    """Write every A and B into its slot; needed after every change of the adapters."""
    torch._foreach_copy_(
        [slot for group in groups for slot in group.slots], [part for group in groups for part in group.sources()]
    )


def can_fold(layer: Any) -> bool:
    """Whether a decoder layer is one to fold: plain LoRA over frozen weights, and something to gain by it."""
    linears = [module for module in layer.modules() if isinstance(module, LoraLayer)]
    frozen = all(not linear.get_base_layer().weight.requires_grad for linear in linears)
    return bool(linears) and frozen and all(_is_plain(linear) for linear in linears)


def _is_plain(linear: Any) -> bool:
    dropout = [module for module in linear.lora_dropout.values() if isinstance(module, nn.Dropout) and module.p > 0]
    return not dropout and not linear.use_dora.get(linear.active_adapters[0], False) and not linear.merged


class FoldedLayer(nn.Module):
    """A decoder layer with its projections folded; the same function of the same weights as the layer it is made of."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention = layer.self_attn
        # Kept in a list, out of sight of `parameters()`: it is the model's, and the model holds it already.
        self._layer = [layer]
        self.head_size = attention.head_dim
        self.qkv = Group([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = Group([attention.o_proj])
        self.text_in = Group([layer.mlp.gate_proj, layer.mlp.up_proj])
        self.text_out = Group([layer.mlp.down_proj])
        self.audio_in = Group([layer.audio_mlp.gate_proj, layer.audio_mlp.up_proj])
        self.audio_out = Group([layer.audio_mlp.down_proj])

    @property
    def groups(self) -> list[Group]:
        return [self.qkv, self.out, self.text_in, self.text_out, self.audio_in, self.audio_out]

    def forward(self, stream: torch.Tensor, texts: int, route: Route) -> torch.Tensor:
        layer = self._layer[0]
        text, audio = stream[:texts], stream[texts:]
        x = torch.cat([layer.input_layernorm(text), layer.audio_input_layernorm(audio)])
        q, k, v = (Reorder.apply(y, route.to_sequence, route.to_stream) for y in self.qkv(x))  # type: ignore[no-untyped-call]
        attended = route.attend(*(y.unflatten(1, (-1, self.head_size)) for y in (q, k, v))).flatten(1)
        (y,) = self.out(Reorder.apply(attended, route.to_stream, route.to_sequence))  # type: ignore[no-untyped-call]
        stream = stream + y
        text, audio = stream[:texts], stream[texts:]
        gate, up = self.text_in(layer.post_attention_layernorm(text))
        (text,) = self.text_out(layer.mlp.act_fn(gate) * up)
        gate, up = self.audio_in(layer.audio_post_attention_layernorm(audio))
        (audio,) = self.audio_out(layer.audio_mlp.act_fn(gate) * up)
        return stream + torch.cat([text, audio])
