"""LoRA matrices of several adapters in one decoding batch, and the layers with what they add.

Each adapter has a slot in stacked tensors of fixed size, its rank padded with zeros, so that every row of a batch can
use its own. Here they are applied with plain products; `cuda.py` does the same with its kernels: the A of all slots lie
below the weight that shares their input and are multiplied together with it, and a kernel behind the product adds B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from myna.core.errors import SpeakError
from myna.models.higgs_v2.decode.weights import can_join, extend_weight
from myna.models.higgs_v2.forward import AttentionFunction
from myna.models.speech_decoder import LoraMatrices

RANK_MULTIPLE = 8
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
    """The matrices of a group in one layer, of all slots."""

    a: torch.Tensor
    """(slots, projections, rank, inputs)."""
    b: torch.Tensor
    """(slots, rank, outputs of all projections), the adapter's scaling included."""
    outputs: tuple[int, ...]
    """Of each projection."""
    extended: torch.Tensor | None
    """The group's weight with A below it, so that one product gives both; None where weights are not plain."""


class HiggsAdapterSlots:
    """`AdapterSlots` of Higgs Audio v2."""

    def __init__(self, core: Any, capacity: int, rank: int) -> None:
        self.core, self.capacity = core, capacity
        self.version = 0
        """Changes when the tensors are allocated anew."""
        self._names: dict[str, int] = {}
        self._uses = [0] * capacity
        self.groups: dict[str, list[GroupMatrices]] = {}
        self._allocate(_padded(rank))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    @torch.no_grad()
    def _allocate(self, rank: int) -> None:
        before = self.groups if self.version else None
        weight = self.core.audio_lm_head.weight
        extend = weight.device.type == "cuda" and can_join(self.core)
        self.rank, self.groups = rank, {group: [] for group in GROUPS}
        for number, layer in enumerate(self.core.model.layers):
            for group, projections in GROUPS.items():
                linears = [layer.get_submodule(name) for name in projections]
                outputs, inputs = tuple(linear.out_features for linear in linears), linears[0].in_features
                size = (self.capacity, len(linears), rank, inputs)
                extended = None
                if extend and not group.startswith("text"):
                    extended = extend_weight(linears, self.capacity * len(linears) * rank)
                    a = extended[sum(outputs) :].view(size).zero_()
                else:
                    a = weight.new_zeros(size)
                b = weight.new_zeros(self.capacity, rank, sum(outputs))
                if before is not None:
                    old = before[group][number]
                    a[:, :, : old.a.shape[2]] = old.a
                    b[:, : old.b.shape[1]] = old.b
                self.groups[group].append(GroupMatrices(a, b, outputs, extended))
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
            for layer, (a, b, outputs, _) in enumerate(self.groups[group]):
                a[slot], b[slot] = 0, 0
                parts = torch.split(b[slot], list(outputs), 1)
                for number, projection in enumerate(projections):
                    pair = matrices.get(f"model.layers.{layer}.{projection}")
                    if pair is not None:
                        rank = len(pair[0])
                        a[slot, number, :rank] = pair[0].to(a)
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

    def slots_in_use(self, slots: Sequence[int]) -> int:
        """How many of the first slots these rows' adapters lie in: none, a power of two, or all."""
        last = max(slots, default=-1)
        return 0 if last < 0 else min(1 << last.bit_length(), self.capacity)

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
            a, b, outputs, _ = self.groups[group][layer]
            own_a, own_b = a.index_select(0, index)[0], b.index_select(0, index)[0]
            shrunk = F.linear(x.to(a.dtype), own_a.flatten(0, 1)).float() * factor
            parts = torch.split(shrunk.to(b.dtype), self.rank, 1)
            return torch.cat([s @ w for s, w in zip(parts, torch.split(own_b, list(outputs), 1), strict=True)], 1)

        return add

    def row_deltas(self, slots: torch.Tensor, strengths: torch.Tensor) -> AdapterDelta:
        """What each row's adapter adds to it: one position per row."""
        index = slots.clamp(min=0)
        factors = torch.where(slots >= 0, strengths, 0.0)[:, None]

        def add(group: str, layer: int, x: torch.Tensor) -> torch.Tensor:
            a, b, outputs, _ = self.groups[group][layer]
            shrunk = torch.bmm(a.index_select(0, index).flatten(1, 2), x.to(a.dtype)[..., None])[..., 0]
            parts = torch.split((shrunk.float() * factors).to(b.dtype)[:, None], self.rank, 2)
            weights = torch.split(b.index_select(0, index), list(outputs), 2)
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
    added = torch.split(delta("qkv", number, x), [q.shape[1], k.shape[1], v.shape[1]], 1)
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
