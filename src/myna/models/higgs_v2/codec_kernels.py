"""Triton convolutions of `batched_encoder.py`: on tensor cores, as accurate as fp32.

Tensor cores multiply fp16, of 11 significant bits. A number is split into its fp16 rounding and the residual, x = high
+ low, and x * w becomes high * w_high + high * w_low + low * w_high; the omitted term is 2^-24 of the product, about
the rounding of fp32 itself. The residual is stored times 2^11, so that it is as far from underflow as the number.
Tensor cores also truncate where fp32 arithmetic rounds, so they only accumulate a few dozen products; those partial
sums are added in plain fp32. Imported only with a CUDA device and Triton.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime import driver

RESIDUAL_SCALE = 2048.0
CHANNEL_MULTIPLE = 64
"""Weights are zero-padded to a multiple of this many channels, so that no block reads past a filter tap."""
OUTPUT_MULTIPLE = 128
WAVEFORM_TIMES, WAVEFORM_CHANNELS = 64, 64
SNAKE, ACTIVATIONS = 1, {None: 0, "gelu": 2, "elu": 3}
"""Numbers of the activations in `_activate`."""


class ConvTile(NamedTuple):
    """Output tile and launch settings of one program."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


LARGE_SHARED_MEMORY_BYTES = 200 * 1024
"""Shared memory that the tiles tuned on an H200 may need; data-centre GPUs since Hopper have it."""


def conv_tile(rows: int, columns: int, large_memory: bool = True) -> ConvTile:
    """Return the tile for an output of this size. The depth decides where sums are rounded, and does not depend on the
    rows, so that a clip's result does not depend on its batch."""
    if not large_memory:
        return ConvTile(64, 64, 32, 4, 3)
    if columns < 64:
        return ConvTile(64, 64, 64, 4, 3)
    if columns == 64:
        return ConvTile(128, 64, 32, 4, 4)
    # With few rows, smaller blocks leave fewer multiprocessors idle.
    return ConvTile(128, 128, 64, 8, 3) if rows * columns >= 128 * 128 * 132 else ConvTile(64, 128, 64, 4, 2)


@cache
def _has_large_shared_memory(device: int) -> bool:
    """Return whether the device has as much shared memory; Triton itself checks this limit."""
    return int(driver.active.utils.get_device_properties(device)["max_shared_mem"]) >= LARGE_SHARED_MEMORY_BYTES


@triton.jit
def _sine_up_to_sign(x):
    """Return sin(x) or -sin(x), to one or two ulp, with far fewer instructions than the library."""
    half_turns = tl.floor(x * 0.3183098861837907 + 0.5)
    x = tl.fma(half_turns, -3.1415927410125732, x)
    x = tl.fma(half_turns, 8.742277657347586e-08, x)
    square = x * x
    series = tl.fma(square, 1.6059043836821613e-10, -2.505210838544172e-08)
    series = tl.fma(square, series, 2.7557319223985893e-06)
    series = tl.fma(square, series, -0.0001984126984126984)
    series = tl.fma(square, series, 0.008333333333333333)
    series = tl.fma(square, series, -0.16666666666666666)
    return tl.fma(x * square, series, x)


@triton.jit
def _activate(value, alpha, column, inside, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        frequency = tl.load(alpha + column, mask=inside, other=1.0)
        wave = _sine_up_to_sign(frequency[None, :] * value)
        value = tl.fma(wave * wave, (1.0 / (frequency + 1e-9))[None, :], value)
    elif ACTIVATION == 2:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif ACTIVATION == 3:
        value = tl.where(value > 0, value, tl.exp(tl.minimum(value, 0.0)) - 1.0)
    return value


# Specializing on lengths that are multiples of 16, or strides of 1, would only cost compilations.
@triton.jit(do_not_specialize=["rows", "time_in", "time_out", "column_blocks", "taps", "stride", "dilation", "padding"])
def _conv_kernel(
    x, high, low, bias, alpha, residual, total, out, ends, rows, time_in, time_out, width_in, width_out, channels,
    channels_stored, outputs, outputs_stored, column_blocks, taps, stride, dilation, padding,
    SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, KEEPS_TOTAL: tl.constexpr,
    ACTIVATION: tl.constexpr, ALL_CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs read the same rows, from the cache.
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
        valid = ((at >= 0) & (at < end))[:, None]
        if not ALL_CHANNELS:
            valid = valid & (channel + step < channels)[None, :]
        numbers = tl.load(read + (tap * dilation * width_in + channel), mask=valid, other=0.0)
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
    tl.store(out + place, _activate(sums, alpha, column, inside, ACTIVATION), mask=here)


def split_fp16(weight: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split (outputs, channels, taps) into fp16 and scaled residual, each (groups, outputs, taps, channels), padded."""
    outputs, channels, taps = weight.shape[0] // groups, weight.shape[1], weight.shape[2]
    outputs_padded, channels_padded = (
        -(-outputs // OUTPUT_MULTIPLE) * OUTPUT_MULTIPLE,
        -(-channels // CHANNEL_MULTIPLE) * CHANNEL_MULTIPLE,
    )
    padded = weight.new_zeros(groups, outputs_padded, taps, channels_padded)
    padded[:, :outputs, :, :channels] = weight.reshape(groups, outputs, channels, taps).transpose(2, 3)
    high = padded.half()
    return high, ((padded - high) * RESIDUAL_SCALE).half()


def _activation_arguments(activation: torch.Tensor | str | None) -> tuple[int, torch.Tensor | None]:
    """Return the kernels' number of an activation, and the parameter of a snake."""
    return (SNAKE, activation) if isinstance(activation, torch.Tensor) else (ACTIVATIONS[activation], None)


def launch_conv(
    conv: Any, x: torch.Tensor, ends: torch.Tensor, residual: torch.Tensor | None, activation: Any, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `FusedConv.with_sum`."""
    clips, time_in, width = x.shape
    groups, outputs_stored, taps, channels_stored = conv.high.shape
    outputs, bias, time_out = conv.outputs, conv.bias, conv.time_out(time_in)
    number, alpha = _activation_arguments(activation)
    rows, out = clips * time_out, x.new_empty(clips, time_out, outputs)
    assert x.is_contiguous() and (residual is None or residual.is_contiguous())
    assert max(x.numel(), out.numel()) < 2**31, "offsets are 32-bit"
    total = torch.empty_like(out) if keep else out
    group_outputs = outputs // groups
    tile = conv_tile(rows, group_outputs, _has_large_shared_memory(x.device.index))
    column_blocks = triton.cdiv(group_outputs, tile.columns)
    optional = (out if tensor is None else tensor for tensor in (bias, alpha, residual))
    _conv_kernel[(triton.cdiv(rows, tile.rows) * column_blocks, groups)](
        *(x, conv.high, conv.low, *optional, total, out, ends),
        *(rows, time_in, time_out, width, outputs, width // groups, channels_stored, group_outputs, outputs_stored),
        *(column_blocks, taps, conv.stride, conv.dilation, conv.padding),
        SCALE=RESIDUAL_SCALE,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        KEEPS_TOTAL=keep,
        ACTIVATION=number,
        ALL_CHANNELS=width // groups == channels_stored,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return total, out


@triton.jit(do_not_specialize=["time_in", "time_out", "shift_stride", "stride", "padding"])
def _waveform_conv_kernel(
    waves, weight, scale, shift, alpha, total, out, ends, time_in, time_out, channels, shift_stride, stride, padding,
    TAPS: tl.constexpr, HAS_SCALE: tl.constexpr, KEEPS_TOTAL: tl.constexpr, ACTIVATION: tl.constexpr,
    TIMES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
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
    tl.store(out + place, _activate(sums, alpha, channel, inside, ACTIVATION), mask=here)


def launch_waveform_conv(
    conv: Any, waves: torch.Tensor, ends: torch.Tensor, scale: Any, shift: torch.Tensor, activation: Any, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `WaveformConv`: `scale` is (clips, channels) or None, `shift` like it or (channels,)."""
    (clips, time_in), (taps, channels) = waves.shape, conv.weight.shape
    time_out, (number, alpha) = conv.length(time_in), _activation_arguments(activation)
    out = waves.new_empty(clips, time_out, channels)
    total = torch.empty_like(out) if keep else out
    assert waves.is_contiguous() and out.numel() < 2**31
    grid = (triton.cdiv(time_out, WAVEFORM_TIMES), clips, triton.cdiv(channels, WAVEFORM_CHANNELS))
    optional = (out if tensor is None else tensor for tensor in (scale, shift, alpha))
    _waveform_conv_kernel[grid](
        *(waves, conv.weight, *optional, total, out, ends),
        *(time_in, time_out, channels, 0 if shift.ndim == 1 else channels, conv.stride, conv.padding),
        TAPS=taps,
        HAS_SCALE=scale is not None,
        KEEPS_TOTAL=keep,
        ACTIVATION=number,
        TIMES=WAVEFORM_TIMES,
        CHANNELS=WAVEFORM_CHANNELS,
        num_warps=4,
    )
    return total, out
