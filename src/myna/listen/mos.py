"""Mean opinion score (MOS) predictors, from 1 to 5, each with its weights in its wheel.

DistillMOS was trained on all kinds of speech, synthetic speech too: 1 is noise, natural speech is about 4.5. DNSMOS was
made for calls and rates noise and damage: clean speech has about 3.3.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch

from myna.audio.files import Samples
from myna.audio.mono import as_mono_16khz
from myna.core.errors import AudioError
from myna.core.optional import import_optional
from myna.listen.pretrained import SAMPLE_RATE

# Both require torchaudio, which would pull another torch, so they come alone; what they import is installed with Myna.
INSTALL = ("pip install --no-deps distillmos==0.9.1 xls_r_sqa==0.1.0",)
INSTALL_DNSMOS = ("pip install --no-deps speechmos==0.0.1.1", 'pip install onnxruntime requests "myna[evaluate]"')


class DistillMOS:
    def __init__(self, model: Any, device: str = "cpu") -> None:
        self._model, self._device = model, device

    @classmethod
    def open(cls, device: str = "cpu") -> DistillMOS:
        with _torchaudio_stub():
            distillmos = import_optional("distillmos", *INSTALL)
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
        return float(self._run(np.clip(clip, -1.0, 1.0), SAMPLE_RATE)["ovrl_mos"])


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
