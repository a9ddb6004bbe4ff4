"""What all ears share: the packages they come in, and the rate they hear at."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import soxr  # type: ignore[import-untyped]
from huggingface_hub import snapshot_download

from myna.audio.files import Samples
from myna.errors import AudioError, ConfigError, ModelError
from myna.models.files import first_line

RATE = 16_000
"""Every ear here was trained on sound of this rate."""
HUB_FILES = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "*.json", "*.txt")
"""What is downloaded of an ear in transformers' layout. Never a pickle, and no second copy in another precision."""


def needed(module: str, *commands: str) -> Any:
    """A package that only judging needs, or a `ConfigError` with the commands that bring it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{module} cannot be imported: {error}", hint=" && ".join(commands)) from error


def fetched(repository: str, *files: str) -> Path:
    """The folder of an ear from the hub, downloaded once."""
    try:
        return Path(snapshot_download(repository, allow_patterns=list(files)))
    except Exception as error:
        raise ModelError(
            f"{repository} is no folder here, and the hub did not give it: {first_line(error)}",
            hint=f"check the name and the network, or fetch it elsewhere with `hf download {repository}` and give the "
            "path of that folder",
        ) from error


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
