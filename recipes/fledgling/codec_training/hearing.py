"""How far two sounds are apart, heard through windows from 3 to 85 milliseconds."""

from __future__ import annotations

import torch
from torch import nn

from myna.models.mel_codec.network import QUIETEST, MelSpectrogram

SCALES = ((64, 5), (128, 10), (256, 20), (512, 40), (1024, 80), (2048, 160))
"""Samples of a window, and mel bins."""


class MelDistance(nn.Module):
    """The mean difference of log10 mel spectrograms over all scales: 0.1 is 2 dB."""

    def __init__(self, sample_rate: int) -> None:
        super().__init__()
        self.scales = nn.ModuleList(MelSpectrogram(sample_rate, size, size // 4, bins) for size, bins in SCALES)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        both, apart = torch.cat([one, other]), one.new_zeros(())
        for scale in self.scales:
            left, right = scale(both).clamp(min=QUIETEST).log10().chunk(2)
            apart = apart + (left - right).abs().mean()
        return apart / len(self.scales)
