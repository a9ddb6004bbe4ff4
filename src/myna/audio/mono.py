"""Mono input at the rate that models which hear expect."""

from __future__ import annotations

import numpy as np
import soxr  # type: ignore[import-untyped]

from myna.audio.files import Samples
from myna.core.errors import AudioError

SAMPLE_RATE = 16_000


def as_mono_16khz(samples: Samples, sample_rate: int) -> Samples:
    """A mono clip as the scorers take it. Other shapes and values that are not finite are refused."""
    if samples.ndim != 1:
        raise AudioError(f"a clip of shape {samples.shape} is not mono", hint="give one row of samples")
    if not np.isfinite(samples).all():
        raise AudioError("a clip holds samples that are no numbers", hint="look at what made it")
    if sample_rate == SAMPLE_RATE:
        return np.ascontiguousarray(samples, dtype=np.float32)
    return np.ascontiguousarray(soxr.resample(samples, sample_rate, SAMPLE_RATE, quality="VHQ"), dtype=np.float32)


def is_silent(samples: Samples) -> bool:
    """Nothing above -100 dB, or no samples at all."""
    return not np.abs(samples).max(initial=0) > 1e-5
