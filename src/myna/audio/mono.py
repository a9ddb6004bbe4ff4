"""Mono audio at 16 kHz: the input of every model in `listen/`."""

from __future__ import annotations

import numpy as np
import soxr  # type: ignore[import-untyped]

from myna.audio.files import Samples
from myna.core.errors import AudioError

LISTENING_RATE = 16_000
"""Sample rate in hertz that all models in `listen/` were trained on."""


def as_mono_16khz(samples: Samples, sample_rate: int) -> Samples:
    """Resample a mono clip to 16 kHz. Refuse other shapes and values that are not finite."""
    if samples.ndim != 1:
        raise AudioError(f"a clip of shape {samples.shape} is not mono", hint="give one row of samples")
    if not np.isfinite(samples).all():
        raise AudioError("a clip holds samples that are no numbers", hint="look at what made it")
    if sample_rate == LISTENING_RATE:
        return np.ascontiguousarray(samples, dtype=np.float32)
    return np.ascontiguousarray(soxr.resample(samples, sample_rate, LISTENING_RATE, quality="VHQ"), dtype=np.float32)


def is_silent(samples: Samples) -> bool:
    """Tell whether a clip has no sample above -100 dB, or no samples at all."""
    return not np.abs(samples).max(initial=0) > 1e-5
