"""Weights of the decoder layers as a decoding step reads them: audio positions alone, related projections joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

MAX_COPIED_BYTES = 2**30
"""Models of more than this are not copied."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer; each weight is (outputs, inputs)."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    """Query heads, key heads, value heads."""
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    """Gate rows, then up rows."""
    down: torch.Tensor


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

    On the CPU a product with a single row is half as fast again with weights that lie input by input: small models get
    a copy that does.
    """
    join = _input_major if _is_copied(core) else _join
    return [_join_layer(layer, join) for layer in core.model.layers]


def join_head(core: Any) -> torch.Tensor:
    """The audio head's weight, as `join_weights` has the layers'."""
    return (_input_major if _is_copied(core) else _join)([core.audio_lm_head])


def _is_copied(core: Any) -> bool:
    small = sum(weight.nbytes for weight in core.parameters()) < MAX_COPIED_BYTES
    return small and bool(core.audio_lm_head.weight.device.type == "cpu")


def _join_layer(layer: Any, join: Callable[[Sequence[nn.Linear]], torch.Tensor]) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.audio_mlp
    return LayerWeights(
        attention_norm=layer.audio_input_layernorm.weight.detach(),
        qkv=join([attention.q_proj, attention.k_proj, attention.v_proj]),
        out=join([attention.o_proj]),
        mlp_norm=layer.audio_post_attention_layernorm.weight.detach(),
        gate_up=join([mlp.gate_proj, mlp.up_proj]),
        down=join([mlp.down_proj]),
    )


def _input_major(linears: Sequence[nn.Linear]) -> torch.Tensor:
    """A copy whose transpose is contiguous."""
    return torch.cat([linear.weight.detach() for linear in linears]).t().contiguous().t()


def _linears(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.audio_mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]


def _join(linears: Sequence[nn.Linear]) -> torch.Tensor:
    first, sizes = linears[0].weight, [len(linear.weight) for linear in linears]
    if len(linears) == 1:
        return first.detach()
    offset = first.storage_offset()
    shared = [linear.weight.untyped_storage().data_ptr() for linear in linears]
    if len(set(shared)) == 1 and first.untyped_storage().nbytes() == sum(sizes) * first.shape[1] * first.element_size():
        return first.detach().as_strided((sum(sizes), first.shape[1]), (first.shape[1], 1), offset)  # joined before
    weight = torch.cat([linear.weight.detach() for linear in linears])
    for linear, part in zip(linears, torch.split(weight, sizes), strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)
    return weight
