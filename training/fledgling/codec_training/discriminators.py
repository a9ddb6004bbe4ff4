"""Multi-period and multi-resolution STFT discriminators, after HiFi-GAN and EnCodec.

One forward pass over real and decoded audio serves both the discriminator loss and the generator loss; the two inputs
are not stacked, since the gradient of the generator loss goes back through the decoded audio alone.

They take most of a step's time, so their layers are shaped for a GPU. A convolution over one or two channels leaves
tensor cores idle and reads memory in small pieces: the first layers therefore see eight channels at each position
(eight neighbouring samples, or four complex bins), and nothing works at the full rate of samples or bins.
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
STFT_WINDOWS = (2048, 1024, 512)
INPUT_CHANNELS = 8
"""Channels of the input image: eight fp16 numbers are one memory transaction of a GPU."""
ROW_STRIDE = 3
"""Rows of samples between two positions of a period image."""
BINS_PER_POSITION = INPUT_CHANNELS // 2
"""Complex bins at each position of a spectrogram image."""

FeatureMaps = list[torch.Tensor]
"""Outputs of the layers of a discriminator; the last is its score."""


class Discriminator(nn.Module):
    """Strided 2D convolutions over an image of the waveform."""

    def __init__(self, layers: Sequence[nn.Conv2d], score: nn.Conv2d) -> None:
        super().__init__()
        self.layers = nn.ModuleList(weight_norm(layer) for layer in layers)
        self.score = weight_norm(score)

    def image(self, waves: torch.Tensor) -> torch.Tensor:
        """(clips, samples) -> (clips, eight, height, width)."""
        raise NotImplementedError

    def forward(self, waves: torch.Tensor) -> FeatureMaps:
        x = self.image(waves)
        if torch.is_autocast_enabled(waves.device.type):
            x = x.to(torch.get_autocast_dtype(waves.device.type))
        x = x.contiguous(memory_format=torch.channels_last)
        features = []
        for layer in self.layers:
            # In place: no convolution needs its own output again, and each pass over it costs as much as a layer.
            x = F.leaky_relu_(layer(x), 0.1)
            features.append(x)
        return [*features, self.score(x)]


class PeriodDiscriminator(Discriminator):
    """Sees every p-th sample side by side: pitch and pulses."""

    def __init__(self, period: int, width: int) -> None:
        layers = [nn.Conv2d(INPUT_CHANNELS, width, 1)]
        layers += [
            nn.Conv2d(a, b, (5, 1), (3, 1), (2, 0)) for a, b in pairwise((width, 2 * width, 4 * width, 8 * width))
        ]
        layers.append(nn.Conv2d(8 * width, 8 * width, (5, 1), 1, (2, 0)))
        super().__init__(layers, nn.Conv2d(8 * width, 1, (3, 1), 1, (1, 0)))
        self.period = period

    def image(self, waves: torch.Tensor) -> torch.Tensor:
        """Every position holds eight samples, one period apart; the next position begins three rows further on."""
        around = (INPUT_CHANNELS - ROW_STRIDE) // 2
        rows = -(-waves.shape[1] // (ROW_STRIDE * self.period)) * ROW_STRIDE
        before, all_rows = around * self.period, rows + INPUT_CHANNELS - ROW_STRIDE
        padded = F.pad(waves, (before, all_rows * self.period - before - waves.shape[1]))
        # (clips, positions, period, eight) as a view: the copy into channels_last is the only one.
        return (
            padded.reshape(len(waves), all_rows, self.period).unfold(1, INPUT_CHANNELS, ROW_STRIDE).permute(0, 3, 1, 2)
        )


class SpectrogramDiscriminator(Discriminator):
    """Sees a complex STFT: harmonics and noise."""

    window: torch.Tensor

    def __init__(self, window: int, width: int) -> None:
        wide = 2 * width  # convolutions of 64 channels use a GPU twice as well as those of 32
        layers = [
            nn.Conv2d(INPUT_CHANNELS, width, 3, 1, 1),
            nn.Conv2d(width, wide, (3, 5), 2, (1, 2)),
            nn.Conv2d(wide, wide, (3, 5), (1, 2), (1, 2)),
            nn.Conv2d(wide, wide, (3, 5), (1, 2), (1, 2)),
            nn.Conv2d(wide, wide, 3, 1, 1),
        ]
        super().__init__(layers, nn.Conv2d(wide, 1, 3, 1, 1))
        self.register_buffer("window", torch.hann_window(window), persistent=False)

    def image(self, waves: torch.Tensor) -> torch.Tensor:
        """Every position holds the real and imaginary parts of four neighbouring bins; the highest bin is left out, so
        that their number is even."""
        size = len(self.window)
        with torch.autocast(waves.device.type, enabled=False):
            frames = F.pad(waves.float(), (size // 2, size // 2)).unfold(1, size, size // 4)
            spectra = torch.fft.rfft(frames * self.window, norm="ortho")
        parts = torch.view_as_real(spectra)[:, :, : size // 2].reshape(
            *spectra.shape[:2], size // INPUT_CHANNELS, INPUT_CHANNELS
        )
        return parts.permute(0, 3, 1, 2)


class AdversarialLosses(NamedTuple):
    """Least-squares GAN losses."""

    discriminator: torch.Tensor
    adversarial: torch.Tensor
    """Adversarial loss of the generator."""
    feature_matching: torch.Tensor
    """Mean L1 distance of the discriminators' features, for the generator."""


class _FeatureL1(torch.autograd.Function):
    """Mean L1 distance of two feature maps, saved in their own dtype: torch's own loss works in fp32."""

    @staticmethod
    def forward(ctx: Any, decoded: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        difference = decoded - real
        ctx.save_for_backward(difference)
        mean: torch.Tensor = torch.linalg.vector_norm(difference, 1, dtype=torch.float32) / difference.numel()
        return mean

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (difference,) = ctx.saved_tensors
        return difference.sign().mul_(grad / difference.numel()), None


class Discriminators(nn.Module):
    """All discriminators, and their losses added up."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.all = nn.ModuleList(
            [PeriodDiscriminator(period, width) for period in PERIODS]
            + [SpectrogramDiscriminator(size, width) for size in STFT_WINDOWS]
        )

    def forward(self, real: torch.Tensor, decoded: torch.Tensor) -> AdversarialLosses:
        """Return the losses of recorded and decoded sound. Both inputs have the shape (clips, samples)."""
        discriminator_loss = adversarial = feature_matching = decoded.new_zeros(())
        with parametrize.cached():  # the weights are normalised once for both
            for discriminator in self.all:
                *real_features, real_score = discriminator(real)
                *fake_features, fake_score = discriminator(decoded)
                real_score, fake_score = real_score.float(), fake_score.float()
                discriminator_loss = discriminator_loss + (1 - real_score).square().mean() + fake_score.square().mean()
                adversarial = adversarial + (1 - fake_score).square().mean()
                for real_map, fake_map in zip(real_features, fake_features, strict=True):
                    l1 = _FeatureL1.apply(fake_map, real_map.detach())  # type: ignore[no-untyped-call]
                    feature_matching = feature_matching + l1
        return AdversarialLosses(discriminator_loss, adversarial, feature_matching)
