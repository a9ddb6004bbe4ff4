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

    def forward(self, true: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        apart = made.new_zeros(())
        for scale in self.scales:
            with torch.no_grad():  # apart from each other: half of the way back would lead to the true sound
                due = scale(true).clamp(min=QUIETEST).log10()
            apart = apart + (scale(made).clamp(min=QUIETEST).log10() - due).abs().mean()
        return apart / len(self.scales)
