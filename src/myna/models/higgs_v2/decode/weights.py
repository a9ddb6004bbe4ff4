"""Weights of the decoder layers and of adapters, as a decoding step reads them.

A step has audio positions alone, and related projections are joined. Each adapter has a slot in stacked tensors of
fixed size, its rank padded with zeros, so that every row of a batch can use its own. Here adapters are applied with
plain products; `cuda.py` does the same with its kernels: the A of all slots lie below the weight that shares their
input and are multiplied together with it, and a kernel after the product adds B.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from myna.core.errors import SpeakError
from myna.models.base import LoraMatrices
from myna.models.higgs_v2.forward import AttentionFunction
from myna.models.quantized import NF4_BLOCK_SIZE, Fp8Linear, Int8Linear, Nf4Linear

MAX_COPIED_BYTES = 2**30
"""Largest model of which a copy is made, in bytes."""
WeightFormat = Literal["plain", "row_scales", "nf4"]
"""Format of weights for kernels: numbers; codes with scales per output (fp8, int8); nf4 with scales per block."""
RANK_MULTIPLE = 8
"""Smallest padded rank; ranks are padded to powers of two."""
GROUPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("audio_mlp.gate_proj", "audio_mlp.up_proj"),
    "down": ("audio_mlp.down_proj",),
    "text_gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "text_down": ("mlp.down_proj",),
}
"""Projections that share an input, whose matrices are stacked."""
AUDIO_GROUPS = ("qkv", "out", "gate_up", "down")
"""Groups that audio positions use."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """Weight of a product as it is read."""

    values: Tensor
    """(outputs, inputs); or bytes of two nf4 levels, (outputs, inputs / 2)."""
    scales: Tensor | None = None
    """Scale of each output, fp32; or of each nf4 block, (outputs, inputs / 64)."""
    input_major: Tensor | None = None
    """Copy of `values` whose transpose is contiguous."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer."""

    attention_norm: Tensor
    qkv: Weight
    """Query heads, key heads, value heads."""
    out: Weight
    mlp_norm: Tensor
    gate_up: Weight
    """Gate rows, then up rows."""
    down: Weight


@dataclass(frozen=True, slots=True, eq=False)
class TextWeights:
    """One decoder layer for text positions. Attention's weights are those of audio."""

    attention_norm: Tensor
    mlp_norm: Tensor
    gate_up: Weight
    down: Weight


def packed_format(core: Any) -> WeightFormat | None:
    """Return the format in which kernels can read the quantized layers; None if there is none."""
    linears = _layer_linears(core)
    kinds = {type(linear) for linear in linears}
    if len(kinds) != 1 or any(linear.bias is not None for linear in linears):
        return None
    [kind] = kinds
    if kind is Nf4Linear:
        # Blocks must not run over the end of a row, and bytes are looked up as pairs of bf16.
        whole = all(linear.in_features % NF4_BLOCK_SIZE == 0 for linear in linears)
        return "nf4" if whole and linears[0].dtype == torch.bfloat16 else None
    return "row_scales" if kind in (Fp8Linear, Int8Linear) else None


def pack_weights(core: Any) -> list[LayerWeights]:
    """Join the layers' quantized weights; the modules keep views of the codes."""
    return [_join_layer(layer, _pack) for layer in core.model.layers]


def _pack(linears: Sequence[Any]) -> Weight:
    codes = _concatenate([linear.codes for linear in linears])
    parts = torch.split(codes, [len(linear.codes) for linear in linears])
    for linear, part in zip(linears, parts, strict=True):
        linear.codes = part
    if not isinstance(linears[0], Nf4Linear):
        return Weight(codes, torch.cat([linear.scale[:, 0].float() for linear in linears]))
    inputs = linears[0].in_features
    blocks = [linear.block_absmax()[: len(linear.codes) * 2 // NF4_BLOCK_SIZE] for linear in linears]
    return Weight(codes.view(-1, inputs // 2), torch.cat(blocks).view(-1, inputs // NF4_BLOCK_SIZE))


def can_join(core: Any) -> bool:
    """Return whether the layers are plain: no adapter, nothing quantized, nothing in training, one type, no bias."""
    linears = _layer_linears(core)
    plain = all(type(linear) is nn.Linear and linear.bias is None for linear in linears)
    return (
        plain
        and not any(parameter.requires_grad for parameter in core.parameters())
        and len({linear.weight.dtype for linear in (*linears, core.audio_lm_head)}) == 1
    )


def join_weights(core: Any) -> tuple[list[LayerWeights], Weight]:
    """Join the layers' weights in place, and return them and the audio head's. The modules keep views, so that nothing
    is stored twice. On a CPU fp32 products with many rows are faster by a sixth with weights that lie input by input,
    so small models get a copy that does."""
    small, head = sum(weight.nbytes for weight in core.parameters()) < MAX_COPIED_BYTES, core.audio_lm_head
    copied = small and head.weight.device.type == "cpu" and head.weight.dtype == torch.float32

    def join(linears: Sequence[nn.Linear]) -> Weight:
        values = _join(linears)
        return Weight(values, input_major=values.t().contiguous().t() if copied else None)

    return [_join_layer(layer, join) for layer in core.model.layers], join([head])


def join_text_weights(core: Any) -> list[TextWeights]:
    """Join the weights that only text positions use, in place."""
    return [
        TextWeights(
            attention_norm=layer.input_layernorm.weight.detach(),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=Weight(_join([layer.mlp.gate_proj, layer.mlp.up_proj])),
            down=Weight(_join([layer.mlp.down_proj])),
        )
        for layer in core.model.layers
    ]


def _join_layer(layer: Any, join: Callable[[Sequence[Any]], Weight]) -> LayerWeights:
    return LayerWeights(
        attention_norm=layer.audio_input_layernorm.weight.detach(),
        mlp_norm=layer.audio_post_attention_layernorm.weight.detach(),
        **{group: join([layer.get_submodule(name) for name in GROUPS[group]]) for group in AUDIO_GROUPS},
    )


def _layer_linears(core: Any) -> list[Any]:
    """Return the linear layers that audio positions use, except the head."""
    return [
        layer.get_submodule(name) for layer in core.model.layers for group in AUDIO_GROUPS for name in GROUPS[group]
    ]


def _join(linears: Sequence[nn.Linear]) -> Tensor:
    weights = [linear.weight.detach() for linear in linears]
    joined = _concatenate(weights)
    _point_at(linears, joined)
    return joined


def extend_weight(linears: Sequence[nn.Linear], rows: int) -> Tensor:
    """Join the weights of layers and append uninitialized rows; the layers keep views of the result."""
    weights = [linear.weight.detach() for linear in linears]
    outputs = sum(map(len, weights))
    extended = weights[0].new_empty(outputs + rows, weights[0].shape[1])
    torch.cat(weights, out=extended[:outputs])
    _point_at(linears, extended)
    return extended


def _point_at(linears: Sequence[nn.Linear], joined: Tensor) -> None:
    first = 0
    for linear in linears:
        linear.weight = nn.Parameter(joined[first : first + len(linear.weight)], requires_grad=False)
        first += len(linear.weight)


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors, without a copy if each already begins at the end of the one before."""
    first, length = tensors[0], sum(map(len, tensors))
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    places = [tensor.data_ptr() for tensor in tensors]
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
    if len(storages) == 1 and places[1:] == ends[:-1]:
        return first.as_strided((length, *first.shape[1:]), first.stride(), first.storage_offset())
    return torch.cat(list(tensors))


AdapterDelta = Callable[[str, int, Tensor], Tensor]
"""(group, layer number, input (positions, inputs)) -> what the adapters add to the group's outputs."""


class GroupMatrices(NamedTuple):
    """Matrices of a group in one layer, of all slots."""

    a: Tensor
    """(slots, projections, rank, inputs)."""
    b: Tensor
    """(slots, rank, outputs of all projections); includes the adapter's scaling."""
    outputs: tuple[int, ...]
    """Number of outputs of each projection."""
    extended: Tensor | None
    """Weight of the group with A below it, so that one product gives both; None if weights are not plain."""


class HiggsAdapterSlots:
    """`AdapterSlots` of Higgs Audio v2."""

    def __init__(self, core: Any, capacity: int, rank: int) -> None:
        self.core, self.capacity = core, capacity
        self.version = 0
        """Number that changes when the tensors are allocated anew."""
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

    def acquire(self, adapter: str | int) -> int:
        slot = self._require(adapter) if isinstance(adapter, str) else adapter
        self._uses[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        self._uses[slot] -= 1

    def slots_in_use(self, slots: Sequence[int]) -> int:
        """Return how many of the first slots contain the adapters of these rows: none, a power of two, or all."""
        last = max(slots, default=-1)
        return 0 if last < 0 else min(1 << last.bit_length(), self.capacity)

    def _require(self, name: str) -> int:
        if name not in self._names:
            known = ", ".join(self._names) or "none"
            raise SpeakError(f"there is no adapter {name}", hint=f"loaded: {known}")
        return self._names[name]

    def delta(self, slot: Tensor, strength: Tensor) -> AdapterDelta:
        """Return the function of what one adapter adds to every position; slot -1 is no adapter."""
        index = slot.clamp(min=0)
        factor = torch.where(slot >= 0, strength, 0.0)

        def add(group: str, layer: int, x: Tensor) -> Tensor:
            a, b, outputs, _ = self.groups[group][layer]
            own_a, own_b = a.index_select(0, index)[0], b.index_select(0, index)[0]
            shrunk = F.linear(x.to(a.dtype), own_a.flatten(0, 1)).float() * factor
            parts = torch.split(shrunk.to(b.dtype), self.rank, 1)
            return torch.cat([s @ w for s, w in zip(parts, torch.split(own_b, list(outputs), 1), strict=True)], 1)

        return add

    def row_deltas(self, slots: Tensor, strengths: Tensor) -> AdapterDelta:
        """Return the function of what each row's adapter adds to the one position of its row."""
        index = slots.clamp(min=0)
        factors = torch.where(slots >= 0, strengths, 0.0)[:, None]

        def add(group: str, layer: int, x: Tensor) -> Tensor:
            a, b, outputs, _ = self.groups[group][layer]
            shrunk = torch.bmm(a.index_select(0, index).flatten(1, 2), x.to(a.dtype)[..., None])[..., 0]
            parts = torch.split((shrunk.float() * factors).to(b.dtype)[:, None], self.rank, 2)
            weights = torch.split(b.index_select(0, index), list(outputs), 2)
            return torch.cat([torch.bmm(s, w) for s, w in zip(parts, weights, strict=True)], 2)[:, 0]

        return add


def run_adapted_layer(
    layer: Any, stream: Tensor, num_text: int, attend: AttentionFunction, delta: AdapterDelta
) -> Tensor:
    """Run `forward.run_layer`, and add what adapters add to each product."""
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


def _run_mlp(mlp: Any, x: Tensor, layer: int, groups: tuple[str, str], delta: AdapterDelta) -> Tensor:
    gate, up = delta(groups[0], layer, x).chunk(2, 1)
    inner = mlp.act_fn(mlp.gate_proj(x) + gate) * (mlp.up_proj(x) + up)
    return mlp.down_proj(inner) + delta(groups[1], layer, inner)  # type: ignore[no-any-return]


def _padded(rank: int) -> int:
    return max(RANK_MULTIPLE, 1 << (rank - 1).bit_length())
