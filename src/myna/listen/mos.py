"""Mean opinion score (MOS) predictors, from 1 to 5, each with its weights in its wheel.

DistillMOS was trained on all kinds of speech, synthetic speech too: 1 is noise, natural speech is about 4.5. DNSMOS was
made for calls and rates noise and damage: clean speech has about 3.3.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from myna.audio.files import Samples
from myna.audio.mono import LISTENING_RATE, as_mono_16khz
from myna.core.errors import AudioError, import_optional
from myna.listen.weights import remake_hint
from myna.models.files import load_network

# Both require torchaudio, which would pull another torch, so they come alone; what they import is installed with Myna.
INSTALL_DISTILLMOS = ("pip install --no-deps distillmos==0.9.1 xls_r_sqa==0.1.0",)
INSTALL_DNSMOS = ("pip install --no-deps speechmos==0.0.1.1", 'pip install onnxruntime requests "myna[evaluate]"')


class DistillMOS:
    def __init__(self, model: Any, device: str = "cpu") -> None:
        self._model, self._device = model, device

    @classmethod
    def open(cls, device: str = "cpu") -> DistillMOS:
        with _torchaudio_stub():
            distillmos = import_optional("distillmos", *INSTALL_DISTILLMOS)
        with contextlib.redirect_stdout(io.StringIO()):  # it prints where its weights are
            return cls(distillmos.ConvTransformerSQAModel().to(device).eval().requires_grad_(False), device)

    @torch.inference_mode()
    def score(self, samples: Samples, sample_rate: int) -> float:
        """The MOS, independent of loudness."""
        clip = _nonempty_clip(samples, sample_rate)
        return float(self._model(torch.from_numpy(clip)[None].to(self._device)))


class DNSMOS:
    """Overall DNSMOS. Computed by the wheel's own code, so that the numbers are those others publish."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @classmethod
    def open(cls) -> DNSMOS:
        return cls(import_optional("speechmos.dnsmos", *INSTALL_DNSMOS).run)

    def score(self, samples: Samples, sample_rate: int) -> float:
        clip = _nonempty_clip(samples, sample_rate)
        return float(self._run(np.clip(clip, -1.0, 1.0), LISTENING_RATE)["ovrl_mos"])


def _nonempty_clip(samples: Samples, sample_rate: int) -> Samples:
    if not len(samples):
        raise AudioError("an empty clip has no quality", hint="leave it out, and count it as not spoken")
    return as_mono_16khz(samples, sample_rate)


@contextlib.contextmanager
def _torchaudio_stub() -> Iterator[None]:
    """An empty torchaudio while DistillMOS is imported, which uses it for its command line only.

    The real one does not load beside every torch. The stub is removed afterwards, so that nothing else finds it.
    """
    if "torchaudio" in sys.modules:
        yield
        return
    stub = ModuleType("torchaudio")
    stub.__spec__ = importlib.util.spec_from_loader("torchaudio", loader=None)
    sys.modules["torchaudio"] = stub
    try:
        yield
    finally:
        del sys.modules["torchaudio"]


WINDOW_SAMPLES = 144_160
"""9.01 s. Shorter clips are repeated up to it, longer ones covered by evenly spaced windows. The published code has a
window each second: its scores differed by 0.02 to 0.06 on four clips, at up to nine times the cost."""
FFT, HOP = 320, 160
CHANNELS = (1, 128, 64, 64, 32, 32, 32, 64)
POOLED_AFTER = (3, 4, 5)
"""Convolutions with a maximum over 2 x 2 behind them."""
CALIBRATIONS = {
    "dnsmos_sig": (-0.08397278, 1.22083953, 0.0052439),
    "dnsmos_bak": (-0.13166888, 1.60915514, -0.39604546),
    "dnsmos_ovrl": (-0.06766283, 1.11546468, 0.04602535),
}
"""Polynomials from the network's outputs to the scale of listeners, in the order of the outputs."""


class DNSMOSNetwork(nn.Module):
    """Samples at 16 kHz (batch, samples) -> signal, background and overall quality (batch, 3), not calibrated."""

    def __init__(self) -> None:
        super().__init__()
        self.stft = nn.Linear(FFT, 2 * (FFT // 2 + 1), bias=False)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(inputs, outputs, 3, padding=1) for inputs, outputs in itertools.pairwise(CHANNELS)
        )
        self.dense = nn.ModuleList([nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, len(CALIBRATIONS))])

    @classmethod
    def open(cls, file: Path, device: str = "cpu") -> DNSMOSNetwork:
        network = load_network(cls(), file, device, hint=remake_hint(file))
        for layer in network.convolutions:  # two thirds of the time, on a CPU
            layer.weight = nn.Parameter(
                layer.get_parameter("weight").to(memory_format=torch.channels_last), requires_grad=False
            )
        return network

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        real, imaginary = self.stft(waves.unfold(-1, FFT, HOP)).chunk(2, -1)
        x = (real.square() + imaginary.square()).clamp(min=1e-12).log10()[:, None]
        for index, convolution in enumerate(self.convolutions):
            x = F.relu(convolution(x), inplace=True)
            x = F.max_pool2d(x, 2) if index in POOLED_AFTER else x
        x = x.amax((2, 3))
        *hidden, last = self.dense
        for layer in hidden:
            x = F.relu(layer(x))
        scores: torch.Tensor = last(x)
        return scores

    @torch.inference_mode()
    def score(self, samples: Samples, sample_rate: int) -> dict[str, float]:
        """Means over windows of 9 s; NaN for an empty clip."""
        wave = np.clip(as_mono_16khz(samples, sample_rate), -1, 1)
        if not len(wave):
            return dict.fromkeys(CALIBRATIONS, float("nan"))
        if len(wave) < WINDOW_SAMPLES:
            wave = np.resize(wave, WINDOW_SAMPLES)
        count = -(-len(wave) // WINDOW_SAMPLES)
        starts = np.linspace(0, len(wave) - WINDOW_SAMPLES, count).astype(int)
        device = self.stft.weight.device
        # One at a time: two at once take no less time, and twice the memory.
        windows = (torch.from_numpy(wave[start : start + WINDOW_SAMPLES])[None].to(device) for start in starts)
        raw = torch.cat([self(window) for window in windows]).cpu().numpy()
        scores = zip(CALIBRATIONS.items(), raw.T, strict=True)
        return {name: float(np.polyval(coefficients, values).mean()) for (name, coefficients), values in scores}
