"""The passes of `passes.py` as Triton kernels: each reads and writes every number once.

Only imported where there is a CUDA device and Triton. Rows are handled one by one, so that lengths may be anything and
nothing is compiled anew for another batch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from myna.models.higgs_v2.fused.ops import FP8_PARTS, LARGEST, SMALLEST, PackedInput

GATE_BLOCK = 2048
COPY_BLOCK = 1024


@triton.jit
def _store_codes(numbers, largest, inside, codes, scale, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):
    """Numbers of one row as fp8 where `codes` points, and what to multiply them with."""
    step = tl.maximum(largest, SMALLEST) / LARGEST
    tl.store(scale, step)
    tl.store(codes, (numbers / step).to(codes.dtype.element_ty), mask=inside)


def _code_arguments(out: PackedInput) -> dict[str, Any]:
    """Where codes go, for a kernel that may have to write some; a pointer it must have in any case."""
    wanted = out.codes is not None and out.scale is not None
    codes = out.x if out.codes is None else out.codes
    scale = out.x if out.scale is None else out.scale
    limits = {"LARGEST": LARGEST, "SMALLEST": SMALLEST}
    return {"codes": codes, "scale": scale, "code_stride": codes.stride(0), "ENCODES": wanted, **limits}


@triton.jit
def _add_norm(
    stream,
    update,
    order,
    text,
    audio,
    added,
    out,
    spread,
    texts,
    width,
    out_stride,
    eps,
    codes,
    scale,
    code_stride,
    HAS_UPDATE: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    ENCODES: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    tl.store(spread + row, factor)
    if row < texts:
        weight = tl.load(text + column, mask=inside, other=0.0).to(tl.float32)
    else:
        weight = tl.load(audio + column, mask=inside, other=0.0).to(tl.float32)
    normed = x * factor * weight
    tl.store(out + row * out_stride + column, normed.to(out.dtype.element_ty), mask=inside)
    if ENCODES:
        largest = tl.max(tl.abs(normed), axis=0)
        _store_codes(normed, largest, inside, codes + row * code_stride + column, scale + row, LARGEST, SMALLEST)


def add_norm(
    stream: torch.Tensor,
    update: torch.Tensor | None,
    order: torch.Tensor | None,
    text: torch.Tensor,
    audio: torch.Tensor,
    eps: float,
    texts: int,
    out: PackedInput,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = stream.shape
    spread = stream.new_empty(rows, dtype=torch.float32)
    added = torch.empty_like(stream) if update is not None else stream
    _add_norm[(rows,)](
        stream,
        stream if update is None else update,
        stream if order is None else order,
        text,
        audio,
        added,
        out.x,
        spread,
        texts,
        width,
        out.x.stride(0),
        eps,
        **_code_arguments(out),
        HAS_UPDATE=update is not None,
        HAS_ORDER=order is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=8,
    )
    return added, spread


@triton.jit
def _norm_back(
    d_normed,
    stream,
    spread,
    d_stream,
    text,
    audio,
    out,
    order,
    ordered,
    texts,
    width,
    ordered_stride,
    codes,
    scale,
    code_stride,
    HAS_ORDER: tl.constexpr,
    ENCODES: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    factor = tl.load(spread + row)
    if row < texts:
        weight = tl.load(text + column, mask=inside, other=0.0).to(tl.float32)
    else:
        weight = tl.load(audio + column, mask=inside, other=0.0).to(tl.float32)
    normal = tl.load(stream + at, mask=inside, other=0.0).to(tl.float32) * factor
    slope = tl.load(d_normed + at, mask=inside, other=0.0).to(tl.float32) * weight
    mean = tl.sum(slope * normal, axis=0) / width
    d = factor * (slope - normal * mean) + tl.load(d_stream + at, mask=inside, other=0.0).to(tl.float32)
    rounded = d.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=inside)
    if HAS_ORDER:
        place = tl.load(order + row)
        tl.store(ordered + place * ordered_stride + column, rounded, mask=inside)
        if ENCODES:
            largest = tl.max(tl.abs(d), axis=0)
            _store_codes(d, largest, inside, codes + place * code_stride + column, scale + place, LARGEST, SMALLEST)


def norm_back(
    d_normed: torch.Tensor,
    stream: torch.Tensor,
    spread: torch.Tensor,
    d_stream: torch.Tensor,
    text: torch.Tensor,
    audio: torch.Tensor,
    texts: int,
    order: torch.Tensor | None,
    ordered: PackedInput | None,
) -> torch.Tensor:
    rows, width = stream.shape
    out = torch.empty_like(stream)
    ordered = PackedInput(out, out) if ordered is None else ordered
    _norm_back[(rows,)](
        d_normed,
        stream,
        spread,
        d_stream,
        text,
        audio,
        out,
        stream if order is None else order,
        ordered.x,
        texts,
        width,
        ordered.x.stride(0),
        **_code_arguments(ordered),
        HAS_ORDER=order is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=8,
    )
    return out


@triton.jit
def _rotate(
    qkv,
    order,
    cos,
    sin,
    out,
    heads,
    turned,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64)
    source = tl.load(order + position)
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (column < HALF)
    width = heads * 2 * HALF
    first_at = head * 2 * HALF + column
    first = tl.load(qkv + source * width + first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + source * width + first_at + HALF, mask=inside, other=0.0).to(tl.float32)
    # Values keep their direction: for them the angle is none.
    c = tl.where(head < turned, tl.load(cos + position * 2 * HALF + column).to(tl.float32), 1.0)
    s = tl.where(head < turned, tl.load(sin + position * 2 * HALF + column).to(tl.float32), 0.0)
    tl.store(out + position * width + first_at, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + position * width + first_at + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


def rotate(
    qkv: torch.Tensor, order: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, size: int, turned: int
) -> torch.Tensor:
    heads, out = qkv.shape[1] // size, torch.empty_like(qkv)
    _rotate[(len(qkv),)](
        qkv, order, cos, sin, out, heads, turned, HALF=size // 2, HEADS=triton.next_power_of_2(heads), num_warps=4
    )
    return out


@triton.jit
def _rotate_back(
    dq,
    dk,
    dv,
    order,
    cos,
    sin,
    out,
    queries,
    keys,
    out_stride,
    codes,
    scale,
    code_stride,
    ENCODES: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
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
    if ENCODES:
        largest = tl.max(tl.maximum(tl.abs(left), tl.abs(right)))
        line = codes + place * code_stride + head * 2 * HALF + column
        _store_codes(left, largest, inside, line, scale + place, LARGEST, SMALLEST)
        _store_codes(right, largest, inside, line + HALF, scale + place, LARGEST, SMALLEST)


def rotate_back(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    order: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: PackedInput,
) -> None:
    positions, queries, size = dq.shape
    keys = dk.shape[1]
    _rotate_back[(positions,)](
        dq.contiguous(),
        dk.contiguous(),
        dv.contiguous(),
        order,
        cos,
        sin,
        out.x,
        queries,
        keys,
        out.x.stride(0),
        **_code_arguments(out),
        HALF=size // 2,
        HEADS=triton.next_power_of_2(queries + 2 * keys),
        num_warps=4,
    )


@triton.jit
def _gate(
    both,
    out,
    width,
    out_stride,
    codes,
    scale,
    code_stride,
    ENCODES: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(both + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    opened = gate * tl.sigmoid(gate) * up
    tl.store(out + row * out_stride + column, opened.to(out.dtype.element_ty), mask=inside)
    if ENCODES:
        largest = tl.max(tl.abs(opened), axis=0)
        _store_codes(opened, largest, inside, codes + row * code_stride + column, scale + row, LARGEST, SMALLEST)


def gate(both: torch.Tensor, out: PackedInput) -> None:
    rows, width = out.x.shape
    if rows:
        grid, shape = _by_rows(rows, width, whole=out.codes is not None)
        _gate[grid](both, out.x, width, out.x.stride(0), **_code_arguments(out), **shape)


@triton.jit
def _gate_back(
    d,
    both,
    out,
    width,
    d_stride,
    out_stride,
    codes,
    scale,
    code_stride,
    ENCODES: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(both + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(d + row * d_stride + column, mask=inside, other=0.0).to(tl.float32)
    opened = tl.sigmoid(gate)
    d_gate = slope * up * opened * (1.0 + gate * (1.0 - opened))
    d_up = slope * gate * opened
    tl.store(out + row * out_stride + column, d_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(out + row * out_stride + width + column, d_up.to(out.dtype.element_ty), mask=inside)
    if ENCODES:
        largest = tl.max(tl.maximum(tl.abs(d_gate), tl.abs(d_up)), axis=0)
        line = codes + row * code_stride + column
        _store_codes(d_gate, largest, inside, line, scale + row, LARGEST, SMALLEST)
        _store_codes(d_up, largest, inside, line + width, scale + row, LARGEST, SMALLEST)


def gate_back(d: torch.Tensor, both: torch.Tensor, out: PackedInput) -> None:
    rows, width = d.shape
    if rows:
        grid, shape = _by_rows(rows, width, whole=out.codes is not None)
        _gate_back[grid](d, both, out.x, width, d.stride(0), out.x.stride(0), **_code_arguments(out), **shape)


def _by_rows(rows: int, width: int, *, whole: bool) -> tuple[tuple[int, int], dict[str, int]]:
    """A row to a program where its largest number is wanted, else pieces of rows."""
    block = triton.next_power_of_2(width) if whole else min(GATE_BLOCK, triton.next_power_of_2(width))
    return (rows, triton.cdiv(width, block)), {"BLOCK": block, "num_warps": 8 if block <= 4096 else 16}


@triton.jit
def _copy(
    x,
    out,
    width,
    x_stride,
    out_stride,
    codes,
    scale,
    code_stride,
    COPIES: tl.constexpr,
    ENCODES: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    numbers = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if COPIES:
        tl.store(out + row * out_stride + column, numbers, mask=inside)
    if ENCODES:
        exact = numbers.to(tl.float32)
        largest = tl.max(tl.abs(exact), axis=0)
        _store_codes(exact, largest, inside, codes + row * code_stride + column, scale + row, LARGEST, SMALLEST)


def copy(x: torch.Tensor, out: PackedInput) -> None:
    rows, width = x.shape
    if rows:
        _copy[(rows,)](
            x,
            out.x,
            width,
            x.stride(0),
            out.x.stride(0),
            **_code_arguments(out),
            COPIES=x.data_ptr() != out.x.data_ptr(),
            BLOCK=triton.next_power_of_2(width),
            num_warps=8,
        )


@triton.jit
def _near_and_rest(numbers, TYPE: tl.constexpr):
    """Two fp8 whose sum is all but the number."""
    near = numbers.to(TYPE)
    return near, (numbers - near.to(tl.float32)).to(TYPE)


@triton.jit
def _fold_in(
    x,
    low,
    codes,
    scale,
    fold,
    x_stride,
    low_stride,
    code_stride,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    FOLD_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, FOLD_BLOCK)
    inside = column < fold
    lows = tl.load(low + row * low_stride + column, mask=inside, other=0.0).to(tl.float32)
    step = tl.load(scale + row)
    needed = tl.max(tl.abs(lows), axis=0) / LARGEST
    if needed > step:
        step = needed
        tl.store(scale + row, step)
        for start in range(0, WIDTH, BLOCK):
            at = start + tl.arange(0, BLOCK)
            numbers = tl.load(x + row * x_stride + at, mask=at < WIDTH, other=0.0).to(tl.float32)
            tl.store(codes + row * code_stride + at, (numbers / step).to(codes.dtype.element_ty), mask=at < WIDTH)
    near, rest = _near_and_rest(lows / step, codes.dtype.element_ty)
    line = codes + row * code_stride + WIDTH + column
    tl.store(line, near, mask=inside)
    tl.store(line + fold, rest, mask=inside)
    tl.store(line + 2 * fold, near, mask=inside)


def fold_in(wide: PackedInput) -> None:
    x, low, _, codes, scale = wide
    (rows, width), fold = x.shape, low.shape[1]
    assert codes is not None and codes.shape[1] == width + FP8_PARTS * fold
    if rows:
        _fold_in[(rows,)](
            x,
            low,
            codes,
            scale,
            fold,
            x.stride(0),
            low.stride(0),
            codes.stride(0),
            WIDTH=width,
            LARGEST=LARGEST,
            BLOCK=1024,
            FOLD_BLOCK=max(16, triton.next_power_of_2(fold)),
            num_warps=1,
        )


@triton.jit
def _copy_all(
    table,
    factors,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
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
        near, rest = _near_and_rest(value / tl.load(scale + along, mask=inside, other=1.0), TARGET)
        tl.store(place, near, mask=inside)
        tl.store(place + part, near, mask=inside)
        tl.store(place + 2 * part, rest, mask=inside)
    else:
        tl.store(place, value.to(TARGET), mask=inside)


_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
}


def copy_all(
    table: torch.Tensor,
    factors: torch.Tensor,
    largest: int,
    source: torch.dtype,
    target: torch.dtype,
    scaled: bool,
) -> None:
    grid = (len(table), triton.cdiv(largest, COPY_BLOCK))
    _copy_all[grid](
        table, factors, SOURCE=_TYPES[source], TARGET=_TYPES[target], SCALED=scaled, BLOCK=COPY_BLOCK, num_warps=4
    )
