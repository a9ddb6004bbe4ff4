"""Triton kernels of the operations in `linear.py`; each element is read and written once.

Imported only with a CUDA device and Triton. One program handles one row, so any row count runs without recompilation.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from myna.models.higgs_v2.fused.linear import FP8_MAX, FP8_PARTS, MIN_ROW_ABSMAX, ModalityNorms, PackedInput

SWIGLU_BLOCK_SIZE = 2048
COPY_BLOCK_SIZE = 1024
_FP8_MAX = tl.constexpr(FP8_MAX)
_MIN_ROW_ABSMAX = tl.constexpr(MIN_ROW_ABSMAX)


@triton.jit
def _store_fp8_row(values, absmax, inside, codes, scale):
    """Store one row as fp8 codes with its scale."""
    step = tl.maximum(absmax, _MIN_ROW_ABSMAX) / _FP8_MAX
    tl.store(scale, step)
    tl.store(codes, (values / step).to(codes.dtype.element_ty), mask=inside)


def _fp8_arguments(out: PackedInput) -> dict[str, Any]:
    """Return the kernel arguments for fp8 codes; without codes any valid pointer is passed."""
    codes = out.x if out.codes is None else out.codes
    scale = out.x if out.scale is None else out.scale
    write_fp8 = out.codes is not None and out.scale is not None
    return {"codes": codes, "scale": scale, "code_stride": codes.stride(0), "WRITE_FP8": write_fp8}


def _whole_row(width: int) -> dict[str, int]:
    return {"BLOCK": triton.next_power_of_2(width), "num_warps": 8}


@triton.jit
def _add_rms_norm_kernel(
    stream, update, order, text, audio, added, out, inverse_rms, num_text, width, out_stride, eps, codes, scale,
    code_stride,
    HAS_UPDATE: tl.constexpr, HAS_ORDER: tl.constexpr, WRITE_FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(stream + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        source = row
        if HAS_ORDER:
            source = tl.load(order + row)
        x += tl.load(update + source * width + column, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(added.dtype.element_ty)
        tl.store(added + row * width + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    tl.store(inverse_rms + row, factor)
    if row < num_text:
        weight = tl.load(text + column, mask=inside, other=0.0).to(tl.float32)
    else:
        weight = tl.load(audio + column, mask=inside, other=0.0).to(tl.float32)
    normed = x * factor * weight
    tl.store(out + row * out_stride + column, normed.to(out.dtype.element_ty), mask=inside)
    if WRITE_FP8:
        absmax = tl.max(tl.abs(normed), axis=0)
        _store_fp8_row(normed, absmax, inside, codes + row * code_stride + column, scale + row)


def launch_add_rms_norm(
    stream: Tensor, update: Tensor | None, order: Tensor | None, norms: ModalityNorms, num_text: int, out: PackedInput
) -> tuple[Tensor, Tensor]:
    rows, width = stream.shape
    inverse_rms = stream.new_empty(rows, dtype=torch.float32)
    added = torch.empty_like(stream) if update is not None else stream
    inputs = (stream, stream if update is None else update, stream if order is None else order, norms.text, norms.audio)
    _add_rms_norm_kernel[(rows,)](
        *(*inputs, added, out.x, inverse_rms, num_text, width, out.x.stride(0), norms.eps),
        **{"HAS_UPDATE": update is not None, "HAS_ORDER": order is not None},
        **_fp8_arguments(out),
        **_whole_row(width),
    )
    return added, inverse_rms


@triton.jit
def _rms_norm_backward_kernel(
    d_normed, stream, inverse_rms, d_stream, text, audio, out, order, ordered, num_text, width, ordered_stride, codes,
    scale, code_stride,
    HAS_ORDER: tl.constexpr, WRITE_FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    factor = tl.load(inverse_rms + row)
    if row < num_text:
        weight = tl.load(text + column, mask=inside, other=0.0).to(tl.float32)
    else:
        weight = tl.load(audio + column, mask=inside, other=0.0).to(tl.float32)
    normed = tl.load(stream + at, mask=inside, other=0.0).to(tl.float32) * factor
    grad = tl.load(d_normed + at, mask=inside, other=0.0).to(tl.float32) * weight
    mean = tl.sum(grad * normed, axis=0) / width
    d = factor * (grad - normed * mean) + tl.load(d_stream + at, mask=inside, other=0.0).to(tl.float32)
    rounded = d.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=inside)
    if HAS_ORDER:
        place = tl.load(order + row)
        tl.store(ordered + place * ordered_stride + column, rounded, mask=inside)
        if WRITE_FP8:
            absmax = tl.max(tl.abs(d), axis=0)
            _store_fp8_row(d, absmax, inside, codes + place * code_stride + column, scale + place)


def launch_rms_norm_backward(
    d_normed: Tensor,
    stream: Tensor,
    inverse_rms: Tensor,
    norms: ModalityNorms,
    num_text: int,
    d_stream: Tensor,
    order: Tensor | None,
    ordered: PackedInput | None,
) -> Tensor:
    rows, width = stream.shape
    out = torch.empty_like(stream)
    ordered = PackedInput(out, out) if ordered is None else ordered
    _rms_norm_backward_kernel[(rows,)](
        *(d_normed, stream, inverse_rms, d_stream.contiguous(), norms.text, norms.audio),
        *(out, stream if order is None else order, ordered.x, num_text, width, ordered.x.stride(0)),
        HAS_ORDER=order is not None,
        **_fp8_arguments(ordered),
        **_whole_row(width),
    )
    return out


@triton.jit
def _rotate_qkv_kernel(qkv, order, cos, sin, out, heads, rotated_heads, HALF: tl.constexpr, HEADS: tl.constexpr):
    position = tl.program_id(0).to(tl.int64)
    source = tl.load(order + position)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (column < HALF)
    width = heads * 2 * HALF
    first_at = head * 2 * HALF + column
    first = tl.load(qkv + source * width + first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + source * width + first_at + HALF, mask=inside, other=0.0).to(tl.float32)
    # Value heads are not rotated: angle 0.
    c = tl.where(head < rotated_heads, tl.load(cos + position * 2 * HALF + column).to(tl.float32), 1.0)
    s = tl.where(head < rotated_heads, tl.load(sin + position * 2 * HALF + column).to(tl.float32), 0.0)
    tl.store(out + position * width + first_at, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + position * width + first_at + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


def launch_rotate_qkv(qkv: Tensor, order: Tensor, cos: Tensor, sin: Tensor, size: int, rotated_heads: int) -> Tensor:
    heads, out = qkv.shape[1] // size, torch.empty_like(qkv)
    sizes = {"HALF": size // 2, "HEADS": triton.next_power_of_2(heads), "num_warps": 4}
    _rotate_qkv_kernel[(len(qkv),)](qkv, order, cos, sin, out, heads, rotated_heads, **sizes)
    return out


@triton.jit
def _rotate_qkv_backward_kernel(
    dq, dk, dv, order, cos, sin, out, queries, keys, out_stride, codes, scale, code_stride,
    WRITE_FP8: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0).to(tl.int64)
    place = tl.load(order + position)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    at = out + place * out_stride + head * 2 * HALF + column
    c = tl.load(cos + position * 2 * HALF + column).to(tl.float32)
    s = tl.load(sin + position * 2 * HALF + column).to(tl.float32)

    is_query = head < queries
    read = dq + (position * queries + head) * 2 * HALF + column
    first = tl.load(read, mask=is_query, other=0.0).to(tl.float32)
    second = tl.load(read + HALF, mask=is_query, other=0.0).to(tl.float32)
    is_key = (head >= queries) & (head < queries + keys)
    read = dk + (position * keys + head - queries) * 2 * HALF + column
    first += tl.load(read, mask=is_key, other=0.0).to(tl.float32)
    second += tl.load(read + HALF, mask=is_key, other=0.0).to(tl.float32)
    is_value = (head >= queries + keys) & (head < queries + 2 * keys)
    read = dv + (position * keys + head - queries - keys) * 2 * HALF + column
    first += tl.load(read, mask=is_value, other=0.0).to(tl.float32)
    second += tl.load(read + HALF, mask=is_value, other=0.0).to(tl.float32)

    c = tl.where(is_value, 1.0, c)
    s = tl.where(is_value, 0.0, s)
    inside = head < queries + 2 * keys
    inside &= column < HALF
    left, right = first * c + second * s, second * c - first * s
    tl.store(at, left.to(out.dtype.element_ty), mask=inside)
    tl.store(at + HALF, right.to(out.dtype.element_ty), mask=inside)
    if WRITE_FP8:
        absmax = tl.max(tl.maximum(tl.abs(left), tl.abs(right)))
        line = codes + place * code_stride + head * 2 * HALF + column
        _store_fp8_row(left, absmax, inside, line, scale + place)
        _store_fp8_row(right, absmax, inside, line + HALF, scale + place)


def launch_rotate_qkv_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, order: Tensor, cos: Tensor, sin: Tensor, out: PackedInput
) -> None:
    positions, queries, size = dq.shape
    keys = dk.shape[1]
    _rotate_qkv_backward_kernel[(positions,)](
        *(dq.contiguous(), dk.contiguous(), dv.contiguous(), order, cos, sin, out.x, queries, keys, out.x.stride(0)),
        **_fp8_arguments(out),
        **{"HALF": size // 2, "HEADS": triton.next_power_of_2(queries + 2 * keys), "num_warps": 4},
    )


@triton.jit
def _swiglu_kernel(
    gate_up, out, width, out_stride, codes, scale, code_stride,
    WRITE_FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    activated = gate * tl.sigmoid(gate) * up
    tl.store(out + row * out_stride + column, activated.to(out.dtype.element_ty), mask=inside)
    if WRITE_FP8:
        absmax = tl.max(tl.abs(activated), axis=0)
        _store_fp8_row(activated, absmax, inside, codes + row * code_stride + column, scale + row)


def launch_swiglu(gate_up: Tensor, out: PackedInput) -> None:
    rows, width = out.x.shape
    if rows:
        grid, shape = _row_grid(rows, width, whole=out.codes is not None)
        _swiglu_kernel[grid](gate_up, out.x, width, out.x.stride(0), **_fp8_arguments(out), **shape)


@triton.jit
def _swiglu_backward_kernel(
    d, gate_up, out, width, d_stride, out_stride, codes, scale, code_stride,
    WRITE_FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(d + row * d_stride + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    d_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    d_up = grad * gate * sigmoid
    tl.store(out + row * out_stride + column, d_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(out + row * out_stride + width + column, d_up.to(out.dtype.element_ty), mask=inside)
    if WRITE_FP8:
        absmax = tl.max(tl.maximum(tl.abs(d_gate), tl.abs(d_up)), axis=0)
        line = codes + row * code_stride + column
        _store_fp8_row(d_gate, absmax, inside, line, scale + row)
        _store_fp8_row(d_up, absmax, inside, line + width, scale + row)


def launch_swiglu_backward(d: Tensor, gate_up: Tensor, out: PackedInput) -> None:
    rows, width = d.shape
    if rows:
        grid, shape = _row_grid(rows, width, whole=out.codes is not None)
        strides = d.stride(0), out.x.stride(0)
        _swiglu_backward_kernel[grid](d, gate_up, out.x, width, *strides, **_fp8_arguments(out), **shape)


def _row_grid(rows: int, width: int, *, whole: bool) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid: one program per row if the row maximum is needed, else one per block of a row."""
    block = triton.next_power_of_2(width) if whole else min(SWIGLU_BLOCK_SIZE, triton.next_power_of_2(width))
    return (rows, triton.cdiv(width, block)), {"BLOCK": block, "num_warps": 8 if block <= 4096 else 16}


@triton.jit
def _copy_rows_kernel(
    x, out, width, x_stride, out_stride, codes, scale, code_stride,
    COPIES: tl.constexpr, WRITE_FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if COPIES:
        tl.store(out + row * out_stride + column, values, mask=inside)
    if WRITE_FP8:
        values32 = values.to(tl.float32)
        absmax = tl.max(tl.abs(values32), axis=0)
        _store_fp8_row(values32, absmax, inside, codes + row * code_stride + column, scale + row)


def launch_copy_rows(x: Tensor, out: PackedInput) -> None:
    rows, width = x.shape
    if rows:
        _copy_rows_kernel[(rows,)](
            *(x, out.x, width, x.stride(0), out.x.stride(0)),
            COPIES=x.data_ptr() != out.x.data_ptr(),
            **_fp8_arguments(out),
            **_whole_row(width),
        )


@triton.jit
def _fp8_and_residual(values, TYPE: tl.constexpr):
    """Round a value to fp8, and return what is missing as another fp8."""
    rounded = values.to(TYPE)
    return rounded, (values - rounded.to(tl.float32)).to(TYPE)


@triton.jit
def _append_fp8_projection_kernel(
    x, projection, codes, scale, lora_width, x_stride, projection_stride, code_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, LORA_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, LORA_BLOCK)
    inside = column < lora_width
    projected = tl.load(projection + row * projection_stride + column, mask=inside, other=0.0).to(tl.float32)
    step = tl.load(scale + row)
    needed = tl.max(tl.abs(projected), axis=0) / _FP8_MAX
    if needed > step:
        step = needed
        tl.store(scale + row, step)
        for start in range(0, WIDTH, BLOCK):
            at = start + tl.arange(0, BLOCK)
            values = tl.load(x + row * x_stride + at, mask=at < WIDTH, other=0.0).to(tl.float32)
            tl.store(codes + row * code_stride + at, (values / step).to(codes.dtype.element_ty), mask=at < WIDTH)
    rounded, residual = _fp8_and_residual(projected / step, codes.dtype.element_ty)
    line = codes + row * code_stride + WIDTH + column
    tl.store(line, rounded, mask=inside)
    tl.store(line + lora_width, residual, mask=inside)
    tl.store(line + 2 * lora_width, rounded, mask=inside)


def launch_append_fp8_projection(packed: PackedInput) -> None:
    x, projection, _, codes, scale = packed
    (rows, width), lora_width = x.shape, projection.shape[1]
    assert codes is not None and codes.shape[1] == width + FP8_PARTS * lora_width
    if rows:
        _append_fp8_projection_kernel[(rows,)](
            *(x, projection, codes, scale, lora_width, x.stride(0), projection.stride(0), codes.stride(0)),
            **{"WIDTH": width, "BLOCK": 1024, "LORA_BLOCK": max(16, triton.next_power_of_2(lora_width))},
            num_warps=1,
        )


@triton.jit
def _weight_copies_kernel(
    table, factors, SOURCE: tl.constexpr, TARGET: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr
):
    entry = tl.program_id(0)
    line = table + entry * 9
    rows, columns = tl.load(line + 2), tl.load(line + 3)
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows * columns
    row, column = at // columns, at % columns
    source = tl.load(line).to(tl.pointer_type(SOURCE))
    value = tl.load(source + at, mask=inside, other=0.0).to(tl.float32) * tl.load(factors + entry)
    place = tl.load(line + 1).to(tl.pointer_type(TARGET)) + row * tl.load(line + 4) + column * tl.load(line + 5)
    if SCALED:
        part, scale = tl.load(line + 6), tl.load(line + 7).to(tl.pointer_type(tl.float32))
        along = tl.where(tl.load(line + 8) == 0, row, column)
        rounded, residual = _fp8_and_residual(value / tl.load(scale + along, mask=inside, other=1.0), TARGET)
        tl.store(place, rounded, mask=inside)
        tl.store(place + part, rounded, mask=inside)
        tl.store(place + 2 * part, residual, mask=inside)
    else:
        tl.store(place, value.to(TARGET), mask=inside)


_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
}


def launch_weight_copies(
    table: Tensor, factors: Tensor, max_elements: int, source: torch.dtype, target: torch.dtype, scaled: bool
) -> None:
    grid = (len(table), triton.cdiv(max_elements, COPY_BLOCK_SIZE))
    types = {"SOURCE": _TYPES[source], "TARGET": _TYPES[target]}
    _weight_copies_kernel[grid](table, factors, **types, SCALED=scaled, BLOCK=COPY_BLOCK_SIZE, num_warps=4)
