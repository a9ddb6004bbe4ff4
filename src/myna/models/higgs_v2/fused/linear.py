"""Matrix products with LoRA and the memory-bound operations between them, for the fused layer.

Operations are plain torch, as the reference and for any device; on a CUDA GPU with Triton each one is a kernel of
`kernels.py` that passes over memory once. A `FusedLinearGroup` computes the products of linear layers with a common
input, LoRA included, as one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from myna.core.compat import scaled_mm
from myna.core.device import supports_triton
from myna.models.quantized import E4M3, Fp8Linear, QuantizedLinear, supports_fp8

FP8_MAX = 448.0
"""Largest number of fp8 (e4m3)."""
FP8_PARTS = 3
"""fp8 columns per LoRA column. A single one would leave LoRA activations three mantissa bits, while unfused layers
do not quantize them at all. So a value is stored as its fp8 rounding and its residual as a second fp8. Only the
product of two residuals is negligible: inputs hold (rounded, residual, rounded) where weights hold (rounded,
rounded, residual)."""
MIN_ROW_ABSMAX = 1e-12
"""Lower bound of a row's largest magnitude, so that a row of zeros has a scale."""
LORA_ALIGNMENT = 16
"""Number of LoRA columns of a group is a multiple of this, which tensor cores need."""
ROW_ALIGNMENT = 64
"""Number of elements that rows begin at multiples of, for the same reason."""
SCALE_ALIGNMENT_BYTES = 16
"""Alignment of the address of fp8 row scales."""
FP8_HEADROOM = 64
"""Factor by which B may exceed its row's largest weight before fp8 saturates; it costs almost no precision."""


class ModalityNorms(NamedTuple):
    """Text and audio RMS norm weights at one place of a layer."""

    text: Tensor
    audio: Tensor
    eps: float

    def per_row(self, num_text: int, rows: int) -> Tensor:
        """(rows, width): norm weight of each row."""
        return torch.cat([self.text.expand(num_text, -1), self.audio.expand(rows - num_text, -1)]).float()


class PackedInput(NamedTuple):
    """Input rows of a fused matrix product: values, their LoRA projection, and both as fp8 if the weights are fp8. An
    operation writes `x` with `codes` and `scale`; the product adds the projection."""

    x: Tensor
    """(rows, width)"""
    projection: Tensor
    """(rows, lora width)"""
    buffer: Tensor | None = None
    """(rows, width + lora width): `x` and `projection`, contiguous within a row."""
    codes: Tensor | None = None
    """(rows, width + FP8_PARTS * lora width): `x` and `projection` as fp8, the projection in parts."""
    scale: Tensor | None = None
    """(rows, 1): factor of the fp8 codes."""

    def select(self, rows: slice) -> "PackedInput":
        return PackedInput(*(None if field is None else field[rows] for field in self))  # type: ignore[arg-type]


@cache
def _kernels() -> Any:
    return import_module("myna.models.higgs_v2.fused.kernels")


def add_rms_norm(
    stream: Tensor, update: Tensor | None, order: Tensor | None, norms: ModalityNorms, num_text: int, out: PackedInput
) -> tuple[Tensor, Tensor]:
    """Add row `order[i]` of the update to row i of the stream, with its RMS norm in `out`; returns stream and inverse
    RMS."""
    if supports_triton(stream):
        return _kernels().launch_add_rms_norm(stream, update, order, norms, num_text, out)  # type: ignore[no-any-return]
    if update is not None:
        stream = stream + (update if order is None else update[order])
    exact = stream.float()
    inverse_rms = torch.rsqrt(exact.square().mean(1) + norms.eps)
    out.x.copy_(exact * inverse_rms[:, None] * norms.per_row(num_text, len(stream)))
    _write_fp8(out)
    return stream, inverse_rms


def rms_norm_backward(
    d_normed: Tensor,
    stream: Tensor,
    inverse_rms: Tensor,
    norms: ModalityNorms,
    num_text: int,
    d_stream: Tensor,
    order: Tensor | None = None,
    ordered: PackedInput | None = None,
) -> Tensor:
    """Return the gradient of `add_rms_norm` for the stream. Row i also goes to row `order[i]` of `ordered`."""
    if supports_triton(stream):
        arguments = (d_normed, stream, inverse_rms, norms, num_text, d_stream, order, ordered)
        return _kernels().launch_rms_norm_backward(*arguments)  # type: ignore[no-any-return]
    grad = d_normed.float() * norms.per_row(num_text, len(stream))
    normed = stream.float() * inverse_rms[:, None]
    d = inverse_rms[:, None] * (grad - normed * (grad * normed).mean(1, keepdim=True))
    d = (d + d_stream).to(stream.dtype)
    if order is not None and ordered is not None:
        ordered.x[order] = d
        _write_fp8(ordered)
    return d


def rotate_qkv(qkv: Tensor, order: Tensor, cos: Tensor, sin: Tensor, size: int, rotated_heads: int) -> Tensor:
    """Return rows in the given order, with rotary embedding of the first `rotated_heads` heads of `size`."""
    if supports_triton(qkv):
        return _kernels().launch_rotate_qkv(qkv, order, cos, sin, size, rotated_heads)  # type: ignore[no-any-return]
    heads = qkv[order].view(len(order), qkv.shape[1] // size, size)
    rotated, rest = heads[:, :rotated_heads], heads[:, rotated_heads:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([rotated, rest], dim=1).flatten(1)


def rotate_qkv_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, order: Tensor, cos: Tensor, sin: Tensor, out: PackedInput
) -> None:
    """Write the gradient of `rotate_qkv` to the rows `order` of `out`."""
    if supports_triton(dq):
        _kernels().launch_rotate_qkv_backward(dq, dk, dv, order, cos, sin, out)
        return
    rotated = torch.cat([dq, dk], dim=1)
    first, second = (rotated * sin).chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([second, -first], dim=-1)
    out.x[order] = torch.cat([rotated, dv], dim=1).flatten(1)
    _write_fp8(out)


def swiglu(gate_up: Tensor, out: PackedInput) -> None:
    """Write silu of the first half of each row times the second half."""
    if supports_triton(gate_up):
        _kernels().launch_swiglu(gate_up, out)
        return
    gate, up = gate_up.float().chunk(2, dim=1)
    out.x.copy_(torch.nn.functional.silu(gate) * up)
    _write_fp8(out)


def swiglu_backward(d: Tensor, gate_up: Tensor, out: PackedInput) -> None:
    """Write the gradient of `swiglu` with respect to `gate_up`."""
    if supports_triton(gate_up):
        _kernels().launch_swiglu_backward(d, gate_up, out)
        return
    gate, up = gate_up.float().chunk(2, dim=1)
    sigmoid, grad = torch.sigmoid(gate), d.float()
    out.x.copy_(torch.cat([grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid], dim=1))
    _write_fp8(out)


def copy_rows(x: Tensor, out: PackedInput) -> None:
    """Copy rows into a packed input. `out.x` may be the same tensor; then only the fp8 codes are written."""
    if supports_triton(x):
        _kernels().launch_copy_rows(x, out)
        return
    out.x.copy_(x)
    _write_fp8(out)


def _write_fp8(out: PackedInput) -> None:
    if out.codes is not None and out.scale is not None:
        values = out.x.float()
        out.scale.copy_(values.abs().amax(1, keepdim=True).clamp(min=MIN_ROW_ABSMAX) / FP8_MAX)
        out.codes[:, : values.shape[1]] = (values / out.scale).to(out.codes.dtype)


def append_fp8_projection(packed: PackedInput) -> None:
    """Write the LoRA projection after the fp8 codes. A row whose scale is too small for it is quantized again."""
    assert packed.codes is not None and packed.scale is not None
    if not packed.projection.shape[1]:
        return
    if supports_triton(packed.x):
        _kernels().launch_append_fp8_projection(packed)
        return
    projection = packed.projection.float()
    packed.scale.copy_(torch.maximum(packed.scale, projection.abs().amax(1, keepdim=True) / FP8_MAX))
    rounded, residual = _fp8_and_residual(projection / packed.scale)
    packed.codes.copy_(torch.cat([packed.x.float() / packed.scale, rounded, residual, rounded], dim=1))


def _fp8_and_residual(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return values rounded to fp8, and the residual rounded to fp8, both in the type of the values."""

    def round_to_fp8(x: Tensor) -> Tensor:
        # Clamped, because the hardware saturates and not every version of torch does.
        return x.clamp(-FP8_MAX, FP8_MAX).to(E4M3).to(x.dtype)

    rounded = round_to_fp8(values)
    return rounded, round_to_fp8(values - rounded)


class WeightCopy(NamedTuple):
    """Parameter and its copy in another type, kept up to date: times `factor`, divided by `scale`."""

    source: Tensor
    target: Tensor
    """Copy, in the parameter's shape. With a scale it is (FP8_PARTS, *shape), as fp8."""
    factor: float = 1.0
    scale: Tensor | None = None
    scale_dim: int = 0
    """Dimension that `scale` runs along."""


class WeightCopies:
    """Copies of all LoRA parameters in the packed weights, refreshed by one kernel launch per type."""

    def __init__(self, copies: list[WeightCopy]) -> None:
        self.copies = copies
        self._source_pointers: tuple[int, ...] = ()
        self._tables: list[tuple[Any, ...]] = []

    @torch.no_grad()
    def refresh(self) -> None:
        if not self.copies:
            return
        if not supports_triton(self.copies[0].target):
            for source, target, factor, scale, scale_dim in self.copies:
                value = source.float() * factor
                if scale is not None:
                    rounded, residual = _fp8_and_residual(value / scale.view((-1, 1) if scale_dim == 0 else (1, -1)))
                    value = torch.stack([rounded, rounded, residual])
                target.copy_(value)
            return
        # The memory of a parameter may be replaced, though rarely.
        pointers = tuple(copy.source.data_ptr() for copy in self.copies)
        if pointers != self._source_pointers:
            self._source_pointers, self._tables = pointers, self._pointer_tables()
        for table in self._tables:
            _kernels().launch_weight_copies(*table)

    def _pointer_tables(self) -> list[tuple[Any, ...]]:
        by_type: dict[tuple[torch.dtype, torch.dtype, bool], list[WeightCopy]] = {}
        for copy in self.copies:
            by_type.setdefault((copy.source.dtype, copy.target.dtype, copy.scale is not None), []).append(copy)
        tables = []
        for types, copies in by_type.items():
            lines = [
                [
                    *(copy.source.data_ptr(), copy.target.data_ptr()),
                    *copy.source.shape,
                    *copy.target.stride()[-2:],
                    copy.target.stride(0),
                    0 if copy.scale is None else copy.scale.data_ptr(),
                    copy.scale_dim,
                ]
                for copy in copies
            ]
            assert all(copy.source.is_contiguous() for copy in copies)
            device, max_elements = copies[0].target.device, max(copy.source.numel() for copy in copies)
            factors = torch.tensor([copy.factor for copy in copies], dtype=torch.float32, device=device)
            table = torch.tensor(lines, dtype=torch.int64, device=device)
            tables.append((table, factors, max_elements, *types))
        return tables


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """PEFT's LoRA of one linear layer, and its place in its group."""

    a: Tensor
    b: Tensor
    scaling: float
    outputs: slice
    columns: slice
    """Columns of this layer among the LoRA columns of the group."""


class FusedLinearGroup(nn.Module):
    """Linear layers with a common input, as PEFT has adapted them, computed in one product."""

    packed_weight: Tensor
    lora_a: Tensor
    """(lora width, inputs): A of every layer."""
    lora_b: Tensor
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
        """Put W, B and A into one buffer (W top left, B right of it, A below), of which the weights become views."""
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
    def lora_parameters(self) -> list[Tensor]:
        """Return A and B of every layer, in the order of `lora_gradients`."""
        return [parameter for factors in self.factors for parameter in (factors.a, factors.b)]

    def weight_copies(self) -> Iterator[WeightCopy]:
        """Yield the parts of the packed weight to refresh after an optimizer step."""
        for factors in self.factors:
            yield WeightCopy(factors.a, self.lora_a[factors.columns])
            yield WeightCopy(factors.b, self.lora_b[factors.outputs, factors.columns], factors.scaling)

    def workspace(self, like: Tensor, width: int) -> PackedInput:
        """Return an uninitialized packed input with the rows of `like`, for `width` inputs or output gradients."""
        whole = width + self.lora_width
        buffer = like.new_empty(len(like), whole + -whole % ROW_ALIGNMENT)[:, :whole]
        return PackedInput(buffer[:, :width], buffer[:, width:], buffer)

    def pack(self, x: Tensor) -> PackedInput:
        """Return a packed input that holds `x`."""
        packed = self.workspace(x, x.shape[1])
        copy_rows(x, packed)
        return packed

    def matmul(self, packed: PackedInput, out: Tensor) -> None:
        """Multiply (rows, inputs) to (rows, outputs)."""
        if self.lora_width:
            torch.mm(packed.x, self.lora_a.t(), out=packed.projection)
        self._matmul(packed, out)

    def matmul_backward(self, d: PackedInput, out: Tensor) -> None:
        """Multiply (rows, outputs) to (rows, inputs)."""
        self.project_gradient(d)
        self._matmul_backward(d, out)

    def project_gradient(self, d: PackedInput) -> None:
        """Compute dy B, the part of `matmul_backward` that the LoRA gradients need."""
        if self.lora_width:
            torch.mm(d.x, self.lora_b, out=d.projection)

    def lora_gradients(self, packed: PackedInput, d: PackedInput) -> list[Tensor]:
        """Return the gradients of A and B of every layer, after `matmul` and `project_gradient`."""
        gradients = []
        if self.factors:
            d_a = _matmul_as(self.factors[0].a.dtype, d.projection.t(), packed.x)
            for factors in self.factors:
                d_b = _matmul_as(factors.b.dtype, d.x[:, factors.outputs].t(), packed.projection[:, factors.columns])
                gradients += [d_a[factors.columns], d_b.mul_(factors.scaling) if factors.scaling != 1 else d_b]
        return gradients

    def _weight(self) -> Tensor:
        return self.packed_weight

    def _matmul(self, packed: PackedInput, out: Tensor) -> None:
        assert packed.buffer is not None
        torch.mm(packed.buffer, self._weight()[: self.outputs].t(), out=out)

    def _matmul_backward(self, d: PackedInput, out: Tensor) -> None:
        assert d.buffer is not None
        torch.mm(d.buffer, self._weight()[:, : self.inputs], out=out)


class DequantizedLinearGroup(FusedLinearGroup):
    """Group of int8 or nf4 layers. The packed weight is dequantized for each product and freed after it."""

    def _pack_weights(self, bases: Sequence[nn.Linear]) -> None:
        # A list hides them from `parameters()`, since the model holds them already.
        self._bases = cast(list[QuantizedLinear], list(bases))
        like = self._bases[0].weight
        self.register_buffer("lora_a", like.new_zeros(self.lora_width, self.inputs), persistent=False)
        self.register_buffer("lora_b", like.new_zeros(self.outputs, self.lora_width), persistent=False)

    def _weight(self) -> Tensor:
        height, width = self.outputs + self.lora_width, self.inputs + self.lora_width
        packed = self.lora_a.new_empty(height, width + -width % ROW_ALIGNMENT)[:, :width]
        torch.cat([base.dequantize() for base in self._bases], out=packed[: self.outputs, : self.inputs])
        packed[: self.outputs, self.inputs :] = self.lora_b
        packed[self.outputs :, : self.inputs] = self.lora_a
        return packed


class Fp8LinearGroup(DequantizedLinearGroup):
    """Group of fp8 layers, multiplied as fp8 including LoRA: W and the parts of B in one buffer, W' and the parts of A'
    in another. The products with A and B alone, and the LoRA gradients, are in the compute type."""

    codes: Tensor
    """(outputs, inputs + FP8_PARTS * lora width)"""
    scale: Tensor
    """(outputs, 1)"""
    codes_back: Tensor
    """(inputs, outputs + FP8_PARTS * lora width)"""
    scale_back: Tensor
    """(inputs, 1)"""

    def _pack_weights(self, bases: Sequence[nn.Linear]) -> None:
        super()._pack_weights(bases)
        layers = cast(list[Fp8Linear], self._bases)
        self._join("codes", "scale", self.outputs, self.inputs, layers, dim=0)
        self._join("codes_back", "scale_back", self.inputs, self.outputs, layers, dim=1)

    def _join(self, codes: str, scale: str, rows: int, columns: int, layers: Sequence[Fp8Linear], dim: int) -> None:
        """Join the layers' codes in one buffer; the layers keep views of it. Scales are powers of two, so that nothing
        is rounded again, and larger than W needs by `FP8_HEADROOM`."""
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

    def workspace(self, like: Tensor, width: int) -> PackedInput:
        return self._fp8_input(like.new_empty(len(like), width))

    def pack(self, x: Tensor) -> PackedInput:
        # `x` itself is not copied: only codes and projection must be contiguous.
        packed = self._fp8_input(x.contiguous())
        copy_rows(x, packed)
        return packed

    def _fp8_input(self, x: Tensor) -> PackedInput:
        rows, width = x.shape
        codes = x.new_empty(rows, width + FP8_PARTS * self.lora_width, dtype=self.codes.dtype)
        scale = x.new_empty(rows, 1, dtype=torch.float32)
        return PackedInput(x, x.new_empty(rows, self.lora_width), None, codes, scale)

    def _matmul(self, packed: PackedInput, out: Tensor) -> None:
        _matmul_fp8(packed, self.codes, self.scale, out)

    def _matmul_backward(self, d: PackedInput, out: Tensor) -> None:
        _matmul_fp8(d, self.codes_back, self.scale_back, out)


def _matmul_fp8(packed: PackedInput, codes: Tensor, scale: Tensor, out: Tensor) -> None:
    """Multiply packed fp8 rows by the transpose of fp8 weights."""
    append_fp8_projection(packed)
    assert packed.codes is not None and packed.scale is not None
    if supports_fp8(out.device) and len(out):
        # With row scales `scaled_mm` returns bf16 only.
        y = out if out.dtype == torch.bfloat16 else out.new_empty(out.shape, dtype=torch.bfloat16)
        # It also needs aligned scales, and those of the audio rows may not be.
        aligned = packed.scale.data_ptr() % SCALE_ALIGNMENT_BYTES == 0
        row_scale = packed.scale if aligned else packed.scale.clone()
        scaled_mm(packed.codes, codes.t(), row_scale, scale.t(), y.dtype, out=y)
    else:
        y = (packed.codes.float() @ codes.float().t()) * packed.scale * scale.t()
    if y is not out:
        out.copy_(y)


def make_linear_group(linears: Sequence[Any], *siblings: Sequence[Any]) -> FusedLinearGroup:
    """Make the group for layers as they are stored. Rows of the group and its `siblings` have one LoRA width."""
    base = linears[0].get_base_layer() if isinstance(linears[0], LoraLayer) else linears[0]
    adapted = [[x for x in group if isinstance(x, LoraLayer)] for group in (linears, *siblings)]
    ranks: int = max(sum(x.r[x.active_adapters[0]] for x in group) for group in adapted)
    lora_width = ranks + -ranks % LORA_ALIGNMENT
    if isinstance(base, Fp8Linear):
        return Fp8LinearGroup(linears, lora_width)
    return (DequantizedLinearGroup if isinstance(base, QuantizedLinear) else FusedLinearGroup)(linears, lora_width)


def _matmul_as(dtype: torch.dtype, left: Tensor, right: Tensor) -> Tensor:
    """Multiply in the type of the parameter that the result is a gradient of. It is accumulated in fp32 in any case."""
    if left.is_cuda and left.dtype != dtype == torch.float32:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)
