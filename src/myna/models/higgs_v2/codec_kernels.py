"""The products of `codec_fast.py` as Triton kernels: on tensor cores, as accurate as fp32.

Tensor cores multiply numbers of 11 significant bits (fp16). A number is split into what fp16 holds and the rest,
x = high + low, and x * w becomes high * w_high + high * w_low + low * w_high; what is left out is 2^-24 of the product,
which is what fp32 itself leaves out. The rest is kept times 2^11, so that it is as far from fp16's smallest number as
the number itself. Tensor cores also cut off what does not fit into a sum where fp32 arithmetic rounds, so they only
ever sum up a few dozen products; those sums are added up in plain fp32.

Only imported where there is a CUDA device and Triton.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime import driver

LOW_SCALE = 2048.0
WEIGHT_STEP = 64
"""Weights are filled up with zeros to this many channels, so that no block reads past a filter's tap."""
OUTPUT_STEP = 128
FIRST_TIMES, FIRST_CHANNELS = 64, 64
NOTHING, SNAKE, GELU, ELU = 0, 1, 2, 3


class Tile(NamedTuple):
    """How much of a product one block of threads computes, and how."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


ROOMY = 200 * 1024
"""Bytes of shared memory that the tiles found best on an H200 may need, as data-centre cards since Hopper have them."""


def tile_for(rows: int, columns: int, roomy: bool = True) -> Tile:
    """The depth, which decides where sums are rounded, does not depend on the rows: so a clip's sums do not depend on
    what shares its batch."""
    if not roomy:
        return Tile(64, 64, 32, 4, 3)
    if columns < 64:
        return Tile(64, 64, 64, 4, 3)
    if columns == 64:
        return Tile(128, 64, 32, 4, 4)
    # With few rows, smaller blocks leave fewer multiprocessors idle.
    return Tile(128, 128, 64, 8, 3) if rows * columns >= 128 * 128 * 132 else Tile(64, 128, 64, 4, 2)


@cache
def _roomy(device: int) -> bool:
    """By the number that Triton itself holds a kernel to."""
    return int(driver.active.utils.get_device_properties(device)["max_shared_mem"]) >= ROOMY


@triton.jit
def _sine_up_to_sign(x):
    """sin(x) or -sin(x), to a unit or two in the last place: the library's own reads like a page for every number."""
    turns = tl.floor(x * 0.3183098861837907 + 0.5)
    x = tl.fma(turns, -3.1415927410125732, x)
    x = tl.fma(turns, 8.742277657347586e-08, x)
    square = x * x
    series = tl.fma(square, 1.6059043836821613e-10, -2.505210838544172e-08)
    series = tl.fma(square, series, 2.7557319223985893e-06)
    series = tl.fma(square, series, -0.0001984126984126984)
    series = tl.fma(square, series, 0.008333333333333333)
    series = tl.fma(square, series, -0.16666666666666666)
    return tl.fma(x * square, series, x)


@triton.jit
def _act(value, alpha, column, inside, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        bend = tl.load(alpha + column, mask=inside, other=1.0)
        wave = _sine_up_to_sign(bend[None, :] * value)
        value = tl.fma(wave * wave, (1.0 / (bend + 1e-9))[None, :], value)
    elif ACTIVATION == 2:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif ACTIVATION == 3:
        value = tl.where(value > 0, value, tl.exp(tl.minimum(value, 0.0)) - 1.0)
    return value


# A kernel of its own for lengths that happen to be multiples of 16, or strides that are 1, would only cost its making.
@triton.jit(do_not_specialize=["rows", "time_in", "time_out", "column_blocks", "taps", "stride", "dilation", "padding"])
def _convolve(
    x,
    high,
    low,
    bias,
    alpha,
    residual,
    total,
    out,
    ends,
    rows,
    time_in,
    time_out,
    width_in,
    width_out,
    channels,
    channels_stored,
    outputs,
    outputs_stored,
    column_blocks,
    taps,
    stride,
    dilation,
    padding,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    KEEPS_TOTAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALL_CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # Neighbouring programs read the same rows, so that they find them in the cache.
    block = tl.program_id(0)
    group = tl.program_id(1)
    row = (block // column_blocks) * ROWS + tl.arange(0, ROWS)
    column = (block % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    clip = row // time_out
    first = (row - clip * time_out) * stride - padding
    end = tl.load(ends + clip, mask=row < rows, other=0).to(tl.int32)
    read = x + ((clip * time_in + first) * width_in + group * channels)[:, None] + step[None, :]
    filters = (group * outputs_stored + column)[None, :] * (taps * channels_stored) + step[:, None]
    high += filters
    low += filters

    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    steps = channels_stored // DEPTH
    for number in range(0, taps * steps):
        tap = number // steps
        channel = (number - tap * steps) * DEPTH
        at = first + tap * dilation
        seen = ((at >= 0) & (at < end))[:, None]
        if not ALL_CHANNELS:
            seen = seen & (channel + step < channels)[None, :]
        numbers = tl.load(read + (tap * dilation * width_in + channel), mask=seen, other=0.0)
        weight_high = tl.load(high + number * DEPTH)
        weight_low = tl.load(low + number * DEPTH)
        number_high = numbers.to(tl.float16)
        number_low = ((numbers - number_high.to(tl.float32)) * SCALE).to(tl.float16)
        part = tl.dot(number_low, weight_high)
        part = tl.dot(number_high, weight_low, part) * (1.0 / SCALE)
        sums += tl.dot(number_high, weight_high, part)

    inside = column < outputs
    column += group * outputs
    place = row[:, None] * width_out + column[None, :]
    here = (row < rows)[:, None] & inside[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=inside, other=0.0)[None, :]
    if HAS_RESIDUAL:
        sums += tl.load(residual + place, mask=here, other=0.0)
    if KEEPS_TOTAL:
        tl.store(total + place, sums, mask=here)
    tl.store(out + place, _act(sums, alpha, column, inside, ACTIVATION), mask=here)


def split(weight: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs, channels, taps) -> the two parts, each (groups, outputs, taps, channels), filled up with zeros."""
    outputs, channels, taps = weight.shape[0] // groups, weight.shape[1], weight.shape[2]
    wide, deep = -(-outputs // OUTPUT_STEP) * OUTPUT_STEP, -(-channels // WEIGHT_STEP) * WEIGHT_STEP
    whole = weight.new_zeros(groups, wide, taps, deep)
    whole[:, :outputs, :, :channels] = weight.reshape(groups, outputs, channels, taps).transpose(2, 3)
    high = whole.half()
    return high, ((whole - high) * LOW_SCALE).half()


def convolve(
    x: torch.Tensor,
    ends: torch.Tensor,
    weight: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    outputs: int,
    time_out: int,
    stride: int,
    dilation: int,
    padding: int,
    activation: int,
    alpha: torch.Tensor | None,
    residual: torch.Tensor | None,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sums and what the activation makes of them; the former only where they are to be kept."""
    clips, time_in, width = x.shape
    groups, outputs_stored, taps, channels_stored = weight[0].shape
    rows, out = clips * time_out, x.new_empty(clips, time_out, outputs)
    assert x.is_contiguous() and (residual is None or residual.is_contiguous())
    assert max(x.numel(), out.numel()) < 2**31, "places are counted in 32 bits"
    total = torch.empty_like(out) if keep else out
    tile = tile_for(rows, outputs // groups, _roomy(x.device.index))
    column_blocks = triton.cdiv(outputs // groups, tile.columns)
    _convolve[(triton.cdiv(rows, tile.rows) * column_blocks, groups)](
        x,
        *weight,
        out if bias is None else bias,
        out if alpha is None else alpha,
        out if residual is None else residual,
        total,
        out,
        ends,
        rows,
        time_in,
        time_out,
        width,
        outputs,
        width // groups,
        channels_stored,
        outputs // groups,
        outputs_stored,
        column_blocks,
        taps,
        stride,
        dilation,
        padding,
        SCALE=LOW_SCALE,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        KEEPS_TOTAL=keep,
        ACTIVATION=activation,
        ALL_CHANNELS=width // groups == channels_stored,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return total, out


@triton.jit(do_not_specialize=["time_in", "time_out", "shift_stride", "stride", "padding"])
def _convolve_samples(
    waves,
    weight,
    scale,
    shift,
    alpha,
    total,
    out,
    ends,
    time_in,
    time_out,
    channels,
    shift_stride,
    stride,
    padding,
    TAPS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    KEEPS_TOTAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TIMES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    clip = tl.program_id(1)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    time = tl.program_id(0) * TIMES + tl.arange(0, TIMES)
    inside = channel < channels
    end = tl.load(ends + clip).to(tl.int32)
    first = time * stride - padding
    sums = tl.zeros((TIMES, CHANNELS), tl.float32)
    for tap in tl.static_range(TAPS):
        at = first + tap
        sample = tl.load(waves + clip * time_in + at, mask=(at >= 0) & (at < end), other=0.0)
        sums += sample[:, None] * tl.load(weight + tap * channels + channel, mask=inside, other=0.0)[None, :]
    if HAS_SCALE:
        sums *= tl.load(scale + clip * channels + channel, mask=inside, other=0.0)[None, :]
    sums += tl.load(shift + clip * shift_stride + channel, mask=inside, other=0.0)[None, :]
    place = (clip * time_out + time)[:, None] * channels + channel[None, :]
    here = (time < time_out)[:, None] & inside[None, :]
    if KEEPS_TOTAL:
        tl.store(total + place, sums, mask=here)
    tl.store(out + place, _act(sums, alpha, channel, inside, ACTIVATION), mask=here)


def convolve_samples(
    waves: torch.Tensor,
    ends: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    shift: torch.Tensor,
    time_out: int,
    stride: int,
    padding: int,
    activation: int,
    alpha: torch.Tensor | None,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` as (taps, channels); `scale` (clips, channels), `shift` (channels,) or (clips, channels)."""
    (clips, time_in), (taps, channels) = waves.shape, weight.shape
    out = waves.new_empty(clips, time_out, channels)
    total = torch.empty_like(out) if keep else out
    assert waves.is_contiguous() and out.numel() < 2**31
    grid = (triton.cdiv(time_out, FIRST_TIMES), clips, triton.cdiv(channels, FIRST_CHANNELS))
    constants: dict[str, Any] = {"TIMES": FIRST_TIMES, "CHANNELS": FIRST_CHANNELS, "num_warps": 4}
    _convolve_samples[grid](
        waves,
        weight,
        out if scale is None else scale,
        shift,
        out if alpha is None else alpha,
        total,
        out,
        ends,
        time_in,
        time_out,
        channels,
        0 if shift.ndim == 1 else channels,
        stride,
        padding,
        TAPS=taps,
        HAS_SCALE=scale is not None,
        KEEPS_TOTAL=keep,
        ACTIVATION=activation,
        **constants,
    )
    return total, out
