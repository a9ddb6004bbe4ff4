"""Causal attention over short packed sequences, as Triton kernels.

Utterances with their reference are some 500 positions long. At such lengths a general kernel with large tiles computes
nearly twice the pairs that are not masked, accumulates query gradients in fp32 through memory, and writes gradients of
shared keys once per query head to sum them afterwards. Here tiles are small, every sum stays in the registers of one
program, and the program of a key head loops over the query heads that share it. Tiles are loaded by TMA, which needs no
registers for addresses.

Imported only with a CUDA device and Triton. Queries, keys and values are (positions, heads, head size) with heads
contiguous; a row may hold other data beside them.
"""

import math
from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from myna.models.higgs_v2.forward import attention_tile_table


class AttentionTile(NamedTuple):
    """Tile sizes and launch settings of a kernel, found by measurement."""

    rows: int
    """Queries of a tile."""
    columns: int
    """Keys of a tile."""
    warps: int
    stages: int
    parts: int = 1
    """Number of loops. With 2, tiles below the diagonal have a loop of their own, without the causal mask."""


FORWARD_TILE = AttentionTile(64, 64, 4, 1)
QUERY_GRADIENT_TILE = AttentionTile(64, 64, 4, 2, parts=2)
KEY_GRADIENT_TILE = AttentionTile(64, 64, 4, 2)


class AttentionTileTables(NamedTuple):
    """Tile table of each kernel, made once per batch on the GPU without waiting for it."""

    forward: Tensor
    to_queries: Tensor
    to_keys: Tensor

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, positions: int) -> Self:
        sizes = (FORWARD_TILE.rows, QUERY_GRADIENT_TILE.rows, KEY_GRADIENT_TILE.columns)
        tables = {size: attention_tile_table(cu_seqlens, positions, size) for size in set(sizes)}
        return cls(*(tables[size] for size in sizes))


@triton.jit(do_not_specialize=["positions"])
def _forward_kernel(
    q, k, v, out, log2sumexp, tiles, positions, scale,
    GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Attend. `log2sumexp` is the base-2 logarithm of the softmax denominator; `scale` includes log2(e)."""
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

    accumulated = tl.zeros([ROWS, SIZE], tl.float32)
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    end = tl.minimum(first + ROWS, length)
    for part in tl.static_range(PARTS):
        low, high = 0, end
        if PARTS == 2:
            low, high = (0, first // COLUMNS * COLUMNS) if part == 0 else (first // COLUMNS * COLUMNS, end)
        for at in range(low, high, COLUMNS):
            key = k.load([start + at, shared])
            value = v.load([start + at, shared])
            scores = tl.dot(query, tl.trans(key))
            if part + 1 == PARTS:
                scores = tl.where(row[:, None] >= (at + column)[None, :], scores, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - new_max[:, None])
            rescale = tl.exp2(running_max - new_max)
            total = total * rescale + tl.sum(weights, 1)
            accumulated = tl.dot(weights.to(value.dtype), value, accumulated * rescale[:, None])
            running_max = new_max
    tl.store(log2sumexp + head * positions + start + row, running_max + tl.log2(total), mask=row < length)
    width = tl.num_programs(0) * SIZE
    out += start.to(tl.int64) * width + head * SIZE + row[:, None] * width + channel[None, :]
    tl.store(out, (accumulated / total[:, None]).to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["positions"])
def _query_gradient_kernel(
    q, k, v, out, d_out, log2sumexp, delta, dq, tiles, positions, scale, softmax_scale,
    GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Gradient of queries, and `delta`, the row sums of out * d_out that the softmax gradient subtracts."""
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
    d_tile = d_out.load([start + first, head * SIZE])
    attended = tl.load(out + place, mask=real, other=0.0)
    row_delta = tl.sum(attended.to(tl.float32) * d_tile.to(tl.float32), 1)
    line = head * positions + start + row
    tl.store(delta + line, row_delta, mask=row < length)
    row_log2sumexp = tl.load(log2sumexp + line, mask=row < length, other=0.0)
    shared = head // GROUP * SIZE

    d_query = tl.zeros([ROWS, SIZE], tl.float32)
    end = tl.minimum(first + ROWS, length)
    for part in tl.static_range(PARTS):
        low, high = 0, end
        if PARTS == 2:
            low, high = (0, first // COLUMNS * COLUMNS) if part == 0 else (first // COLUMNS * COLUMNS, end)
        for at in range(low, high, COLUMNS):
            key = k.load([start + at, shared])
            value = v.load([start + at, shared])
            weights = tl.exp2(tl.dot(query, tl.trans(key)) * scale - row_log2sumexp[:, None])
            if part + 1 == PARTS:
                weights = tl.where(row[:, None] >= (at + column)[None, :], weights, 0.0)
            d_weights = weights * (tl.dot(d_tile, tl.trans(value)) - row_delta[:, None])
            d_query = tl.dot(d_weights.to(key.dtype), key, d_query)
    tl.store(dq + place, (d_query * softmax_scale).to(dq.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["positions"])
def _key_value_gradient_kernel(
    q, k, v, d_out, log2sumexp, delta, dk, dv, tiles, positions, scale, softmax_scale,
    GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values, summed over the query heads that share them."""
    key_head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 3
    start, length, first = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if first >= length:
        return
    column, channel = first + tl.arange(0, COLUMNS), tl.arange(0, SIZE)
    real = (column < length)[:, None]
    key = k.load([start + first, key_head * SIZE])
    value = v.load([start + first, key_head * SIZE])
    log2sumexp += key_head * GROUP * positions + start
    delta += key_head * GROUP * positions + start

    d_key = tl.zeros([COLUMNS, SIZE], tl.float32)
    d_value = tl.zeros([COLUMNS, SIZE], tl.float32)
    # One loop for all heads: filling and draining its pipeline takes as long as a few iterations.
    steps = tl.cdiv(length - first, ROWS)
    for step in range(0, GROUP * steps):
        member = step // steps
        row = first + (step - member * steps) * ROWS + tl.arange(0, ROWS)
        inside = row < length
        at = start + first + (step - member * steps) * ROWS
        query = q.load([at, (key_head * GROUP + member) * SIZE])
        d_tile = d_out.load([at, (key_head * GROUP + member) * SIZE])
        row_log2sumexp = tl.load(log2sumexp + member * positions + row, mask=inside, other=0.0)
        row_delta = tl.load(delta + member * positions + row, mask=inside, other=0.0)
        # A tile may reach into the next sequence. The causal mask excludes its keys, `inside` its queries.
        weights = tl.exp2(tl.dot(key, tl.trans(query)) * scale - row_log2sumexp[None, :])
        weights = tl.where((row[None, :] >= column[:, None]) & inside[None, :], weights, 0.0)
        d_value = tl.dot(weights.to(d_tile.dtype), d_tile, d_value)
        d_weights = weights * (tl.dot(value, tl.trans(d_tile)) - row_delta[None, :])
        d_key = tl.dot(d_weights.to(query.dtype), query, d_key)
    width = tl.num_programs(0) * SIZE
    place = start.to(tl.int64) * width + key_head * SIZE + column[:, None] * width + channel[None, :]
    tl.store(dk + place, (d_key * softmax_scale).to(dk.dtype.element_ty), mask=real)
    tl.store(dv + place, d_value.to(dv.dtype.element_ty), mask=real)


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, tiles: AttentionTileTables) -> tuple[Tensor, Tensor]:
    """Return the output, (positions, heads, head size), and `log2sumexp`, (heads, positions)."""
    positions, heads, size = q.shape
    out = q.new_empty(positions, heads, size)
    log2sumexp = q.new_empty(heads, positions, dtype=torch.float32)
    _forward_kernel[(heads, len(tiles.forward))](
        *_descriptors(FORWARD_TILE, q, k, v),
        *(out, log2sumexp, tiles.forward),
        **_common(q, k, v),
        PARTS=FORWARD_TILE.parts,
        **_launch_settings(FORWARD_TILE),
    )
    return out, log2sumexp


def tiled_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log2sumexp: Tensor, tiles: AttentionTileTables
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, each in its own memory."""
    assert d_out.is_contiguous() and out.is_contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(log2sumexp)
    scales = _common(q, k, v) | {"softmax_scale": q.shape[2] ** -0.5}
    _query_gradient_kernel[(q.shape[1], len(tiles.to_queries))](
        *_descriptors(QUERY_GRADIENT_TILE, q, k, v),
        out,
        _descriptor(d_out, QUERY_GRADIENT_TILE.rows),
        *(log2sumexp, delta, dq, tiles.to_queries),
        **scales,
        PARTS=QUERY_GRADIENT_TILE.parts,
        **_launch_settings(QUERY_GRADIENT_TILE),
    )
    _key_value_gradient_kernel[(k.shape[1], len(tiles.to_keys))](
        *_descriptors(KEY_GRADIENT_TILE, q, k, v),
        _descriptor(d_out, KEY_GRADIENT_TILE.rows),
        *(log2sumexp, delta, dk, dv, tiles.to_keys),
        **scales,
        **_launch_settings(KEY_GRADIENT_TILE),
    )
    return dq, dk, dv


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x.flatten(1), [rows, x.shape[2]])


def _descriptors(tile: AttentionTile, q: Tensor, k: Tensor, v: Tensor) -> list[TensorDescriptor]:
    return [_descriptor(q, tile.rows), _descriptor(k, tile.columns), _descriptor(v, tile.columns)]


def _common(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    size = q.shape[2]
    assert all(x.stride(1) == size and x.stride(2) == 1 for x in (q, k, v)), "heads must be contiguous"
    return {
        "positions": len(q),
        "scale": size**-0.5 * math.log2(math.e),
        "GROUP": q.shape[1] // k.shape[1],
        "SIZE": size,
    }


def _launch_settings(tile: AttentionTile) -> dict[str, int]:
    return {"ROWS": tile.rows, "COLUMNS": tile.columns, "num_warps": tile.warps, "num_stages": tile.stages}
