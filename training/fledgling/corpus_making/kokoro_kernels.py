"""Triton kernels of Kokoro's generator, in fp16 with fp32 accumulation.

Tensors are (lines, time, channels). A convolution also writes the mean and the sum of squares of its output by block;
`norm_coefficients` turns those into the scale and the shift of a styled norm; `norm_and_snake` applies them and the
snake activation in one pass over memory. All of them know the length of each line, so that nothing needs a mask.
Nothing is compiled anew for another length or another number of lines.

Only imported where there is a CUDA device and Triton. `kokoro_fast.py` has the same in plain torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, COLUMNS, DEPTH = 128, 128, 64
"""Sizes of a block of a product: moments of time, channels of the output, channels of the input."""
SETTLED_BLOCKS, SETTLED_COLUMNS = 32, 64
BENT_ROWS = 32


@triton.jit
def _store_moments(numbers, first, row, end, means, spreads, column, inside, ROWS: tl.constexpr):
    """The mean of each column over the rows before the end, and the sum of squares around it."""
    count = tl.minimum(tl.maximum(end - first, 0), ROWS).to(tl.float32)
    there = (row < end)[:, None]
    mean = tl.sum(tl.where(there, numbers, 0.0), axis=0) / tl.maximum(count, 1.0)
    rest = tl.where(there, numbers - mean[None, :], 0.0)
    tl.store(means + column, mean, mask=inside)
    tl.store(spreads + column, tl.sum(rest * rest, axis=0), mask=inside)


# A kernel of its own for lengths that happen to be multiples of 16, or dilations of 1, would only cost its making.
@triton.jit(
    do_not_specialize=["time_in", "time_out", "column_blocks", "taps", "dilation", "padding", "adds", "measures"]
)
def _convolve(
    x,
    weight,
    bias,
    residual,
    out,
    means,
    spreads,
    ends_in,
    ends_out,
    time_in,
    time_out,
    channels,
    outputs,
    column_blocks,
    taps,
    dilation,
    padding,
    adds,
    measures,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # Neighbouring programs read the same rows, so that they find them in the cache.
    block = tl.program_id(0) // column_blocks
    column = (tl.program_id(0) % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    line = tl.program_id(1)
    row = block * ROWS + tl.arange(0, ROWS)
    step = tl.arange(0, DEPTH)
    end_in = tl.load(ends_in + line).to(tl.int32)
    end = tl.load(ends_out + line).to(tl.int32)
    read = x + (line * time_in + row - padding)[:, None] * channels + step[None, :]
    filters = weight + column[None, :] * (taps * channels) + step[:, None]

    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    steps = channels // DEPTH
    # Behind a line's end there is nothing to add up.
    for number in range(0, tl.where(block * ROWS < end, taps * steps, 0)):
        tap = number // steps
        at = row - padding + tap * dilation
        seen = ((at >= 0) & (at < end_in))[:, None]
        numbers = tl.load(read + (tap * dilation * channels + (number - tap * steps) * DEPTH), mask=seen, other=0.0)
        sums = tl.dot(numbers, tl.load(filters + number * DEPTH), sums)

    inside = column < outputs
    sums += tl.load(bias + column, mask=inside, other=0.0)[None, :]
    place = (line * time_out + row)[:, None] * outputs + column[None, :]
    here = (row < time_out)[:, None] & inside[None, :]
    if adds != 0:
        sums += tl.load(residual + place, mask=here, other=0.0).to(tl.float32)
    sums = tl.where((row < end)[:, None], sums, 0.0)
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=here)
    if measures != 0:
        part = (line * tl.cdiv(time_out, ROWS) + block) * outputs
        _store_moments(sums, block * ROWS, row, end, means + part, spreads + part, column, inside, ROWS)


def blocks_of(time: int) -> int:
    return -(-time // ROWS)


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    outputs: int,
    ends_in: torch.Tensor,
    ends_out: torch.Tensor,
    time_out: int,
    dilation: int,
    padding: int,
    residual: torch.Tensor | None,
    measured: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` is (outputs, filled up to `COLUMNS`, taps, channels). With `measured`, moments by block of rows:
    (2, lines, blocks, outputs), means and sums of squares around them."""
    lines, time_in, channels = x.shape
    stored, taps, depth = weight.shape
    assert x.is_contiguous() and channels == depth and depth % DEPTH == 0 and stored % COLUMNS == 0
    out = torch.empty(lines, time_out, outputs, dtype=dtype, device=x.device)
    assert max(x.numel(), out.numel()) < 2**31, "places are counted in 32 bits"
    assert residual is None or (residual.is_contiguous() and residual.shape == out.shape)
    size = (2, lines, blocks_of(time_out), outputs) if measured else (2, 1, 1, 4)  # 16 bytes each, as kernels expect
    moments = torch.empty(size, dtype=torch.float32, device=x.device)
    column_blocks = stored // COLUMNS
    _convolve[(blocks_of(time_out) * column_blocks, lines)](
        x,
        weight,
        bias,
        x if residual is None else residual,
        out,
        moments[0],
        moments[1],
        ends_in,
        ends_out,
        time_in,
        time_out,
        channels,
        outputs,
        column_blocks,
        taps,
        dilation,
        padding,
        int(residual is not None),
        int(measured),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        DEPTH=DEPTH,
        num_warps=8,
        num_stages=3,
        # So that two blocks fit a multiprocessor, and one adds up while the other writes.
        maxnreg=128 if dtype == torch.float16 else None,
    )
    return out, moments


@triton.jit(do_not_specialize=["time_up", "time", "column_blocks", "skipped", "mirrored", "adds"])
def _add_source(
    up,
    beside,
    out,
    means,
    spreads,
    ends,
    time_up,
    time,
    channels,
    column_blocks,
    skipped,
    mirrored,
    adds,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = tl.program_id(0) // column_blocks
    column = (tl.program_id(0) % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    line = tl.program_id(1)
    row = block * ROWS + tl.arange(0, ROWS)
    end = tl.load(ends + line).to(tl.int32)
    inside = column < channels
    there = (row < end)[:, None] & inside[None, :]
    place = (line * time + row)[:, None] * channels + column[None, :]
    numbers = tl.load(beside + place, mask=there, other=0.0).to(tl.float32)
    if adds != 0:
        source = skipped + tl.abs(row - mirrored)
        found = tl.load(up + (line * time_up + source)[:, None] * channels + column[None, :], mask=there, other=0.0)
        numbers += found.to(tl.float32)
    tl.store(out + place, numbers.to(out.dtype.element_ty), mask=(row < time)[:, None] & inside[None, :])
    part = (line * tl.cdiv(time, ROWS) + block) * channels
    _store_moments(numbers, block * ROWS, row, end, means + part, spreads + part, column, inside, ROWS)


def add_source(
    up: torch.Tensor | None, beside: torch.Tensor, ends: torch.Tensor, skipped: int, mirrored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`beside`, with `up` added that begins after `skipped` moments and has so many `mirrored` before; and moments."""
    lines, time, channels = beside.shape
    assert beside.is_contiguous() and (up is None or up.is_contiguous())
    out = torch.empty(lines, time, channels, dtype=torch.float16, device=beside.device)
    moments = torch.empty(2, lines, blocks_of(time), channels, dtype=torch.float32, device=beside.device)
    column_blocks = triton.cdiv(channels, COLUMNS)
    _add_source[(blocks_of(time) * column_blocks, lines)](
        out if up is None else up,
        beside,
        out,
        moments[0],
        moments[1],
        ends,
        0 if up is None else up.shape[1],
        time,
        channels,
        column_blocks,
        skipped,
        mirrored,
        int(up is not None),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=8,
    )
    return out, moments


@triton.jit(do_not_specialize=["blocks"])
def _norm_coefficients(
    means,
    spreads,
    gammas,
    betas,
    scales,
    shifts,
    ends,
    blocks,
    channels,
    style_stride,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    line = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    end = tl.load(ends + line).to(tl.int32)
    there = tl.cdiv(end, ROWS)
    mean = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, there, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        count = tl.minimum(tl.maximum(end - block * ROWS, 0), ROWS).to(tl.float32)
        place = (line * blocks + block)[:, None] * channels + column[None, :]
        known = (block < there)[:, None] & inside[None, :]
        mean += tl.sum(tl.load(means + place, mask=known, other=0.0) * count[:, None], axis=0)
    mean = mean / end.to(tl.float32)
    spread = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, there, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        count = tl.minimum(tl.maximum(end - block * ROWS, 0), ROWS).to(tl.float32)
        place = (line * blocks + block)[:, None] * channels + column[None, :]
        known = (block < there)[:, None] & inside[None, :]
        off = tl.load(means + place, mask=known, other=0.0) - mean[None, :]
        inner = tl.load(spreads + place, mask=known, other=0.0)
        spread += tl.sum(inner + off * off * count[:, None], axis=0)
    gamma = tl.load(gammas + line * style_stride + column, mask=inside, other=0.0)
    beta = tl.load(betas + line * style_stride + column, mask=inside, other=0.0)
    scale = (1.0 + gamma) * tl.rsqrt(spread / end.to(tl.float32) + 1e-5)
    tl.store(scales + line * channels + column, scale, mask=inside)
    tl.store(shifts + line * channels + column, beta - mean * scale, mask=inside)


def norm_coefficients(
    moments: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and the shift of a styled norm, (lines, channels) each; `gamma` and `beta` are parts of one tensor."""
    _, lines, blocks, channels = moments.shape
    scale, shift = torch.empty(2, lines, channels, dtype=torch.float32, device=moments.device)
    assert moments.is_contiguous() and gamma.stride() == beta.stride() and gamma.stride(1) == 1
    _norm_coefficients[(lines, triton.cdiv(channels, SETTLED_COLUMNS))](
        moments[0],
        moments[1],
        gamma,
        beta,
        scale,
        shift,
        ends,
        blocks,
        channels,
        gamma.stride(0),
        ROWS=ROWS,
        BLOCKS=SETTLED_BLOCKS,
        COLUMNS=SETTLED_COLUMNS,
        num_warps=4,
    )
    return scale, shift


@triton.jit
def _sine_up_to_sign(x):
    """sin(x) or -sin(x), to 4e-6, which half precision does not see: the library's own reads like a page."""
    turns = tl.floor(x * 0.3183098861837907 + 0.5)
    x = tl.fma(turns, -3.1415927410125732, x)
    x = tl.fma(turns, 8.742277657347586e-08, x)
    square = x * x
    series = tl.fma(square, 2.7557319223985893e-06, -0.0001984126984126984)
    series = tl.fma(square, series, 0.008333333333333333)
    series = tl.fma(square, series, -0.16666666666666666)
    return tl.fma(x * square, series, x)


@triton.jit(do_not_specialize=["time", "column_blocks"])
def _norm_and_snake(
    x,
    scale,
    shift,
    alpha,
    out,
    time,
    channels,
    column_blocks,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(0) // column_blocks) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    line = tl.program_id(1)
    inside = column < channels
    place = (line * time + row)[:, None] * channels + column[None, :]
    here = (row < time)[:, None] & inside[None, :]
    factor = tl.load(scale + line * channels + column, mask=inside, other=0.0)
    added = tl.load(shift + line * channels + column, mask=inside, other=0.0)
    quick = tl.load(alpha + column, mask=inside, other=1.0)
    numbers = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
    numbers = tl.fma(numbers, factor[None, :], added[None, :])
    wave = _sine_up_to_sign(numbers * quick[None, :])
    numbers = tl.fma(wave * wave, (1.0 / quick)[None, :], numbers)
    tl.store(out + place, numbers.to(out.dtype.element_ty), mask=here)


def norm_and_snake(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """The norm and the snake. Behind a line's end it leaves whatever it leaves: no convolution reads it."""
    lines, time, channels = x.shape
    assert x.is_contiguous() and x.numel() < 2**31
    out = torch.empty_like(x)
    column_blocks = triton.cdiv(channels, COLUMNS)
    _norm_and_snake[(triton.cdiv(time, BENT_ROWS) * column_blocks, lines)](
        x, scale, shift, alpha, out, time, channels, column_blocks, ROWS=BENT_ROWS, COLUMNS=COLUMNS, num_warps=4
    )
    return out
