"""Trimming of silence, speaker levels and vocal tract scaling of clips."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import soxr  # type: ignore[import-untyped]

Samples = npt.NDArray[np.float32]

WINDOW_SECONDS = 0.01
"""Window of the loudness measurement."""
SILENCE_DB = -38.0
"""Threshold of speech relative to the loudest window: the breath before a word is quieter than that."""
LEADING_SECONDS, TRAILING_SECONDS = (0.03, 0.20), (0.08, 0.35)
"""Seconds of silence that are left, drawn for each clip, as people cut differently."""
UNTRIMMED_SHARE = 0.2
"""The share of clips that keep all of their silence, since many recordings do."""
LEVEL_DB = (-27.0, -16.0)
"""Decibels of full scale, root mean square of speech."""
LEVEL_JITTER_DB = 1.0
"""Decibels by which the level of one speaker's clips differs, as a standard deviation."""
MAX_PEAK = 0.97
RESIZED_SHARE, TRACT_FACTORS = 0.5, (0.9, 1.12)
"""The share of speakers who become smaller or larger than they were made, and by which factors."""


def trim(samples: Samples, sample_rate: int, rng: random.Random) -> Samples:
    """Without most of the silence at both ends; all of a clip that is nothing else."""
    speech = _speech_windows(samples, sample_rate)
    if not speech.any() or rng.random() < UNTRIMMED_SHARE:
        return samples
    size = round(WINDOW_SECONDS * sample_rate)
    first, last = int(speech.argmax()) * size, (len(speech) - int(speech[::-1].argmax())) * size
    before, after = (round(rng.uniform(*bounds) * sample_rate) for bounds in (LEADING_SECONDS, TRAILING_SECONDS))
    return samples[max(0, first - before) : last + after]


def speaker_level(speaker: str, seed: int) -> float:
    """How loud a speaker is, in decibels of full scale: the same in all clips, so that a reference tells it."""
    return random.Random(f"{seed}/level/{speaker}").uniform(*LEVEL_DB)


def speaker_tract_factor(speaker: str, seed: int) -> float:
    """How much longer the way from throat to lips is than a synthesiser made it; many stay as they were made."""
    rng = random.Random(f"{seed}/size/{speaker}")
    return rng.uniform(*TRACT_FACTORS) if rng.random() < RESIZED_SHARE else 1.0


def resample_tract(samples: Samples, size: float) -> Samples:
    """Played more slowly where the speaker is larger: deeper, darker and longer, all by the same factor."""
    return samples if size == 1.0 else np.asarray(soxr.resample(samples, 1.0, size, quality="MQ"), np.float32)


def at_level(samples: Samples, sample_rate: int, level: float, rng: random.Random) -> Samples:
    """So loud where there is speech; less where it would be clipped."""
    power = speech_power(samples, sample_rate)
    if power == 0:
        return samples
    gain = 10 ** ((level + rng.gauss(0, LEVEL_JITTER_DB)) / 20) / np.sqrt(power)
    return np.asarray(samples * min(gain, MAX_PEAK / float(np.abs(samples).max())), np.float32)


def speech_power(samples: Samples, sample_rate: int) -> float:
    """Mean square where there is speech; 0 where there is none."""
    speech = np.repeat(_speech_windows(samples, sample_rate), round(WINDOW_SECONDS * sample_rate))[: len(samples)]
    return float(np.mean(np.square(samples[: len(speech)][speech], dtype=np.float64))) if speech.any() else 0.0


def _speech_windows(samples: Samples, sample_rate: int) -> npt.NDArray[np.bool_]:
    """Which windows hold speech, the last one being whole or not there."""
    size = round(WINDOW_SECONDS * sample_rate)
    windows = samples[: len(samples) // size * size].reshape(-1, size)
    power = np.mean(np.square(windows, dtype=np.float64), axis=1)
    loudest = power.max(initial=0.0)
    return np.asarray((power > loudest * 10 ** (SILENCE_DB / 10)) & (loudest > 0))
