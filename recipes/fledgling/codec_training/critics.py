"""Networks that learn to tell the codec's sound from the true one, and so teach it what a mel spectrogram cannot.

Two kinds, after HiFi-GAN and EnCodec: those that see every p-th sample side by side hear pitch and pulses, those that
see spectra hear harmonics and hiss. One pass over true and made sound together serves both the critics' own lesson and
the codec's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

PERIODS = (2, 3, 5, 7, 11)
WINDOWS = (2048, 1024, 512)

Felt = list[torch.Tensor]
"""What each layer of a critic made of the sound; the last is its verdict."""


class Critic(nn.Module):
    """Convolutions over an image of the sound, each halving or thirding one side of it."""

    def __init__(self, layers: Sequence[nn.Conv2d], verdict: nn.Conv2d) -> None:
        super().__init__()
        self.layers = nn.ModuleList(weight_norm(layer) for layer in layers)
        self.verdict = weight_norm(verdict)

    def image(self, waves: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, waves: torch.Tensor) -> Felt:
        x = self.image(waves).contiguous(memory_format=torch.channels_last)
        felt = []
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.1)
            felt.append(x)
        return [*felt, self.verdict(x)]


class PeriodCritic(Critic):
    def __init__(self, period: int, width: int) -> None:
        widths = (1, width, 2 * width, 4 * width, 8 * width)
        layers = [nn.Conv2d(a, b, (5, 1), (3, 1), (2, 0)) for a, b in pairwise(widths)]
        layers.append(nn.Conv2d(8 * width, 8 * width, (5, 1), 1, (2, 0)))
        super().__init__(layers, nn.Conv2d(8 * width, 1, (3, 1), 1, (1, 0)))
        self.period = period

    def image(self, waves: torch.Tensor) -> torch.Tensor:
        padded = F.pad(waves, (0, -waves.shape[1] % self.period))
        return padded.reshape(len(waves), 1, -1, self.period)


class SpectrumCritic(Critic):
    window: torch.Tensor

    def __init__(self, window: int, width: int) -> None:
        layers = [nn.Conv2d(2, width, (3, 9), (1, 2), (1, 4))]
        layers += [nn.Conv2d(width, width, (3, 5), (1, 2), (1, 2)) for _ in range(3)]
        layers.append(nn.Conv2d(width, width, 3, 1, 1))
        super().__init__(layers, nn.Conv2d(width, 1, 3, 1, 1))
        self.register_buffer("window", torch.hann_window(window), persistent=False)

    def image(self, waves: torch.Tensor) -> torch.Tensor:
        size = len(self.window)
        with torch.autocast(waves.device.type, enabled=False):
            frames = F.pad(waves.float(), (size // 2, size // 2)).unfold(1, size, size // 4)
            spectra = torch.fft.rfft(frames * self.window, norm="ortho")
        return torch.stack([spectra.real, spectra.imag], 1)


class Verdicts(NamedTuple):
    critics: torch.Tensor
    """What the critics are to lower: how badly they tell true from made."""
    fooled: torch.Tensor
    """What the codec is to lower: how well it is found out."""
    likeness: torch.Tensor
    """The same for how differently true and made sound are felt."""


class Critics(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.all = nn.ModuleList(
            [PeriodCritic(period, width) for period in PERIODS] + [SpectrumCritic(size, width) for size in WINDOWS]
        )

    def forward(self, true: torch.Tensor, made: torch.Tensor) -> Verdicts:
        """Both as (clips, samples)."""
        both = torch.cat([true, made])
        critics = fooled = likeness = both.new_zeros(())
        for critic in self.all:
            *felt, verdict = critic(both)
            good, bad = verdict.float().chunk(2)
            critics = critics + (1 - good).square().mean() + bad.square().mean()
            fooled = fooled + (1 - bad).square().mean()
            for layer in felt:
                one, other = layer.chunk(2)
                likeness = likeness + (one.detach() - other).abs().mean(dtype=torch.float32)
        return Verdicts(critics, fooled, likeness)
