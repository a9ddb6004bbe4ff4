"""What all ears share: the packages they come in, and the rate they hear at."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import soxr  # type: ignore[import-untyped]

from myna.audio.clip import Samples
from myna.errors import AudioError, ConfigError

RATE = 16_000
"""Every ear here was trained on sound of this rate."""


def needed(module: str, *commands: str) -> Any:
    """A package that only judging needs, or a `ConfigError` with the commands that bring it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{module} cannot be imported: {error}", hint=" && ".join(commands)) from error


def heard_at(samples: Samples, sample_rate: int) -> Samples:
    """One mono clip as the ears want it. What is no finite row of numbers would score as nonsense: it is refused."""
    if samples.ndim != 1:
        raise AudioError(f"a clip of shape {samples.shape} is not mono", hint="give one row of samples")
    if not np.isfinite(samples).all():
        raise AudioError("a clip holds samples that are no numbers", hint="look at what made it")
    if sample_rate == RATE:
        return np.ascontiguousarray(samples, dtype=np.float32)
    return np.ascontiguousarray(soxr.resample(samples, sample_rate, RATE, quality="VHQ"), dtype=np.float32)


def is_silent(samples: Samples) -> bool:
    """Nothing above -100 dB, or nothing at all."""
    return not np.abs(samples).max(initial=0) > 1e-5
