"""Causal attention inside short sequences, as Triton kernels.

Clips with their reference are some 500 positions long. At such lengths a general kernel with large tiles computes
nearly twice the pairs that are looked at, adds gradients of queries up in fp32 through memory, and writes gradients of
shared keys once per query head to sum them afterwards. Here tiles are small, every sum stays in the registers of one
program, and the query heads that share a key are gone through by the program that has the key.

Tiles are fetched by the card's own unit for that, which needs no registers for addresses.

Only imported where there is a CUDA device and Triton. Queries, keys and values are (positions, heads, head size) with
heads side by side; a row may have other numbers beside them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from myna.models.higgs_v2.packing import tabulate


class Shape(NamedTuple):
    """How the work of a kernel is cut, found by measurement."""

    rows: int
    """Queries of a tile."""
    columns: int
    """Keys of a tile."""
    warps: int
    stages: int
    parts: int = 1
    """2: the tiles below the diagonal in a loop of their own, which asks nothing about the order of positions."""


FORWARD = Shape(64, 64, 4, 1)
TO_QUERIES = Shape(64, 64, 4, 2, parts=2)
TO_KEYS = Shape(64, 64, 4, 2)


class Tiles(NamedTuple):
    """Where programs begin. Made once for a batch, on the card: the host need not know the lengths."""

    forward: torch.Tensor
    to_queries: torch.Tensor
    to_keys: torch.Tensor

    @classmethod
    def of(cls, bounds: torch.Tensor, positions: int) -> Tiles:
        sizes = (FORWARD.rows, TO_QUERIES.rows, TO_KEYS.columns)
        tables = {size: tabulate(bounds, positions, size) for size in set(sizes)}
        return cls(*(tables[size] for size in sizes))


@triton.jit(do_not_specialize=["positions"])
def _forward(
    q,
    k,
    v,
    out,
    reach,
    tiles,
    positions,
    scale,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`reach` is the logarithm to base 2 of the sum that a softmax divides by; scale is for powers of 2, too."""
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 3
    start, length, first = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if first >= length:
        return
    row, channel = first + tl.arange(0, ROWS), tl.arange(0, SIZE)
    column = tl.arange(0, COLUMNS)
    real = (row < length)[:, None]
    query = q.load([start + first, head * SIZE])
    shared = head // GROUP * SIZE

    seen = tl.zeros([ROWS, SIZE], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    end = tl.minimum(first + ROWS, length)
    for part in tl.static_range(PARTS):
        low, high = 0, end
        if PARTS == 2:
            low, high = (0, first // COLUMNS * COLUMNS) if part == 0 else (first // COLUMNS * COLUMNS, end)
        for at in range(low, high, COLUMNS):
            key = k.load([start + at, shared])
            value = v.load([start + at, shared])
            looks = tl.dot(query, tl.trans(key))
            if part + 1 == PARTS:
                looks = tl.where(row[:, None] >= (at + column)[None, :], looks, float("-inf"))
            higher = tl.maximum(largest, tl.max(looks, 1) * scale)
            looks = tl.exp2(looks * scale - higher[:, None])
            fade = tl.exp2(largest - higher)
            total = total * fade + tl.sum(looks, 1)
            seen = tl.dot(looks.to(value.dtype), value, seen * fade[:, None])
            largest = higher
    tl.store(reach + head * positions + start + row, largest + tl.log2(total), mask=row < length)
    width = tl.num_programs(0) * SIZE
    out += start.to(tl.int64) * width + head * SIZE + row[:, None] * width + channel[None, :]
    tl.store(out, (seen / total[:, None]).to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["positions"])
def _to_queries(
    q,
    k,
    v,
    out,
    d,
    reach,
    drift,
    dq,
    tiles,
    positions,
    scale,
    natural_scale,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The gradient of queries; on the way `drift`, what the softmax takes off every gradient in a row."""
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 3
    start, length, first = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if first >= length:
        return
    row, channel = first + tl.arange(0, ROWS), tl.arange(0, SIZE)
    column = tl.arange(0, COLUMNS)
    real = (row < length)[:, None]
    query = q.load([start + first, head * SIZE])
    width = tl.num_programs(0) * SIZE
    place = start.to(tl.int64) * width + head * SIZE + row[:, None] * width + channel[None, :]
    slope = d.load([start + first, head * SIZE])
    attended = tl.load(out + place, mask=real, other=0.0)
    shift = tl.sum(attended.to(tl.float32) * slope.to(tl.float32), 1)
    line = head * positions + start + row
    tl.store(drift + line, shift, mask=row < length)
    reached = tl.load(reach + line, mask=row < length, other=0.0)
    shared = head // GROUP * SIZE

    found = tl.zeros([ROWS, SIZE], tl.float32)
    end = tl.minimum(first + ROWS, length)
    for part in tl.static_range(PARTS):
        low, high = 0, end
        if PARTS == 2:
            low, high = (0, first // COLUMNS * COLUMNS) if part == 0 else (first // COLUMNS * COLUMNS, end)
        for at in range(low, high, COLUMNS):
            key = k.load([start + at, shared])
            value = v.load([start + at, shared])
            looks = tl.exp2(tl.dot(query, tl.trans(key)) * scale - reached[:, None])
            if part + 1 == PARTS:
                looks = tl.where(row[:, None] >= (at + column)[None, :], looks, 0.0)
            d_looks = looks * (tl.dot(slope, tl.trans(value)) - shift[:, None])
            found = tl.dot(d_looks.to(key.dtype), key, found)
    tl.store(dq + place, (found * natural_scale).to(dq.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["positions"])
def _to_keys(
    q,
    k,
    v,
    d,
    reach,
    drift,
    dk,
    dv,
    tiles,
    positions,
    scale,
    natural_scale,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradients of keys and values, of all the query heads that share them."""
    key_head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 3
    start, length, first = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if first >= length:
        return
    column, channel = first + tl.arange(0, COLUMNS), tl.arange(0, SIZE)
    real = (column < length)[:, None]
    key = k.load([start + first, key_head * SIZE])
    value = v.load([start + first, key_head * SIZE])
    reach += key_head * GROUP * positions + start
    drift += key_head * GROUP * positions + start

    d_key = tl.zeros([COLUMNS, SIZE], tl.float32)
    d_value = tl.zeros([COLUMNS, SIZE], tl.float32)
    # One loop and not one for each head: to fill and drain it takes as long as a few turns.
    steps = tl.cdiv(length - first, ROWS)
    for step in range(0, GROUP * steps):
        member = step // steps
        row = first + (step - member * steps) * ROWS + tl.arange(0, ROWS)
        inside = row < length
        at = start + first + (step - member * steps) * ROWS
        query = q.load([at, (key_head * GROUP + member) * SIZE])
        slope = d.load([at, (key_head * GROUP + member) * SIZE])
        reached = tl.load(reach + member * positions + row, mask=inside, other=0.0)
        shift = tl.load(drift + member * positions + row, mask=inside, other=0.0)
        # A tile may reach into the next sequence: its keys are left out by the order of positions, its queries here.
        looks = tl.exp2(tl.dot(key, tl.trans(query)) * scale - reached[None, :])
        looks = tl.where((row[None, :] >= column[:, None]) & inside[None, :], looks, 0.0)
        d_value = tl.dot(looks.to(slope.dtype), slope, d_value)
        d_looks = looks * (tl.dot(value, tl.trans(slope)) - shift[None, :])
        d_key = tl.dot(d_looks.to(query.dtype), query, d_key)
    width = tl.num_programs(0) * SIZE
    place = start.to(tl.int64) * width + key_head * SIZE + column[:, None] * width + channel[None, :]
    tl.store(dk + place, (d_key * natural_scale).to(dk.dtype.element_ty), mask=real)
    tl.store(dv + place, d_value.to(dv.dtype.element_ty), mask=real)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: Tiles) -> tuple[torch.Tensor, torch.Tensor]:
    """What was attended to, (positions, heads, head size), and `reach`, (heads, positions)."""
    positions, heads, size = q.shape
    out = q.new_empty(positions, heads, size)
    reach = q.new_empty(heads, positions, dtype=torch.float32)
    _forward[(heads, len(tiles.forward))](
        TensorDescriptor.from_tensor(q.flatten(1), [FORWARD.rows, q.shape[2]]),
        TensorDescriptor.from_tensor(k.flatten(1), [FORWARD.columns, k.shape[2]]),
        TensorDescriptor.from_tensor(v.flatten(1), [FORWARD.columns, v.shape[2]]),
        out,
        reach,
        tiles.forward,
        **_common(q, k, v),
        PARTS=FORWARD.parts,
        **_shape(FORWARD),
    )
    return out, reach


def backward(
    d: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    reach: torch.Tensor,
    tiles: Tiles,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of queries, keys and values, each in memory of its own."""
    assert d.is_contiguous() and out.is_contiguous()
    dq, drift = to_queries(d, q, k, v, out, reach, tiles)
    return dq, *to_keys(d, q, k, v, reach, drift, tiles)


def to_queries(
    d: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    reach: torch.Tensor,
    tiles: Tiles,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of queries, and `drift`, which that of keys and values needs, too."""
    dq, drift = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(reach)
    _to_queries[(q.shape[1], len(tiles.to_queries))](
        TensorDescriptor.from_tensor(q.flatten(1), [TO_QUERIES.rows, q.shape[2]]),
        TensorDescriptor.from_tensor(k.flatten(1), [TO_QUERIES.columns, k.shape[2]]),
        TensorDescriptor.from_tensor(v.flatten(1), [TO_QUERIES.columns, v.shape[2]]),
        out,
        TensorDescriptor.from_tensor(d.flatten(1), [TO_QUERIES.rows, d.shape[2]]),
        reach,
        drift,
        dq,
        tiles.to_queries,
        **_common(q, k, v),
        natural_scale=q.shape[2] ** -0.5,
        PARTS=TO_QUERIES.parts,
        **_shape(TO_QUERIES),
    )
    return dq, drift


def to_keys(
    d: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    reach: torch.Tensor,
    drift: torch.Tensor,
    tiles: Tiles,
) -> tuple[torch.Tensor, torch.Tensor]:
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    _to_keys[(k.shape[1], len(tiles.to_keys))](
        TensorDescriptor.from_tensor(q.flatten(1), [TO_KEYS.rows, q.shape[2]]),
        TensorDescriptor.from_tensor(k.flatten(1), [TO_KEYS.columns, k.shape[2]]),
        TensorDescriptor.from_tensor(v.flatten(1), [TO_KEYS.columns, v.shape[2]]),
        TensorDescriptor.from_tensor(d.flatten(1), [TO_KEYS.rows, d.shape[2]]),
        reach,
        drift,
        dk,
        dv,
        tiles.to_keys,
        **_common(q, k, v),
        natural_scale=q.shape[2] ** -0.5,
        **_shape(TO_KEYS),
    )
    return dk, dv


def _common(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    size = q.shape[2]
    assert all(x.stride(1) == size and x.stride(2) == 1 for x in (q, k, v)), "heads lie side by side"
    return {
        "positions": len(q),
        "scale": size**-0.5 * math.log2(math.e),
        "GROUP": q.shape[1] // k.shape[1],
        "SIZE": size,
    }


def _shape(shape: Shape) -> dict[str, int]:
    return {"ROWS": shape.rows, "COLUMNS": shape.columns, "num_warps": shape.warps, "num_stages": shape.stages}
