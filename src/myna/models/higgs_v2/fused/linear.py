"""Fused LoRA: base matrix product and LoRA in one product.

Linear layers that share an input form a group, computed together. For an input x, frozen weights W and LoRA factors A
and B,

    y = [x, x A'] [W, B]'        and in the backward pass        dx = [dy, dy B] [W; A]

so that LoRA needs no pass of its own over x or y. The gradient of W is never computed. With fp8 weights the LoRA
factors are fp8 too, each value in two parts: see `FP8_PARTS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from myna.core.compat import scaled_mm
from myna.models.higgs_v2.fused import ops
from myna.models.higgs_v2.fused.ops import FP8_PARTS, PackedInput, WeightCopy
from myna.models.quantized import Fp8Linear, QuantizedLinear, supports_fp8

LORA_ALIGNMENT = 16
"""LoRA columns of a group come in multiples of this: tensor cores need it."""
ROW_ALIGNMENT = 64
"""Rows begin at multiples of this many elements, for the same reason."""
SCALE_ALIGNMENT_BYTES = 16
"""Of the address of fp8 row scales."""
FP8_HEADROOM = 64
"""How many times larger than its row's largest weight a value of B may grow before fp8 saturates. As floats, the codes
lose next to no precision by it."""


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """PEFT's LoRA of one linear layer, and its place in its group."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    outputs: slice
    columns: slice
    """Its columns among the LoRA columns of the group."""


class FusedLinearGroup(nn.Module):
    """Linear layers with a common input, as PEFT has adapted them, computed in one product."""

    packed_weight: torch.Tensor
    lora_a: torch.Tensor
    """(lora width, inputs): A of every layer."""
    lora_b: torch.Tensor
    """(outputs, lora width): B of every layer times its scaling, block-diagonal."""

    def __init__(self, linears: Sequence[Any], lora_width: int) -> None:
        super().__init__()
        bases = [linear.get_base_layer() if isinstance(linear, LoraLayer) else linear for linear in linears]
        self.inputs: int = bases[0].in_features
        self.outputs: int = sum(base.out_features for base in bases)
        self.factors: list[LoraFactors] = []
        row, column = 0, 0
        for linear, base in zip(linears, bases, strict=True):
            rows = slice(row, row + base.out_features)
            if isinstance(linear, LoraLayer):
                name = linear.active_adapters[0]
                a, b = linear.lora_A[name].weight, linear.lora_B[name].weight
                self.factors.append(LoraFactors(a, b, linear.scaling[name], rows, slice(column, column + len(a))))
                column += len(a)
            row += base.out_features
        self.lora_width = lora_width
        self._pack_weights(bases)

    def _pack_weights(self, bases: Sequence[nn.Linear]) -> None:
        """W, B and A share one buffer (W top left, B right of it, A below), which both products read. The layers'
        weights become views of it, so that nothing is stored twice."""
        height, width = self.outputs + self.lora_width, self.inputs + self.lora_width
        packed = bases[0].weight.new_zeros(height, width + -width % ROW_ALIGNMENT)[:, :width]
        row = 0
        for base in bases:
            view = packed[row : row + base.out_features, : self.inputs]
            view.copy_(base.weight.data)
            base.weight.data = view
            row += base.out_features
        self.register_buffer("packed_weight", packed, persistent=False)
        self.lora_a, self.lora_b = packed[self.outputs :, : self.inputs], packed[: self.outputs, self.inputs :]

    @property
    def lora_parameters(self) -> list[torch.Tensor]:
        """A and B of every layer, in the order of `lora_gradients`."""
        return [parameter for factors in self.factors for parameter in (factors.a, factors.b)]

    def weight_copies(self) -> Iterator[WeightCopy]:
        """Parts of the packed weight to refresh after an optimizer step."""
        for factors in self.factors:
            yield WeightCopy(factors.a, self.lora_a[factors.columns])
            yield WeightCopy(factors.b, self.lora_b[factors.outputs, factors.columns], factors.scaling)

    def workspace(self, like: torch.Tensor, width: int) -> PackedInput:
        """An uninitialized packed input of as many rows as `like`, for `width` inputs or output gradients."""
        whole = width + self.lora_width
        buffer = like.new_empty(len(like), whole + -whole % ROW_ALIGNMENT)[:, :whole]
        return PackedInput(buffer[:, :width], buffer[:, width:], buffer)

    def pack(self, x: torch.Tensor) -> PackedInput:
        """A packed input that holds `x`."""
        packed = self.workspace(x, x.shape[1])
        ops.copy_rows(x, packed)
        return packed

    def matmul(self, packed: PackedInput, out: torch.Tensor) -> None:
        """(rows, inputs) -> (rows, outputs)."""
        if self.lora_width:
            torch.mm(packed.x, self.lora_a.t(), out=packed.projection)
        self._matmul(packed, out)

    def matmul_backward(self, d: PackedInput, out: torch.Tensor) -> None:
        """(rows, outputs) -> (rows, inputs)."""
        self.project_gradient(d)
        self._matmul_backward(d, out)

    def project_gradient(self, d: PackedInput) -> None:
        """dy B: the part of `matmul_backward` that the LoRA gradients need."""
        if self.lora_width:
            torch.mm(d.x, self.lora_b, out=d.projection)

    def lora_gradients(self, packed: PackedInput, d: PackedInput) -> list[torch.Tensor]:
        """Gradients of A and B of every layer, after `matmul` and `project_gradient`."""
        gradients = []
        if self.factors:
            d_a = _matmul_as(self.factors[0].a.dtype, d.projection.t(), packed.x)
            for factors in self.factors:
                d_b = _matmul_as(factors.b.dtype, d.x[:, factors.outputs].t(), packed.projection[:, factors.columns])
                gradients += [d_a[factors.columns], d_b.mul_(factors.scaling) if factors.scaling != 1 else d_b]
        return gradients

    def _weight(self) -> torch.Tensor:
        return self.packed_weight

    def _matmul(self, packed: PackedInput, out: torch.Tensor) -> None:
        assert packed.buffer is not None
        torch.mm(packed.buffer, self._weight()[: self.outputs].t(), out=out)

    def _matmul_backward(self, d: PackedInput, out: torch.Tensor) -> None:
        assert d.buffer is not None
        torch.mm(d.buffer, self._weight()[:, : self.inputs], out=out)


class DequantizedLinearGroup(FusedLinearGroup):
    """Group of int8 or nf4 layers: the packed weight is dequantized for each product and freed after it."""

    def _pack_weights(self, bases: Sequence[nn.Linear]) -> None:
        # In a list, so that `parameters()` does not find them: the model holds them already.
        self._bases = cast(list[QuantizedLinear], list(bases))
        like = self._bases[0].weight
        self.register_buffer("lora_a", like.new_zeros(self.lora_width, self.inputs), persistent=False)
        self.register_buffer("lora_b", like.new_zeros(self.outputs, self.lora_width), persistent=False)

    def _weight(self) -> torch.Tensor:
        height, width = self.outputs + self.lora_width, self.inputs + self.lora_width
        packed = self.lora_a.new_empty(height, width + -width % ROW_ALIGNMENT)[:, :width]
        torch.cat([base.dequantize() for base in self._bases], out=packed[: self.outputs, : self.inputs])
        packed[: self.outputs, self.inputs :] = self.lora_b
        packed[self.outputs :, : self.inputs] = self.lora_a
        return packed


class Fp8LinearGroup(DequantizedLinearGroup):
    """Group of fp8 layers, multiplied as fp8 including LoRA: W and the parts of B in one buffer, W' and the parts of A'
    in another. The products with A and B alone, and the LoRA gradients, are in the compute type."""

    codes: torch.Tensor
    """(outputs, inputs + FP8_PARTS * lora width)"""
    scale: torch.Tensor
    """(outputs, 1)"""
    codes_back: torch.Tensor
    """(inputs, outputs + FP8_PARTS * lora width)"""
    scale_back: torch.Tensor
    """(inputs, 1)"""

    def _pack_weights(self, bases: Sequence[nn.Linear]) -> None:
        super()._pack_weights(bases)
        layers = cast(list[Fp8Linear], self._bases)
        self._join("codes", "scale", self.outputs, self.inputs, layers, dim=0)
        self._join("codes_back", "scale_back", self.inputs, self.outputs, layers, dim=1)

    def _join(self, codes: str, scale: str, rows: int, columns: int, layers: Sequence[Fp8Linear], dim: int) -> None:
        """One buffer for the layers' codes, which become views of it. Scales are powers of two, so that nothing is
        rounded again, and larger than W needs by `FP8_HEADROOM`."""
        scales = [getattr(layer, scale) for layer in layers]
        largest = torch.cat(scales) if dim == 0 else torch.stack(scales).amax(0)
        common = FP8_HEADROOM * torch.exp2(largest.log2().ceil())
        joined = getattr(layers[0], codes).new_zeros(rows, columns + FP8_PARTS * self.lora_width)
        start = 0
        for layer, old_scale in zip(layers, scales, strict=True):
            span = slice(start, start + layer.out_features)
            view, new_scale = (joined[span, :columns], common[span]) if dim == 0 else (joined[:, span], common)
            view.copy_(getattr(layer, codes).float() * (old_scale / new_scale))
            setattr(layer, codes, view)
            setattr(layer, scale, new_scale)
            start += layer.out_features
        self.register_buffer(codes, joined, persistent=False)
        self.register_buffer(scale, common, persistent=False)

    def weight_copies(self) -> Iterator[WeightCopy]:
        yield from super().weight_copies()
        codes_b = self.codes[:, self.inputs :].view(self.outputs, FP8_PARTS, self.lora_width)
        codes_a = self.codes_back[:, self.outputs :].view(self.inputs, FP8_PARTS, self.lora_width)
        for factors in self.factors:
            b = codes_b[factors.outputs, :, factors.columns].transpose(0, 1)
            yield WeightCopy(factors.b, b, factors.scaling, self.scale[factors.outputs], scale_dim=0)
            a = codes_a[:, :, factors.columns].permute(1, 2, 0)
            yield WeightCopy(factors.a, a, 1.0, self.scale_back, scale_dim=1)

    def workspace(self, like: torch.Tensor, width: int) -> PackedInput:
        return self._fp8_input(like.new_empty(len(like), width))

    def pack(self, x: torch.Tensor) -> PackedInput:
        # `x` itself is not copied: only codes and projection must be contiguous.
        packed = self._fp8_input(x.contiguous())
        ops.copy_rows(x, packed)
        return packed

    def _fp8_input(self, x: torch.Tensor) -> PackedInput:
        rows, width = x.shape
        codes = x.new_empty(rows, width + FP8_PARTS * self.lora_width, dtype=self.codes.dtype)
        scale = x.new_empty(rows, 1, dtype=torch.float32)
        return PackedInput(x, x.new_empty(rows, self.lora_width), None, codes, scale)

    def _matmul(self, packed: PackedInput, out: torch.Tensor) -> None:
        _matmul_fp8(packed, self.codes, self.scale, out)

    def _matmul_backward(self, d: PackedInput, out: torch.Tensor) -> None:
        _matmul_fp8(d, self.codes_back, self.scale_back, out)


def _matmul_fp8(packed: PackedInput, codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Packed fp8 rows times the transpose of fp8 weights."""
    ops.append_fp8_projection(packed)
    assert packed.codes is not None and packed.scale is not None
    if supports_fp8(out.device) and len(out):
        # With row scales `scaled_mm` returns bf16 only.
        y = out if out.dtype == torch.bfloat16 else out.new_empty(out.shape, dtype=torch.bfloat16)
        # It also wants aligned scales, which those of the audio rows may not be.
        aligned = packed.scale.data_ptr() % SCALE_ALIGNMENT_BYTES == 0
        row_scale = packed.scale if aligned else packed.scale.clone()
        scaled_mm(packed.codes, codes.t(), row_scale, scale.t(), y.dtype, out=y)
    else:
        y = (packed.codes.float() @ codes.float().t()) * packed.scale * scale.t()
    if y is not out:
        out.copy_(y)


def make_linear_group(linears: Sequence[Any], *siblings: Sequence[Any]) -> FusedLinearGroup:
    """The group for layers as they are stored. Its LoRA width is the largest among it and its `siblings`, so that rows
    of all of them fit one buffer."""
    base = linears[0].get_base_layer() if isinstance(linears[0], LoraLayer) else linears[0]
    lora_width = max(_lora_width(group) for group in (linears, *siblings))
    if isinstance(base, Fp8Linear):
        return Fp8LinearGroup(linears, lora_width)
    return (DequantizedLinearGroup if isinstance(base, QuantizedLinear) else FusedLinearGroup)(linears, lora_width)


def _lora_width(linears: Sequence[Any]) -> int:
    """Sum of the ranks, aligned."""
    ranks: int = sum(linear.r[linear.active_adapters[0]] for linear in linears if isinstance(linear, LoraLayer))
    return ranks + -ranks % LORA_ALIGNMENT


def _matmul_as(dtype: torch.dtype, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A product in the type of the parameter it is a gradient of; it is accumulated in fp32 anyway."""
    if left.is_cuda and left.dtype != dtype == torch.float32:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)
