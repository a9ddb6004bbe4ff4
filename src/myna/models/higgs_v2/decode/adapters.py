"""LoRA matrices of several adapters in one decoding batch, and the layers with what they add.

Each adapter has a slot in stacked tensors of fixed size, its rank padded with zeros, so that every row of a batch can
use its own. Here they are applied with plain products; `cuda.py` does the same in its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from myna.errors import SpeakError
from myna.models.higgs_v2.forward import AttentionFunction
from myna.models.speech_decoder import LoraMatrices

RANK_MULTIPLE = 16
"""Ranks are padded to a power of two, and to at least this."""

GROUPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("audio_mlp.gate_proj", "audio_mlp.up_proj"),
    "down": ("audio_mlp.down_proj",),
    "text_gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "text_down": ("mlp.down_proj",),
}
"""Projections that share an input, whose matrices are stacked."""

AdapterDelta = Callable[[str, int, torch.Tensor], torch.Tensor]
"""(group, layer number, input (positions, inputs)) -> what the adapters add to the group's outputs."""


class GroupMatrices(NamedTuple):
    """The matrices of a group, of all layers and slots."""

    a: torch.Tensor
    """(layers, slots, projections, rank, inputs)."""
    b: torch.Tensor
    """(layers, slots, rank, outputs of all projections), the adapter's scaling included."""
    outputs: tuple[int, ...]
    """Of each projection."""


class HiggsAdapterSlots:
    """`AdapterSlots` of Higgs Audio v2."""

    def __init__(self, core: Any, capacity: int, rank: int) -> None:
        self.core, self.capacity = core, capacity
        self.version = 0
        """Changes when the tensors are allocated anew."""
        self._names: dict[str, int] = {}
        self._uses = [0] * capacity
        self._allocate(_padded(rank))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def _allocate(self, rank: int) -> None:
        weight = self.core.audio_lm_head.weight
        layers, first = len(self.core.model.layers), self.core.model.layers[0]
        before = getattr(self, "groups", None)
        self.rank, self.groups = rank, dict[str, GroupMatrices]()
        for group, projections in GROUPS.items():
            linears = [first.get_submodule(name) for name in projections]
            outputs = tuple(linear.out_features for linear in linears)
            a = weight.new_zeros(layers, self.capacity, len(linears), rank, linears[0].in_features)
            b = weight.new_zeros(layers, self.capacity, rank, sum(outputs))
            if before is not None:
                a[:, :, :, : before[group].a.shape[3]] = before[group].a
                b[:, :, : before[group].b.shape[2]] = before[group].b
            self.groups[group] = GroupMatrices(a, b, outputs)
        self.version += 1

    @torch.inference_mode()
    def load(self, name: str, matrices: LoraMatrices) -> None:
        if name in self._names:
            raise SpeakError(f"an adapter named {name} is loaded already", hint="unload it first, or choose a name")
        slot = next((n for n in range(self.capacity) if n not in self._names.values() and not self._uses[n]), None)
        if slot is None:
            raise SpeakError(
                f"all {self.capacity} places for adapters are taken: {', '.join(self._names)}",
                hint="unload one of them, or allow more with max_adapters",
            )
        rank = max(len(a) for a, _ in matrices.values())
        if rank > self.rank:
            self._allocate(_padded(rank))
        self._write(slot, matrices)
        self._names[name] = slot

    def _write(self, slot: int, matrices: LoraMatrices) -> None:
        for group, projections in GROUPS.items():
            a, b, outputs = self.groups[group]
            a[:, slot], b[:, slot] = 0, 0
            for layer in range(len(a)):
                parts = b[layer, slot].split(list(outputs), dim=1)
                for number, projection in enumerate(projections):
                    pair = matrices.get(f"model.layers.{layer}.{projection}")
                    if pair is not None:
                        rank = len(pair[0])
                        a[layer, slot, number, :rank] = pair[0].to(a)
                        parts[number][:rank] = pair[1].t().to(b)

    def unload(self, name: str) -> None:
        self._require(name)
        del self._names[name]  # requests that use it go on, and its slot is free when they have ended

    def acquire(self, name: str) -> int:
        slot = self._require(name)
        self._uses[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        self._uses[slot] -= 1

    def _require(self, name: str) -> int:
        if name not in self._names:
            known = ", ".join(self._names) or "none"
            raise SpeakError(f"there is no adapter {name}", hint=f"loaded: {known}")
        return self._names[name]

    def delta(self, slot: torch.Tensor, strength: torch.Tensor) -> AdapterDelta:
        """What one adapter adds to every position; both are tensors of one entry. No adapter is slot -1."""
        index = slot.clamp(min=0)
        factor = torch.where(slot >= 0, strength, 0.0)

        def add(group: str, layer: int, x: torch.Tensor) -> torch.Tensor:
            a, b, outputs = self.groups[group]
            own_a, own_b = a[layer].index_select(0, index)[0], b[layer].index_select(0, index)[0]
            shrunk = F.linear(x.to(a.dtype), own_a.flatten(0, 1)).float() * factor
            parts = shrunk.to(b.dtype).split(self.rank, dim=1)
            return torch.cat([s @ w for s, w in zip(parts, own_b.split(list(outputs), dim=1), strict=True)], 1)

        return add

    def row_deltas(self, slots: torch.Tensor, strengths: torch.Tensor) -> AdapterDelta:
        """What each row's adapter adds to it: one position per row."""
        index = slots.clamp(min=0)
        factors = torch.where(slots >= 0, strengths, 0.0)[:, None]

        def add(group: str, layer: int, x: torch.Tensor) -> torch.Tensor:
            a, b, outputs = self.groups[group]
            shrunk = torch.bmm(a[layer].index_select(0, index).flatten(1, 2), x.to(a.dtype)[..., None])[..., 0]
            parts = (shrunk.float() * factors).to(b.dtype)[:, None].split(self.rank, dim=2)
            weights = b[layer].index_select(0, index).split(list(outputs), dim=2)
            return torch.cat([torch.bmm(s, w) for s, w in zip(parts, weights, strict=True)], 2)[:, 0]

        return add


def run_adapted_layer(
    layer: Any, stream: torch.Tensor, num_text: int, attend: AttentionFunction, delta: AdapterDelta
) -> torch.Tensor:
    """`forward.run_layer` with what adapters add to each product."""
    attention, number = layer.self_attn, layer.self_attn.layer_idx
    text, audio = stream[:num_text], stream[num_text:]
    x = torch.cat([layer.input_layernorm(text), layer.audio_input_layernorm(audio)])
    q, k, v = (projection(x) for projection in (attention.q_proj, attention.k_proj, attention.v_proj))
    added = delta("qkv", number, x).split([q.shape[1], k.shape[1], v.shape[1]], dim=1)
    q, k, v = ((y + part).unflatten(-1, (-1, attention.head_dim)) for y, part in zip((q, k, v), added, strict=True))
    attended = attend(number, q, k, v).flatten(1)
    stream = stream + (attention.o_proj(attended) + delta("out", number, attended)).to(stream.dtype)
    text, audio = stream[:num_text], stream[num_text:]
    text, audio = layer.post_attention_layernorm(text), layer.audio_post_attention_layernorm(audio)
    updates = [_run_mlp(layer.audio_mlp, audio, number, ("gate_up", "down"), delta)]
    if num_text:
        updates.insert(0, _run_mlp(layer.mlp, text, number, ("text_gate_up", "text_down"), delta))
    return stream + torch.cat(updates).to(stream.dtype)


def _run_mlp(mlp: Any, x: torch.Tensor, layer: int, groups: tuple[str, str], delta: AdapterDelta) -> torch.Tensor:
    gate, up = delta(groups[0], layer, x).chunk(2, 1)
    inner = mlp.act_fn(mlp.gate_proj(x) + gate) * (mlp.up_proj(x) + up)
    out: torch.Tensor = mlp.down_proj(inner) + delta(groups[1], layer, inner)
    return out


def _padded(rank: int) -> int:
    size = RANK_MULTIPLE
    while size < rank:
        size *= 2
    return size
