"""Music detection: inaSpeechSegmenter's network of speech, music and noise (Doukhan et al. 2018) in plain torch.

Input is 0.68 s of 21 log mel bands, normalized as a whole. Batch normalization is folded into the weights
(`myna setup curation`).
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from myna.audio.files import LISTENING_RATE, Samples, as_mono_16khz
from myna.listen.weights import remake_hint
from myna.models.files import load_network

WINDOW, HOP, FFT = 400, 160, 512
PREEMPHASIS = 0.97
MEL_BANDS, USED_BANDS = 24, 21
MEL_RANGE_HZ = (100.0, 8000.0)
PATCH_FRAMES = 68
PATCH_STEP_FRAMES = 10
"""Frames from one patch to the next. The network was made for 2; 10 take a fifth of the time, and suffice for a
share."""
CLASSES = ("speech", "music", "noise")
ACTIVE_ENERGY_RATIO = 0.03
"""Share of the mean energy below which a patch is quiet and left out."""
BATCH_PATCHES = 64
WINDOW_SECONDS = 60.0
"""Seconds of audio at once, which bounds the memory."""

FloatArray = npt.NDArray[np.float32]


class SpeechMusicNoiseNetwork(nn.Module):
    """Network from patches (batch, 68, 21) to probabilities of speech, music and noise (batch, 3)."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = [((7, 4), 1, 64), ((3, 3), 64, 128), ((3, 3), 128, 128), ((3, 3), 128, 256)]
        self.layers = nn.ModuleList(nn.Conv2d(inputs, outputs, size) for size, inputs, outputs in convolutions)
        self.layers.extend(nn.Linear(256, 256) for _ in range(4))
        self.layers.append(nn.Linear(256, len(CLASSES)))

    @classmethod
    def open(cls, file: Path, device: str = "cpu") -> SpeechMusicNoiseNetwork:
        return load_network(cls(), file, device, hint=remake_hint(file))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth, *dense, last = self.layers
        x = F.max_pool2d(F.pad(F.relu(first(patches[:, None])), (0, 0, 1, 1)), (4, 2))
        x = F.max_pool2d(F.pad(F.relu(third(F.relu(second(x)))), (0, 1, 0, 0)), 2)
        x = F.max_pool2d(F.relu(fourth(x)), (4, 1)).flatten(1)
        for layer in dense:
            x = F.relu(layer(x))
        return F.softmax(last(x), -1)

    @torch.inference_mode()
    def classify(self, samples: Samples, sample_rate: int) -> FloatArray:
        """Return the probabilities of each patch that is loud enough (patches x 3), one every 0.1 s; none in
        silence."""
        wave, size = as_mono_16khz(samples, sample_rate), round(WINDOW_SECONDS * LISTENING_RATE)
        device = next(self.parameters()).device
        parts = [np.empty((0, len(CLASSES)), np.float32)]
        for first in range(0, max(1, len(wave)), size):
            patches = log_mel_patches(wave[first : first + size])
            batches = (patches[start : start + BATCH_PATCHES] for start in range(0, len(patches), BATCH_PATCHES))
            parts += [self(torch.from_numpy(batch).to(device)).cpu().numpy() for batch in batches]
        return np.concatenate(parts)

    def music_share(self, samples: Samples, sample_rate: int) -> float:
        """Return the mean probability of music over the parts with sound; 0 in silence."""
        probabilities = self.classify(samples, sample_rate)
        return float(probabilities[:, CLASSES.index("music")].mean()) if len(probabilities) else 0.0


def log_mel_patches(wave: Samples, step: int = PATCH_STEP_FRAMES) -> FloatArray:
    """Return normalised patches of log mel energies (patches, 68, 21) of mono audio at 16 kHz, without silent ones."""
    if len(wave) < WINDOW + (PATCH_FRAMES - 1) * HOP:
        wave = np.pad(wave, (0, WINDOW + (PATCH_FRAMES - 1) * HOP - len(wave)))
    frames = np.lib.stride_tricks.sliding_window_view(wave, WINDOW)[::HOP].astype(np.float32)
    frames = np.asarray(frames - PREEMPHASIS * np.concatenate([frames[:, :1], frames[:, :-1]], 1), np.float32)
    with np.errstate(divide="ignore"):
        energy = np.log((frames**2).sum(1))
        power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW), FFT)).astype(np.float32) ** 2
        mels = np.log(power @ _mel_filters().T)[:, :USED_BANDS]
    patches = np.lib.stride_tricks.sliding_window_view(mels, PATCH_FRAMES, axis=0)[::step].transpose(0, 2, 1)
    finite = np.isfinite(energy)
    if not finite.any():
        return np.empty((0, PATCH_FRAMES, USED_BANDS), np.float32)
    loud = energy > energy[finite].mean() + np.log(ACTIVE_ENERGY_RATIO)
    active = np.lib.stride_tricks.sliding_window_view(loud, PATCH_FRAMES)[::step].mean(1) >= 0.5
    patches = patches[active & np.isfinite(patches).all((1, 2))]
    deviation = patches.std((1, 2), keepdims=True)
    normalized = (patches - patches.mean((1, 2), keepdims=True)) / np.maximum(deviation, 1e-6)
    return np.ascontiguousarray(normalized, np.float32)


@functools.cache
def _mel_filters() -> FloatArray:
    """Return triangular filters of unit area over 100-8000 Hz (24 x 257); each falling side lacks its last bin."""
    low, high = (2595 * np.log10(1 + hz / 700) for hz in MEL_RANGE_HZ)
    corners = 700 * (10 ** ((low + np.arange(MEL_BANDS + 2) * (high - low) / (MEL_BANDS + 1)) / 2595) - 1)
    bins = np.arange(FFT // 2 + 1) * LISTENING_RATE / FFT
    filters = np.zeros((MEL_BANDS, len(bins)), np.float32)
    for band, (left, centre, right) in enumerate(zip(corners, corners[1:], corners[2:], strict=False)):
        height = 2 / (right - left)
        first, middle, last = (int(np.floor(hz * FFT / LISTENING_RATE)) + 1 for hz in (left, centre, right))
        rising, falling = slice(first, middle), slice(middle, last - 1)
        filters[band, rising] = height / (centre - left) * (bins[rising] - left)
        filters[band, falling] = height / (right - centre) * (right - bins[falling])
    return filters
