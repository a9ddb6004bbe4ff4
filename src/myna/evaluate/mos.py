"""How good does it sound, from 1 to 5? Two opinions, each with its weights in its wheel.

DistillMOS has heard all kinds of speech, made speech too: 1 is noise, natural speech is about 4.5. DNSMOS was made for
calls and listens for noise and damage: clean speech has about 3.3.
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
from myna.errors import AudioError
from myna.evaluate.dependencies import RATE, heard_at, needed

# Both ask for torchaudio, which would pull another torch, so they come alone; what they import is installed with Myna.
INSTALL = ("pip install --no-deps distillmos==0.9.1 xls_r_sqa==0.1.0",)
INSTALL_DNSMOS = ("pip install --no-deps speechmos==0.0.1.1", 'pip install onnxruntime requests "myna[evaluate]"')


class DistillMOS:
    def __init__(self, model: Any) -> None:
        self._model = model

    @classmethod
    def open(cls) -> DistillMOS:
        with _torchaudio_named():
            distillmos = needed("distillmos", *INSTALL)
        with contextlib.redirect_stdout(io.StringIO()):  # it tells where its weights lie
            return cls(distillmos.ConvTransformerSQAModel().eval().requires_grad_(False))

    @torch.inference_mode()
    def score(self, samples: Samples, sample_rate: int) -> float:
        """A mean opinion score from 1 to 5. Loudness does not count."""
        clip = heard_at(samples, sample_rate)
        if not len(clip):
            raise AudioError("an empty clip has no quality", hint="leave it out, and count it as not spoken")
        return float(self._model(torch.from_numpy(clip)[None]))


class DNSMOS:
    """DNSMOS: the overall opinion. The wheel's own code listens, so that the numbers are those others publish."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @classmethod
    def open(cls) -> DNSMOS:
        return cls(needed("speechmos.dnsmos", *INSTALL_DNSMOS).run)

    def score(self, samples: Samples, sample_rate: int) -> float:
        clip = heard_at(samples, sample_rate)
        if not len(clip):
            raise AudioError("an empty clip has no quality", hint="leave it out, and count it as not spoken")
        return float(self._run(np.clip(clip, -1.0, 1.0), RATE)["ovrl_mos"])


@contextlib.contextmanager
def _torchaudio_named() -> Iterator[None]:
    """DistillMOS imports torchaudio for its command line only, and torchaudio does not load beside every torch.

    While it is imported an empty module answers to that name, and goes again, so that nobody else meets it.
    """
    if "torchaudio" in sys.modules:
        yield
        return
    stand_in = ModuleType("torchaudio")
    stand_in.__spec__ = importlib.util.spec_from_loader("torchaudio", loader=None)
    sys.modules["torchaudio"] = stand_in
    try:
        yield
    finally:
        del sys.modules["torchaudio"]
