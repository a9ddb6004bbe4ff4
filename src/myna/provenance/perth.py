"""PerTh, a neural watermark: the network of resemble-perth in plain torch, its weights read from that package."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from myna.core.errors import OutputError
from myna.core.io import file_sha256
from myna.provenance import UNMARKED_HINT, perth_checkpoint

MARK_NAME = "perth-implicit-1"
"""Name of the watermark in logs, manifests and HTTP headers."""
CHECKPOINT_SHA256 = "a15bce457ebc53ce5e6c9c3f11df78cf7ee2bf9cdab0a798902135b4c4027670"

FFT_SAMPLES = 2048
"""Samples of a spectrum at the network's own 32 kHz; spectra of other rates are scaled to it."""
WINDOW_SECONDS, HOP_SECONDS = 0.064, 0.01
MARKED_BINS = 128
"""Number of spectral bins that carry the mark: those below 2 kHz."""
MIN_MAGNITUDE, RANGE_DB = 1e-9, 195.0
"""Smallest magnitude, and the decibels from -180 to 15 that become levels from 0 to 1."""
FRAME_REACH = 15
"""Frames on either side that a frame's mark depends on: five convolutions of seven taps."""
MARK_LEVEL = 0.04
"""Mean level from which a frame is marked: quieter ones are digital silence."""
DETECT_LEVEL = 0.05
"""Share of the loudest frame's mean level from which a frame counts in detection."""
MIN_BAND_LEVEL = 0.5
"""Mean level of the marked bins below which a clip cannot be judged: its low frequencies were cut. Speech has 0.8."""


class PerthNet(nn.Module):
    """Encoder and detector of the watermark, on levels of shape (batch, bins, frames)."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.encoder = _layers(weights, "encoder.layers")
        self.slow = _layers(weights, "decoder.slow_layers")
        self.normal = _layers(weights, "decoder.normal_layers")
        self.fast = _layers(weights, "decoder.fast_layers")

    def gain(self, levels: Tensor, is_frame: Tensor | None = None) -> Tensor:
        """Return the factors of the magnitudes that make the mark, shape (batch, marked bins, frames). `is_frame` of
        shape (batch, 1, frames) tells the frames of shorter clips from the padding after them."""
        is_marked = levels.mean(1, keepdim=True) > MARK_LEVEL
        x = levels[:, :MARKED_BINS].transpose(1, 2)
        # Convolutions as products, which take a third less time for so few frames.
        for weight, bias, taps in self._encoder_matrices:
            if is_frame is not None:  # a convolution reads zeros behind a clip, whatever its batch
                x = x * is_frame.transpose(1, 2)
            if taps > 1:
                x = F.pad(x, (0, 0, taps // 2, taps // 2)).unfold(1, taps, 1).transpose(2, 3)
            batch, frames = x.shape[:2]
            x = torch.addmm(bias, x.reshape(batch * frames, -1), weight).view(batch, frames, -1)
            if weight is not self._encoder_matrices[-1][0]:
                x = F.leaky_relu(x)
        change = x.transpose(1, 2) * is_marked
        return torch.pow(10.0, change * (RANGE_DB / 20))

    @cached_property
    def _encoder_matrices(self) -> list[tuple[Tensor, Any, int]]:
        """Weights (taps x inputs, outputs), biases and number of taps of the encoder's layers."""
        layers = [layer for layer in self.encoder if isinstance(layer, nn.Conv1d)]
        return [
            (layer.weight.permute(2, 1, 0).flatten(0, 1).contiguous(), layer.bias, layer.weight.shape[2])
            for layer in layers
        ]

    def score(self, levels: Tensor) -> Tensor:
        """Score whether clips are marked, about 0 to 1, by three networks at different tempos; shape (batch,)."""
        means = levels.mean(1, keepdim=True)
        is_heard = (means > DETECT_LEVEL * means.amax(2, keepdim=True)).float()
        frames, marks, weights = levels.shape[2], [], []
        for layers, tempo in ((self.slow, 1.25), (self.normal, 1.0), (self.fast, 0.75)):
            size = max(1, int(frames * tempo))
            stretched = F.interpolate(levels[:, :MARKED_BINS], size=size, mode="linear", align_corners=True)
            heard = F.interpolate(is_heard, size=size, mode="nearest")
            output = (layers(stretched) * heard).sum(2) / heard.sum(2).clamp(min=1)
            weights.append(output[:, 0])
            marks.append(output[:, 1])
        score = (torch.stack(marks, 1) * torch.stack(weights, 1).softmax(1)).sum(1).clamp(0, 1)
        heard_levels = (levels[:, :MARKED_BINS].mean(1, keepdim=True) * is_heard).sum(2) / is_heard.sum(2).clamp(min=1)
        return torch.where(heard_levels[:, 0] < MIN_BAND_LEVEL, 0.0, score)


def levels_of(spectra: Tensor, window: int) -> Tensor:
    """Return normalized levels of spectra of `window` samples."""
    magnitudes = spectra.abs().mul(FFT_SAMPLES / window).clamp(min=MIN_MAGNITUDE)
    return (20 * torch.log10(magnitudes) + 180) / RANGE_DB


@lru_cache(maxsize=4)
def load_perth(device: torch.device) -> PerthNet:
    """Load the network onto a device; it is kept for the next call."""
    weights = torch.load(_checkpoint(), map_location="cpu", weights_only=True, mmap=True)["model"]
    return PerthNet(weights).to(device).eval().requires_grad_(False)


def _checkpoint() -> Path:
    """Return the file of the weights after checking its hash, since it is a pickle."""
    file = perth_checkpoint()
    found = file_sha256(file)
    if found != CHECKPOINT_SHA256:
        raise OutputError(f"{file} is not the file that is known: its sha256 is {found}", hint=UNMARKED_HINT)
    return file


def _layers(weights: Mapping[str, Tensor], prefix: str) -> nn.Sequential:
    modules: list[nn.Module] = []
    for number in range(7):
        weight, bias = weights[f"{prefix}.{number}.conv.weight"], weights[f"{prefix}.{number}.conv.bias"]
        outputs, inputs, taps = weight.shape
        layer = nn.Conv1d(inputs, outputs, taps, padding=taps // 2)
        layer.load_state_dict({"weight": weight, "bias": bias})
        modules += [layer, nn.LeakyReLU()] if number < 6 else [layer]
    return nn.Sequential(*modules)
