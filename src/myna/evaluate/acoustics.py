"""What can be measured of a sound without any ear: silences, pauses, pitch, and whether it is a copy of another."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from myna.audio.files import Samples
from myna.evaluate.dependencies import RATE, heard_at

REVISION = "1"
"""Changes whenever the same sound would measure otherwise: what was measured before is then measured again."""
STEP = RATE // 100
"""Samples between two moments: ten milliseconds."""
BELOW_LOUD, AUDIBLE = 40.0, -60.0
"""Decibels: a moment is silent that far below the loud ones, and in any case below this level."""
PAUSE = 0.15
"""Seconds of silence from which it is a pause and not part of a consonant."""
LOWEST, HIGHEST = 60.0, 500.0
"""Hertz between which voices lie."""
VOICED = 0.6
"""How alike a moment must be to itself a period later to have a pitch."""
BANDS = 24
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measures:
    seconds: float
    leading: float
    """Seconds of silence before the first sound."""
    trailing: float
    spoken: float
    """Seconds from the first sound to the last; none where all is silent."""
    pauses: float
    """Share of that in pauses."""
    voiced: float
    """Share of the sounding moments that have a pitch. Speech has half or more, noise has none."""
    pitch: float
    """Hertz, the median; not a number where nothing is voiced."""
    pitch_range: float
    """Semitones between the lowest tenth and the highest tenth."""

    @property
    def is_silent(self) -> bool:
        return self.spoken == 0


def measure(samples: Samples, sample_rate: int) -> Measures:
    clip = heard_at(samples, sample_rate)
    seconds, sounding = len(clip) / RATE, sounding_moments(clip)
    if not sounding.any():
        return Measures(seconds, seconds, 0.0, 0.0, 0.0, 0.0, math.nan, math.nan)
    first, last = int(np.argmax(sounding)), len(sounding) - int(np.argmax(sounding[::-1]))
    spoken = (last - first) * STEP / RATE
    pitches = pitch_track(clip)[: len(sounding)]
    heard = sounding[: len(pitches)]
    found = pitches[heard & (pitches > 0)]
    low, middle, high = np.percentile(found, [10, 50, 90]) if len(found) else (math.nan,) * 3
    return Measures(
        seconds=seconds,
        leading=first * STEP / RATE,
        trailing=max(0.0, seconds - last * STEP / RATE),
        spoken=spoken,
        pauses=_pauses(sounding[first:last]) * STEP / RATE / spoken,
        voiced=len(found) / max(1, int(heard.sum())),
        pitch=float(middle),
        pitch_range=12 * math.log2(high / low) if len(found) else math.nan,
    )


def sounding_moments(clip: Samples) -> npt.NDArray[np.bool_]:
    """(moments,): where there is more than silence."""
    count = len(clip) // STEP
    power = np.square(clip[: count * STEP].astype(np.float64)).reshape(count, STEP).mean(axis=1)
    level = 10 * np.log10(power + 1e-12)
    loud = np.percentile(level, 95) if count else AUDIBLE
    return np.asarray(level > max(loud - BELOW_LOUD, AUDIBLE))


def _pauses(sounding: npt.NDArray[np.bool_]) -> int:
    """Moments that lie in pauses."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (~sounding).astype(np.int8), [0]])))
    lengths = edges[1::2] - edges[::2]
    return int(lengths[lengths >= PAUSE * RATE / STEP].sum())


def pitch_track(clip: Samples) -> Array:
    """(moments,): hertz, and 0 where there is no pitch. Autocorrelation, put right for the window's own."""
    size, window = RATE // 20, np.hanning(RATE // 20)
    padded = np.pad(clip.astype(np.float64), (size // 2, size))
    starts = np.arange(len(clip) // STEP) * STEP
    frames = padded[starts[:, None] + np.arange(size)]
    frames = (frames - frames.mean(axis=1, keepdims=True)) * window
    lags = np.arange(int(RATE / HIGHEST), int(RATE / LOWEST) + 1)
    alike = _autocorrelation(frames)[:, : lags[-1] + 2] / _autocorrelation(window[None])[0, : lags[-1] + 2]
    within = alike[:, lags]
    peaks = (within >= alike[:, lags - 1]) & (within >= alike[:, lags + 1])
    best = np.where(peaks, within, 0.0).max(axis=1, initial=0.0)
    # A period and its multiples are nearly equally good, and the pitch is the shortest of them.
    shortest = np.argmax(peaks & (within >= 0.9 * best[:, None]), axis=1)
    return np.where(best >= VOICED, RATE / lags[shortest], 0.0)


def _autocorrelation(frames: Array) -> Array:
    power = np.square(np.abs(np.fft.rfft(frames, 2 * frames.shape[1], axis=1)))
    found = np.fft.irfft(power, axis=1)[:, : frames.shape[1]]
    return np.asarray(found / np.maximum(found[:, :1], 1e-12))


def copied(samples: Samples, other: Samples, sample_rate: int) -> float:
    """How much of `other` a sound is, at the best shift in time: 1 is a copy, other words are well below.

    Compared are the outlines of bands of pitch and not samples, so that a copy through a codec is one too.
    """
    one, two = (_outlines(heard_at(clip, sample_rate)) for clip in (samples, other))
    size = 1 << int(len(one) + len(two)).bit_length()
    shifted = np.fft.irfft(np.fft.rfft(one, size, axis=0) * np.conj(np.fft.rfft(two, size, axis=0)), size, axis=0)
    norm = float(np.linalg.norm(one) * np.linalg.norm(two))
    return float(shifted.sum(axis=1).max() / norm) if norm else 0.0


def _outlines(clip: Samples) -> Array:
    """(moments, bands): how loud each band is, above its own mean."""
    size = 2 * STEP
    count = max(0, (len(clip) - size) // STEP + 1)
    if not count or not sounding_moments(clip).any():
        return np.zeros((1, BANDS))
    starts = np.arange(count) * STEP
    spectrum = np.abs(np.fft.rfft(clip[starts[:, None] + np.arange(size)] * np.hanning(size), axis=1))
    edges = np.unique(np.geomspace(2, spectrum.shape[1], BANDS + 1).astype(int))
    power = np.add.reduceat(np.square(spectrum), edges[:-1], axis=1)
    level = 10 * np.log10(np.maximum(power, power.max() * 1e-5))
    outlines = np.zeros((count, BANDS))
    outlines[:, : level.shape[1]] = level - level.mean(axis=0)
    return outlines
