"""Weights of the decoder layers as a decoding step reads them: audio positions alone, related projections joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from myna.models.quantized import NF4_BLOCK_SIZE, Fp8Linear, Int8Linear, Nf4Linear

MAX_COPIED_BYTES = 2**30
"""Models of more than this are not copied."""

WeightFormat = Literal["plain", "row_scales", "nf4"]
"""Of the weights that kernels read: numbers; codes with a scale per output (fp8, int8); nf4 with a scale per block."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """Weight of a product as it is read."""

    values: torch.Tensor
    """(outputs, inputs); or bytes of two nf4 levels, (outputs, inputs / 2)."""
    scales: torch.Tensor | None = None
    """Of each output, fp32; or of each nf4 block, (outputs, inputs / 64)."""
    input_major: torch.Tensor | None = None
    """The same values in a copy whose transpose is contiguous."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer."""

    attention_norm: torch.Tensor
    qkv: Weight
    """Query heads, key heads, value heads."""
    out: Weight
    mlp_norm: torch.Tensor
    gate_up: Weight
    """Gate rows, then up rows."""
    down: Weight


@dataclass(frozen=True, slots=True, eq=False)
class TextWeights:
    """One decoder layer, for text positions: attention's weights are those of audio."""

    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: Weight
    down: Weight


def packed_format(core: Any) -> WeightFormat | None:
    """The format that kernels can read the layers in without unpacking them; None where they are not quantized, or not
    in this way."""
    linears = [linear for layer in core.model.layers for linear in _linears(layer)]
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
    """The layers' quantized weights, joined; the modules keep views of the codes."""
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
    """Whether the layers are plain: no adapter, nothing quantized, nothing in training, one type, no bias."""
    linears = [linear for layer in core.model.layers for linear in _linears(layer)]
    plain = all(type(linear) is nn.Linear and linear.bias is None for linear in linears)
    return (
        plain
        and not any(parameter.requires_grad for parameter in core.parameters())
        and len({linear.weight.dtype for linear in (*linears, core.audio_lm_head)}) == 1
    )


def join_weights(core: Any) -> list[LayerWeights]:
    """The layers' weights, joined in place: the modules keep views, so that nothing is held twice.

    On a CPU fp32 products with many rows are quicker by a sixth with weights that lie input by input: small models get
    a copy that does.
    """
    return [_join_layer(layer, _join_copied if _is_copied(core) else _join_weight) for layer in core.model.layers]


def join_text_weights(core: Any) -> list[TextWeights]:
    """What text positions have weights of their own for, joined in place."""
    return [
        TextWeights(
            attention_norm=layer.input_layernorm.weight.detach(),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=Weight(_join([layer.mlp.gate_proj, layer.mlp.up_proj])),
            down=Weight(_join([layer.mlp.down_proj])),
        )
        for layer in core.model.layers
    ]


def join_head(core: Any) -> Weight:
    """The audio head's weight, as `join_weights` has the layers'."""
    return (_join_copied if _is_copied(core) else _join_weight)([core.audio_lm_head])


def _is_copied(core: Any) -> bool:
    small = sum(weight.nbytes for weight in core.parameters()) < MAX_COPIED_BYTES
    head: torch.Tensor = core.audio_lm_head.weight
    return small and head.device.type == "cpu" and head.dtype == torch.float32


def _join_layer(layer: Any, join: Callable[[Sequence[Any]], Weight]) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.audio_mlp
    return LayerWeights(
        attention_norm=layer.audio_input_layernorm.weight.detach(),
        qkv=join([attention.q_proj, attention.k_proj, attention.v_proj]),
        out=join([attention.o_proj]),
        mlp_norm=layer.audio_post_attention_layernorm.weight.detach(),
        gate_up=join([mlp.gate_proj, mlp.up_proj]),
        down=join([mlp.down_proj]),
    )


def _join_weight(linears: Sequence[nn.Linear]) -> Weight:
    return Weight(_join(linears))


def _join_copied(linears: Sequence[nn.Linear]) -> Weight:
    values = _join(linears)
    return Weight(values, input_major=values.t().contiguous().t())


def _linears(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.audio_mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]


def _join(linears: Sequence[nn.Linear]) -> torch.Tensor:
    weights = [linear.weight.detach() for linear in linears]
    joined = _concatenate(weights)
    _point_at(linears, joined)
    return joined


def extend_weight(linears: Sequence[nn.Linear], rows: int) -> torch.Tensor:
    """The joined weight of layers with so many rows more, which are not initialized; the layers keep views of it."""
    weights = [linear.weight.detach() for linear in linears]
    outputs = sum(map(len, weights))
    extended = weights[0].new_empty(outputs + rows, weights[0].shape[1])
    torch.cat(weights, out=extended[:outputs])
    _point_at(linears, extended)
    return extended


def _point_at(linears: Sequence[nn.Linear], joined: torch.Tensor) -> None:
    first = 0
    for linear in linears:
        linear.weight = nn.Parameter(joined[first : first + len(linear.weight)], requires_grad=False)
        first += len(linear.weight)


def _concatenate(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors one below the other: themselves, where each already begins where the one before ends."""
    first, length = tensors[0], sum(map(len, tensors))
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    places = [tensor.data_ptr() for tensor in tensors]
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
    if len(storages) == 1 and places[1:] == ends[:-1]:
        return first.as_strided((length, *first.shape[1:]), first.stride(), first.storage_offset())
    return torch.cat(list(tensors))
