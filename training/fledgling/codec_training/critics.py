"""Networks that learn to tell the codec's sound from the true one, and so teach it what a mel spectrogram cannot.

Two kinds, after HiFi-GAN and EnCodec: those that see every p-th sample side by side hear pitch and pulses, those that
see spectra hear harmonics and hiss. One pass over true and made sound serves both the critics' own lesson and the
codec's; the two are not stacked, since the codec's lesson goes back through the made sound alone.

They take most of a step's time, so their layers are shaped for a card. A convolution over one or two channels leaves
tensor cores idle and reads memory in crumbs: the first layers therefore see eight numbers at each place (eight
neighbouring samples, or four bins with both parts), and nothing works at the full rate of samples or bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

PERIODS = (2, 3, 5, 7, 11)
WINDOWS = (2048, 1024, 512)
SEEN = 8
"""Numbers at each place of an image: a row of eight halves is what a card loads at once."""
STRIDE = 3
"""Rows of samples from one place of a period's image to the next."""
BINS = SEEN // 2
"""Bins at each place of a spectrum's image, with a real and an imaginary part each."""

Felt = list[torch.Tensor]
"""What each layer of a critic made of the sound; the last is its verdict."""


class Critic(nn.Module):
    """Convolutions over an image of the sound, most of them halving or thirding a side of it."""

    def __init__(self, layers: Sequence[nn.Conv2d], verdict: nn.Conv2d) -> None:
        super().__init__()
        self.layers = nn.ModuleList(weight_norm(layer) for layer in layers)
        self.verdict = weight_norm(verdict)

    def image(self, waves: torch.Tensor) -> torch.Tensor:
        """(clips, samples) -> (clips, eight, height, width)."""
        raise NotImplementedError

    def forward(self, waves: torch.Tensor) -> Felt:
        x = self.image(waves)
        if torch.is_autocast_enabled(waves.device.type):
            x = x.to(torch.get_autocast_dtype(waves.device.type))
        x = x.contiguous(memory_format=torch.channels_last)
        felt = []
        for layer in self.layers:
            # In place: no convolution asks for its own output again, and each pass over it costs as much as a layer.
            x = F.leaky_relu_(layer(x), 0.1)
            felt.append(x)
        return [*felt, self.verdict(x)]


class PeriodCritic(Critic):
    def __init__(self, period: int, width: int) -> None:
        layers = [nn.Conv2d(SEEN, width, 1)]
        layers += [
            nn.Conv2d(a, b, (5, 1), (3, 1), (2, 0)) for a, b in pairwise((width, 2 * width, 4 * width, 8 * width))
        ]
        layers.append(nn.Conv2d(8 * width, 8 * width, (5, 1), 1, (2, 0)))
        super().__init__(layers, nn.Conv2d(8 * width, 1, (3, 1), 1, (1, 0)))
        self.period = period

    def image(self, waves: torch.Tensor) -> torch.Tensor:
        """Every place holds eight samples that lie one period apart, and the next place begins three further on."""
        around = (SEEN - STRIDE) // 2
        rows = -(-waves.shape[1] // (STRIDE * self.period)) * STRIDE
        before, all_rows = around * self.period, rows + SEEN - STRIDE
        padded = F.pad(waves, (before, all_rows * self.period - before - waves.shape[1]))
        # (clips, places, period, eight) as a view: the copy into the layout of the card is the only one.
        return padded.reshape(len(waves), all_rows, self.period).unfold(1, SEEN, STRIDE).permute(0, 3, 1, 2)


class SpectrumCritic(Critic):
    window: torch.Tensor

    def __init__(self, window: int, width: int) -> None:
        wide = 2 * width  # convolutions of 64 channels keep a card twice as busy as those of 32
        layers = [
            nn.Conv2d(SEEN, width, 3, 1, 1),
            nn.Conv2d(width, wide, (3, 5), 2, (1, 2)),
            nn.Conv2d(wide, wide, (3, 5), (1, 2), (1, 2)),
            nn.Conv2d(wide, wide, (3, 5), (1, 2), (1, 2)),
            nn.Conv2d(wide, wide, 3, 1, 1),
        ]
        super().__init__(layers, nn.Conv2d(wide, 1, 3, 1, 1))
        self.register_buffer("window", torch.hann_window(window), persistent=False)

    def image(self, waves: torch.Tensor) -> torch.Tensor:
        """Every place holds four neighbouring bins, real parts and imaginary ones; the highest bin of all is left out,
        so that they come out even."""
        size = len(self.window)
        with torch.autocast(waves.device.type, enabled=False):
            frames = F.pad(waves.float(), (size // 2, size // 2)).unfold(1, size, size // 4)
            spectra = torch.fft.rfft(frames * self.window, norm="ortho")
        parts = torch.view_as_real(spectra)[:, :, : size // 2].reshape(*spectra.shape[:2], size // SEEN, SEEN)
        return parts.permute(0, 3, 1, 2)


class Verdicts(NamedTuple):
    critics: torch.Tensor
    """What the critics are to lower: how badly they tell true from made."""
    fooled: torch.Tensor
    """What the codec is to lower: how well it is found out."""
    likeness: torch.Tensor
    """The same for how differently true and made sound are felt."""


class _Unlike(torch.autograd.Function):
    """The mean difference of what was felt, kept in the type it was felt in: torch's own losses go over it in fp32."""

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        apart = made - true
        ctx.save_for_backward(apart)
        mean: torch.Tensor = torch.linalg.vector_norm(apart, 1, dtype=torch.float32) / apart.numel()
        return mean

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (apart,) = ctx.saved_tensors
        return apart.sign().mul_(grad / apart.numel()), None


class Critics(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.all = nn.ModuleList(
            [PeriodCritic(period, width) for period in PERIODS] + [SpectrumCritic(size, width) for size in WINDOWS]
        )

    def forward(self, true: torch.Tensor, made: torch.Tensor) -> Verdicts:
        """Both as (clips, samples)."""
        critics = fooled = likeness = made.new_zeros(())
        with parametrize.cached():  # the weights are normed once for both
            for critic in self.all:
                *truly, good = critic(true)
                *falsely, bad = critic(made)
                good, bad = good.float(), bad.float()
                critics = critics + (1 - good).square().mean() + bad.square().mean()
                fooled = fooled + (1 - bad).square().mean()
                for one, other in zip(truly, falsely, strict=True):
                    likeness = likeness + _Unlike.apply(other, one.detach())  # type: ignore[no-untyped-call]
        return Verdicts(critics, fooled, likeness)
