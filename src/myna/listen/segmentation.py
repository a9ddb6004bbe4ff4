"""Speaker segmentation of 10 s windows: pyannote's segmentation-3.0 (PyanNet: SincNet, LSTM, linear) in plain torch.

Module names are those of the published checkpoint; its sinc filters are weights of a plain convolution here
(tools/fetch_curation_models.py). Each frame has one class of the powerset of three speakers, of whom two may overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from myna.audio.files import Samples
from myna.listen.weights import remake_hint
from myna.models.files import load_network

SAMPLE_RATE = 16_000
WINDOW_SECONDS = 10.0
FRAME_SAMPLES, FRAME_STEP_SAMPLES = 991, 270
"""Of the receptive field of a frame, and from one to the next."""
FRAME_SECONDS = FRAME_STEP_SAMPLES / SAMPLE_RATE
LOCAL_SPEAKERS, MAX_SIMULTANEOUS = 3, 2
BATCH_WINDOWS, GPU_BATCH_WINDOWS = 8, 64
"""Of windows at once: a CPU gains nothing from more, which take 100 MB for each eight."""

FloatArray = npt.NDArray[np.float32]


def powerset(speakers: int, max_simultaneous: int) -> FloatArray:
    """Speakers active in each class (classes x speakers): nobody, one, two, ... in the order of `combinations`."""
    sets = [one for size in range(max_simultaneous + 1) for one in combinations(range(speakers), size)]
    return np.array([[speaker in one for speaker in range(speakers)] for one in sets], np.float32)


POWERSET = powerset(LOCAL_SPEAKERS, MAX_SIMULTANEOUS)


def frame_times(frames: int) -> npt.NDArray[np.float64]:
    """Seconds of the centre of each frame."""
    return (np.arange(frames) * FRAME_STEP_SAMPLES + FRAME_SAMPLES / 2) / SAMPLE_RATE


class SegmentationNetwork(nn.Module):
    """Mono windows at 16 kHz (batch, samples) -> log probabilities of the powerset classes (batch, frames, 7)."""

    def __init__(self) -> None:
        super().__init__()
        self.sincnet = _SincNet()
        self.lstm = nn.LSTM(60, 128, num_layers=4, bidirectional=True, batch_first=True)
        self.linear = nn.ModuleList([nn.Linear(256, 128), nn.Linear(128, 128)])
        self.classifier = nn.Linear(128, len(POWERSET))

    @classmethod
    def open(cls, file: Path, device: str = "cpu") -> SegmentationNetwork:
        return load_network(cls(), file, device, hint=remake_hint(file))

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.sincnet(waves[:, None]).transpose(1, 2))
        for layer in self.linear:
            x = F.leaky_relu(layer(x))
        return F.log_softmax(self.classifier(x), -1)

    @torch.inference_mode()
    def segment(self, samples: Samples, step_seconds: float) -> FloatArray:
        """Class probabilities of windows that begin every `step_seconds` (windows x frames x classes); mono, 16 kHz.

        The last window is filled up with silence.
        """
        size, step = round(WINDOW_SECONDS * SAMPLE_RATE), round(step_seconds * SAMPLE_RATE)
        count = 1 + max(0, -(-(len(samples) - size) // step))
        device = self.classifier.weight.device
        batch_size = BATCH_WINDOWS if device.type == "cpu" else GPU_BATCH_WINDOWS
        parts = []
        with one_thread():
            for first in range(0, count, batch_size):
                batch = np.zeros((min(batch_size, count - first), size), np.float32)
                for row, window in enumerate(batch, first):
                    audio = samples[row * step : row * step + size]
                    window[: len(audio)] = audio
                parts.append(self(torch.from_numpy(batch).to(device)).exp().cpu().numpy())
        return np.concatenate(parts)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch: steps of an LSTM are too short to share. On two busy cores, two threads took three times as
    long as one, and more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _SincNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wav_norm1d = nn.InstanceNorm1d(1, affine=True)
        self.conv1d = nn.ModuleList(
            [nn.Conv1d(1, 80, 251, stride=10, bias=False), nn.Conv1d(80, 60, 5), nn.Conv1d(60, 60, 5)]
        )
        self.norm1d = nn.ModuleList(nn.InstanceNorm1d(width, affine=True) for width in (80, 60, 60))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv1d[0](self.wav_norm1d(x)).abs()
        for index, norm in enumerate(self.norm1d):
            if index:
                x = self.conv1d[index](x)
            x = F.leaky_relu(norm(F.max_pool1d(x, 3)))
        return x
