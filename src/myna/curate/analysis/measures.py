"""Measures of a clip that decide whether it is kept: noise, music, predicted quality, loudness, clipping, bandwidth."""

from __future__ import annotations

import numpy as np

from myna.audio.files import Samples
from myna.audio.signal_measures import bandwidth_hz, clipped_share
from myna.curate.analysis.loudness import integrated_loudness
from myna.curate.analysis.models import AnalysisModels, require
from myna.curate.analysis.quality import CALIBRATIONS

NAN = float("nan")


def measure(samples: Samples, sample_rate: int, models: AnalysisModels) -> dict[str, float]:
    """All measures of a mono clip by name, in the order of the table; NaN where a model is missing."""
    peak = float(np.abs(samples).max(initial=0.0))
    scores = models.quality.score(samples, sample_rate) if models.quality else dict.fromkeys(CALIBRATIONS, NAN)
    return {
        "music_share": models.music.music_share(samples, sample_rate) if models.music else NAN,
        "snr_db": models.noise.snr_db(samples, sample_rate) if models.noise else NAN,
        "bandwidth_hz": bandwidth_hz(samples, sample_rate),
        "clipped_share": clipped_share(samples),
        **{name: scores[name] for name in ("dnsmos_ovrl", "dnsmos_bak", "dnsmos_sig")},
        "loudness_lufs": integrated_loudness(samples, sample_rate),
        "peak_dbfs": float(20 * np.log10(peak)) if peak else NAN,
    }


def embed_speaker(
    samples: Samples, sample_rate: int, models: AnalysisModels
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Speaker embedding of length one; zeros where there is no voice."""
    return require(models.speaker_encoder, "speaker embeddings").embed(samples, sample_rate)
