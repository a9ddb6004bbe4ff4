"""Memory-bound operations between the matrix products of a fused LoRA layer: one pass over memory each.

Plain torch, as the reference and for any device; on a CUDA GPU with Triton each one is a kernel of `kernels.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from myna.models.quantized import E4M3
from myna.models.triton_support import supports_triton

FP8_MAX = 448.0
"""The largest number of fp8 (e4m3)."""
FP8_PARTS = 3
"""fp8 columns per LoRA column. A single one would leave LoRA activations three mantissa bits, and unfused layers do not
quantize them at all. So a value is stored as its fp8 rounding and its residual as a second fp8. Only the product of two
residuals is negligible: inputs hold (rounded, residual, rounded) where weights hold (rounded, rounded, residual)."""
MIN_ROW_ABSMAX = 1e-12
"""Lower bound of a row's largest magnitude, so that a row of zeros has a scale."""


class ModalityNorms(NamedTuple):
    """The text and audio RMS norm weights at one place of a layer."""

    text: torch.Tensor
    audio: torch.Tensor
    eps: float

    def per_row(self, num_text: int, rows: int) -> torch.Tensor:
        """(rows, width): the norm weight of each row."""
        return torch.cat([self.text.expand(num_text, -1), self.audio.expand(rows - num_text, -1)]).float()


class PackedInput(NamedTuple):
    """Input rows of a fused matrix product: values, their LoRA projection, and both as fp8 if the weights are fp8.

    An operation writes `x` with `codes` and `scale`; the projection follows in `linear.py`.
    """

    x: torch.Tensor
    """(rows, width)"""
    projection: torch.Tensor
    """(rows, lora width)"""
    buffer: torch.Tensor | None = None
    """(rows, width + lora width): both, contiguous within a row."""
    codes: torch.Tensor | None = None
    """(rows, width + FP8_PARTS * lora width): both as fp8, the projection in parts."""
    scale: torch.Tensor | None = None
    """(rows, 1): the factor of the fp8 codes."""

    def select(self, rows: slice) -> PackedInput:
        return PackedInput(*(None if field is None else field[rows] for field in self))  # type: ignore[arg-type]


@cache
def _kernels() -> Any:
    return __import__("myna.models.higgs_v2.fused.kernels", fromlist=["kernels"])


def add_rms_norm(
    stream: torch.Tensor,
    update: torch.Tensor | None,
    order: torch.Tensor | None,
    norms: ModalityNorms,
    num_text: int,
    out: PackedInput,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual add and RMS norm: row `order[i]` of the update is added to row i of the stream, its norm goes to `out`.

    Returns the new stream and the inverse RMS of each row.
    """
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
    d_normed: torch.Tensor,
    stream: torch.Tensor,
    inverse_rms: torch.Tensor,
    norms: ModalityNorms,
    num_text: int,
    d_stream: torch.Tensor,
    order: torch.Tensor | None = None,
    ordered: PackedInput | None = None,
) -> torch.Tensor:
    """Gradient of `add_rms_norm` with respect to the stream. Row i also goes to row `order[i]` of `ordered`."""
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


def rotate_qkv(
    qkv: torch.Tensor, order: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, size: int, rotated_heads: int
) -> torch.Tensor:
    """Rows in the given order, with rotary embedding of the first `rotated_heads` heads of `size`."""
    if supports_triton(qkv):
        return _kernels().launch_rotate_qkv(qkv, order, cos, sin, size, rotated_heads)  # type: ignore[no-any-return]
    heads = qkv[order].view(len(order), qkv.shape[1] // size, size)
    rotated, rest = heads[:, :rotated_heads], heads[:, rotated_heads:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([rotated, rest], dim=1).flatten(1)


def rotate_qkv_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    order: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: PackedInput,
) -> None:
    """Gradient of `rotate_qkv`, written to the rows `order` of `out`."""
    if supports_triton(dq):
        _kernels().launch_rotate_qkv_backward(dq, dk, dv, order, cos, sin, out)
        return
    rotated = torch.cat([dq, dk], dim=1)
    first, second = (rotated * sin).chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([second, -first], dim=-1)
    out.x[order] = torch.cat([rotated, dv], dim=1).flatten(1)
    _write_fp8(out)


def swiglu(gate_up: torch.Tensor, out: PackedInput) -> None:
    """silu of the first half of each row, times the second half."""
    if supports_triton(gate_up):
        _kernels().launch_swiglu(gate_up, out)
        return
    gate, up = gate_up.float().chunk(2, dim=1)
    out.x.copy_(torch.nn.functional.silu(gate) * up)
    _write_fp8(out)


def swiglu_backward(d: torch.Tensor, gate_up: torch.Tensor, out: PackedInput) -> None:
    """Gradient of `swiglu` with respect to `gate_up`."""
    if supports_triton(gate_up):
        _kernels().launch_swiglu_backward(d, gate_up, out)
        return
    gate, up = gate_up.float().chunk(2, dim=1)
    sigmoid, grad = torch.sigmoid(gate), d.float()
    out.x.copy_(torch.cat([grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid], dim=1))
    _write_fp8(out)


def copy_rows(x: torch.Tensor, out: PackedInput) -> None:
    """Copy rows into a packed input; `out.x` may be the same tensor, then only the fp8 codes are written."""
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
    """Write the LoRA projection behind the fp8 codes; a row whose scale is too small for it is quantized again."""
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


def _fp8_and_residual(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values rounded to fp8, and the residual rounded to fp8, both in the type they came in."""
    rounded = _round_to_fp8(values)
    return rounded, _round_to_fp8(values - rounded)


def _round_to_fp8(values: torch.Tensor) -> torch.Tensor:
    """Saturating, as the hardware is; not every version of torch is."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(E4M3).to(values.dtype)


class WeightCopy(NamedTuple):
    """A parameter and its copy in another type, kept up to date: times `factor`, divided by `scale`."""

    source: torch.Tensor
    target: torch.Tensor
    """Of the parameter's shape. With a scale it is (FP8_PARTS, *shape), as fp8."""
    factor: float = 1.0
    scale: torch.Tensor | None = None
    scale_dim: int = 0
    """The dimension that `scale` runs along."""


class WeightCopies:
    """The copies of all LoRA parameters in the packed weights, refreshed by one kernel launch per type."""

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
        # A parameter's memory may be replaced, if seldom.
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
