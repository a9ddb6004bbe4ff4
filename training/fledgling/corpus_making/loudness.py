"""Trimming of silence, speaker levels and vocal tract scaling of clips."""

from __future__ import annotations

import math
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
RESIZED_SHARE, TRACT_FACTORS = 0.6, (0.76, 1.2)
"""The share of speakers who become smaller or larger than they were made, down to children, and by which factors."""
FORMANT_SHARE, FORMANT_FACTORS = 0.5, (0.88, 1.14)
"""The share of speakers whose formants are moved at the same pitch, and by which factors."""


def trim(samples: Samples, sample_rate: int, rng: random.Random) -> Samples:
    """Return the clip without most of the silence at both ends. A clip of silence alone is returned as it is."""
    first, last = speech_bounds(samples, sample_rate)
    if last == 0 or rng.random() < UNTRIMMED_SHARE:
        return samples
    before, after = (round(rng.uniform(*bounds) * sample_rate) for bounds in (LEADING_SECONDS, TRAILING_SECONDS))
    return samples[max(0, first - before) : last + after]


def speech_bounds(samples: Samples, sample_rate: int, silence_db: float = SILENCE_DB) -> tuple[int, int]:
    """First sample of speech, and the one after the last; both 0 where there is none."""
    speech = _speech_windows(samples, sample_rate, silence_db)
    size = round(WINDOW_SECONDS * sample_rate)
    return (int(speech.argmax()) * size, (len(speech) - int(speech[::-1].argmax())) * size) if speech.any() else (0, 0)


def speaker_level(speaker: str, seed: int) -> float:
    """Level of a speaker in decibels of full scale: the same in all clips, so that a reference tells it."""
    return random.Random(f"{seed}/level/{speaker}").uniform(*LEVEL_DB)


def speaker_tract_factor(speaker: str, seed: int) -> float:
    """Factor by which the vocal tract is longer than a synthesiser made it; many stay as they were made."""
    return _speaker_factor(f"{seed}/size/{speaker}", RESIZED_SHARE, TRACT_FACTORS)


def speaker_formant_factor(speaker: str, seed: int) -> float:
    """Factor by which the formants are higher than a synthesiser made them, at the same pitch."""
    return _speaker_factor(f"{seed}/formants/{speaker}", FORMANT_SHARE, FORMANT_FACTORS)


def _speaker_factor(salt: str, share: float, factors: tuple[float, float]) -> float:
    """Return a factor between `factors` for a `share` of the speakers, and 1 for the others."""
    rng = random.Random(salt)
    return log_uniform(rng, factors) if rng.random() < share else 1.0


def log_uniform(rng: random.Random, bounds: tuple[float, float]) -> float:
    """Uniform on a logarithmic scale."""
    return math.exp(rng.uniform(*map(math.log, bounds)))


def resample_tract(samples: Samples, size: float) -> Samples:
    """Played more slowly where the speaker is larger: deeper, darker and longer, all by the same factor."""
    return samples if size == 1.0 else np.asarray(soxr.resample(samples, 1.0, size, quality="MQ"), np.float32)


def at_level(samples: Samples, sample_rate: int, level: float, rng: random.Random) -> Samples:
    """Bring speech to a level; to a lower one where it would be clipped."""
    power = speech_power(samples, sample_rate)
    if power == 0:
        return samples
    gain = 10 ** ((level + rng.gauss(0, LEVEL_JITTER_DB)) / 20) / np.sqrt(power)
    return np.asarray(samples * min(gain, MAX_PEAK / float(np.abs(samples).max())), np.float32)


def speech_power(samples: Samples, sample_rate: int) -> float:
    """Mean square where there is speech; 0 where there is none."""
    speech = np.repeat(_speech_windows(samples, sample_rate), round(WINDOW_SECONDS * sample_rate))[: len(samples)]
    return float(np.mean(np.square(samples[: len(speech)][speech], dtype=np.float64))) if speech.any() else 0.0


def _speech_windows(samples: Samples, sample_rate: int, silence_db: float = SILENCE_DB) -> npt.NDArray[np.bool_]:
    """Tell which windows hold speech, the last one being whole or not there."""
    size = round(WINDOW_SECONDS * sample_rate)
    windows = samples[: len(samples) // size * size].reshape(-1, size)
    power = np.mean(np.square(windows, dtype=np.float64), axis=1)
    loudest = power.max(initial=0.0)
    return np.asarray((power > loudest * 10 ** (silence_db / 10)) & (loudest > 0))
