"""Kokoro's generator in fp16 with fused kernels: one pass over memory where `kokoro_network.py` has ten.

It takes the weights of a `Generator` and says the same, but for rounding: products multiply halves and add up in fp32,
and what goes from one to the next is kept in halves. Sines, phases, spectra, statistics and the last step to samples
stay in fp32. On a CUDA card with Triton the steps are the kernels of `kokoro_kernels.py`; what is written here in torch
is for any other device and for reading, and rounds where the kernels round.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus_making.kokoro_network import Generator, Lengths, SnakeBlock, snake
from myna.core.device import supports_triton

WIDE, DEEP = 128, 64
"""Weights are filled up with zeros to multiples of so many outputs and channels, so that no block reads past them."""
HALF = torch.float16


@cache
def _kernels() -> Any:
    return __import__("corpus_making.kokoro_kernels", fromlist=["kokoro_kernels"])


def moments_of(x: Tensor, ends: Tensor) -> Tensor:
    """(2, lines, 1, channels): means, and sums of squares around them, over what is before each line's end."""
    there = (torch.arange(x.shape[1], device=x.device) < ends[:, None])[..., None]
    mean = torch.where(there, x, 0).sum(1, keepdim=True) / ends[:, None, None]
    return torch.stack([mean, torch.where(there, x - mean, 0).square().sum(1, keepdim=True)])


class HalfConv(nn.Module):
    """A convolution over (lines, time, channels) that takes what is outside a line as zero."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, dilation: int, padding: int) -> None:
        super().__init__()
        self.outputs, channels, taps = weight.shape
        self.dilation, self.padding = dilation, padding
        stored = torch.zeros(-(-self.outputs // WIDE) * WIDE, taps, -(-channels // DEEP) * DEEP, device=weight.device)
        stored[: self.outputs, :, :channels] = weight.detach().transpose(1, 2)
        self.register_buffer("weight", stored.to(HALF))
        self.register_buffer("bias", bias.detach().float().clone())

    @classmethod
    def of(cls, conv: nn.Conv1d) -> HalfConv:
        assert conv.bias is not None
        return cls(conv.weight, conv.bias, conv.dilation[0], int(conv.padding[0]))

    @classmethod
    def finer(cls, conv: nn.ConvTranspose1d) -> HalfConv:
        """Make a convolution that makes time finer, twice as long as its step: a moment gives all moments of a step
        at once, out of itself and the one before."""
        step = conv.stride[0]
        assert conv.bias is not None and conv.kernel_size[0] == 2 * step
        inputs, outputs, _ = conv.weight.shape
        now, before = conv.weight.detach().chunk(2, dim=2)
        taps = torch.stack([before, now], -1).permute(2, 1, 0, 3).reshape(step * outputs, inputs, 2)
        return cls(taps, conv.bias.repeat(step), 1, 1)

    def forward(
        self,
        x: Tensor,
        ends: Tensor,
        *,
        time: int | None = None,
        ends_out: Tensor | None = None,
        add: Tensor | None = None,
        measured: bool = True,
        dtype: torch.dtype = HALF,
    ) -> tuple[Tensor, Tensor]:
        """(lines, time, outputs) with `add` added to it and nothing behind a line's end, and moments of it."""
        time, ends_out = x.shape[1] if time is None else time, ends if ends_out is None else ends_out
        if supports_triton(x):
            how = (self.outputs, ends, ends_out, time, self.dilation, self.padding, add, measured, dtype)
            return _kernels().convolve(x, self.weight, self.bias, *how)  # type: ignore[no-any-return]
        channels = x.shape[2]
        weight = self.weight[: self.outputs, :, :channels].float().transpose(1, 2)
        read = _before(x.float(), ends).transpose(1, 2)
        reach = self.dilation * (weight.shape[2] - 1)
        read = F.pad(read, (self.padding, max(0, time + reach - self.padding - x.shape[1])))
        out = F.conv1d(read, weight, self.bias, dilation=self.dilation)[..., :time].transpose(1, 2)
        out = _before(out if add is None else out + add, ends_out)
        return out.to(dtype).contiguous(), moments_of(out, ends_out) if measured else out


def _before(x: Tensor, ends: Tensor) -> Tensor:
    return torch.where((torch.arange(x.shape[1], device=x.device) < ends[:, None])[..., None], x, 0)


def add_source(
    up: Tensor | None, beside: Tensor, ends: Tensor, skipped: int = 0, mirrored: int = 0
) -> tuple[Tensor, Tensor]:
    """`beside`, with `up` added that begins after `skipped` moments and has so many `mirrored` before; and moments."""
    if supports_triton(beside):
        return _kernels().add_source(up, beside, ends, skipped, mirrored)  # type: ignore[no-any-return]
    numbers = beside.float()
    if up is not None:
        source = skipped + (torch.arange(beside.shape[1], device=beside.device) - mirrored).abs()
        numbers = numbers + up[:, source.clamp_max(up.shape[1] - 1)]
    numbers = _before(numbers, ends)
    return numbers.to(HALF), moments_of(numbers, ends)


def norm_coefficients(moments: Tensor, gamma: Tensor, beta: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the shift of a styled norm, (lines, channels) each; `gamma` and `beta` are parts of one tensor."""
    if supports_triton(moments):
        return _kernels().norm_coefficients(moments, gamma, beta, ends)  # type: ignore[no-any-return]
    mean, spread = moments[:, :, 0]
    scale = (1 + gamma) * torch.rsqrt(spread / ends[:, None] + 1e-5)
    return scale, beta - mean * scale


def norm_and_snake(x: Tensor, scale: Tensor, shift: Tensor, alpha: Tensor) -> Tensor:
    """The norm and the snake."""
    if supports_triton(x):
        return _kernels().norm_and_snake(x, scale, shift, alpha)  # type: ignore[no-any-return]
    return snake(torch.addcmul(shift[:, None], x.float(), scale[:, None]), alpha).to(HALF)


class FastSnakeBlock(nn.Module):
    def __init__(self, block: SnakeBlock) -> None:
        super().__init__()
        pairs: list[Any] = [
            each
            for number in range(3)
            for each in (
                (block.adain1[number], block.alpha1[number], block.convs1[number]),
                (block.adain2[number], block.alpha2[number], block.convs2[number]),
            )
        ]
        self.products = nn.ModuleList(HalfConv.of(conv) for _, _, conv in pairs)
        self.styles = [norm.fc for norm, _, _ in pairs]
        self.channels: int = pairs[0][2].out_channels
        for number, (_, alpha, _) in enumerate(pairs):
            self.register_buffer(f"alpha{number}", alpha.detach().float().flatten().clone())

    def forward(self, x: Tensor, moments: Tensor, styles: Tensor, ends: Tensor) -> Tensor:
        """`styles` (lines, products, 2, channels): what the norms before the products add and multiply with."""
        out = x
        for number, product in enumerate(self.products):
            scale, shift = norm_coefficients(moments, styles[:, number, 0], styles[:, number, 1], ends)
            bent = norm_and_snake(out, scale, shift, getattr(self, f"alpha{number}"))
            last = number + 1 == len(self.products)
            if number % 2 == 0:
                out, moments = product(bent, ends)
            else:
                out, moments = product(bent, ends, add=x, measured=not last)
                x = out
        return x


class FastGenerator(nn.Module):
    """Made of a `Generator`, whose modules stay as they are."""

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.sizes = generator.sizes
        self._plain = (generator,)  # a tuple, or its weights would be moved and saved twice
        self.ups = nn.ModuleList(HalfConv.finer(conv) for conv in _list(generator.ups))
        self.noise_res = nn.ModuleList(FastSnakeBlock(block) for block in _list(generator.noise_res))
        self.resblocks = nn.ModuleList(FastSnakeBlock(block) for block in _list(generator.resblocks))
        self.conv_post = HalfConv.of(generator.conv_post)
        layers = [layer for block in self._blocks() for layer in block.styles]
        self.style_weight: Tensor
        self.style_bias: Tensor
        self.register_buffer("style_weight", torch.cat([layer.weight.detach() for layer in layers]).float())
        self.register_buffer("style_bias", torch.cat([layer.bias.detach() for layer in layers]).float())

    def _blocks(self) -> list[Any]:
        return [*self.noise_res, *self.resblocks]

    def forward(self, x: Tensor, style: Tensor, pitch: Tensor, lengths: Lengths) -> Tensor:
        """Compute what `Generator.forward` does."""
        plain, (coarse, fine) = self._plain[0], self.sizes.steps
        widths = [12 * block.channels for block in self._blocks()]
        parts = torch.split(F.linear(style, self.style_weight, self.style_bias), widths, dim=1)
        styles = [each.view(len(style), 6, 2, -1) for each in parts]
        finest = lengths.finer(coarse * fine, 1)
        source = plain.spectrum(plain.sines(pitch), lengths.finer(coarse * fine * self.sizes.hop))
        source = finest.clean(source)
        x, ends_before = x.transpose(1, 2).to(HALF).contiguous(), lengths.count
        for number, at in enumerate((lengths.finer(coarse), finest)):
            ends, step = at.count, self.sizes.steps[number]
            beside, moments = add_source(None, plain.noise_convs[number](source).transpose(1, 2).contiguous(), ends)
            beside = self.noise_res[number](beside, moments, styles[number], ends)
            # One moment more than before, of which a half is cut off at each end.
            up = self.ups[number](
                F.leaky_relu(x, 0.1), ends_before, time=x.shape[1] + 1, ends_out=ends_before + 1, measured=False
            )[0]
            x, moments = add_source(up.unflatten(2, (step, -1)).flatten(1, 2), beside, ends, step // 2, number)
            first, second, third = (
                self.resblocks[place](x, moments, styles[2 + place], ends)
                for place in range(3 * number, 3 * number + 3)
            )
            x, ends_before = (first + second + third) / 3, ends
        spectra = self.conv_post(F.leaky_relu(x), finest.count, measured=False, dtype=torch.float32)[0].transpose(1, 2)
        magnitude, angle = spectra.chunk(2, dim=1)
        return plain.samples(finest.clean(magnitude.exp()), angle.sin())


def _list(modules: nn.ModuleList) -> list[Any]:
    return list(modules)
