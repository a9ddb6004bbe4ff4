"""Multi-scale mel spectrogram loss, with windows from 3 to 85 milliseconds."""

from __future__ import annotations

import torch
from torch import nn

from myna.models.mel_codec import MIN_MEL_MAGNITUDE, MelSpectrogram

SCALES = ((64, 5), (128, 10), (256, 20), (512, 40), (1024, 80), (2048, 160))
"""Samples of a window, and mel bins."""


class MelDistance(nn.Module):
    """Mean L1 distance of log10 mel spectrograms over all scales: 0.1 is 2 dB."""

    def __init__(self, sample_rate: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(MelSpectrogram(sample_rate, size, size // 4, bins) for size, bins in SCALES)

    def forward(self, target: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
        distance = decoded.new_zeros(())
        for scale in self.scales:
            with torch.no_grad():  # not stacked: half of the backward pass would be of the target
                expected = scale(target).clamp(min=MIN_MEL_MAGNITUDE).log10()
            distance = distance + (scale(decoded).clamp(min=MIN_MEL_MAGNITUDE).log10() - expected).abs().mean()
        return distance / len(self.scales)
