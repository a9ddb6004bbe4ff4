"""Acoustic measures that need no model: silence, pauses, pitch, and whether a clip is a copy of another."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from myna.audio.files import Samples
from myna.audio.mono import LISTENING_RATE, as_mono_16khz

ACOUSTICS_REVISION = "1"
"""Changes whenever the same clip would measure otherwise: earlier measures are then computed again."""
HOP = LISTENING_RATE // 100
"""Samples between two frames: ten milliseconds."""
BELOW_PEAK_DB, SILENCE_DB = 40.0, -60.0
"""A frame is silent this far below the loud frames, and in any case below this level."""
MIN_PAUSE_SECONDS = 0.15
"""Shorter silence is part of a consonant."""
MIN_PITCH_HZ, MAX_PITCH_HZ = 60.0, 500.0
MIN_VOICED_CORRELATION = 0.6
"""Autocorrelation at the pitch period from which a frame is voiced."""
BANDS = 24
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AcousticMeasures:
    seconds: float
    leading_silence: float
    """Seconds before the first active frame."""
    trailing_silence: float
    speech_seconds: float
    """From the first active frame to the last; 0 where all is silent."""
    pause_share: float
    """Share of that in pauses."""
    voiced_share: float
    """Share of the active frames that have a pitch. Speech has half or more, noise has none."""
    pitch: float
    """Hertz, the median; NaN where nothing is voiced."""
    pitch_range: float
    """Semitones between the 10th and the 90th percentile."""

    @property
    def is_silent(self) -> bool:
        return self.speech_seconds == 0


def measure_acoustics(samples: Samples, sample_rate: int) -> AcousticMeasures:
    clip = as_mono_16khz(samples, sample_rate)
    seconds, active = len(clip) / LISTENING_RATE, active_frames(clip)
    if not active.any():
        return AcousticMeasures(seconds, seconds, 0.0, 0.0, 0.0, 0.0, math.nan, math.nan)
    first, last = int(np.argmax(active)), len(active) - int(np.argmax(active[::-1]))
    speech_seconds = (last - first) * HOP / LISTENING_RATE
    pitch = pitch_track(clip)
    voiced = pitch[active & (pitch > 0)]
    low, median, high = np.percentile(voiced, [10, 50, 90]) if len(voiced) else (math.nan,) * 3
    return AcousticMeasures(
        seconds=seconds,
        leading_silence=first * HOP / LISTENING_RATE,
        trailing_silence=max(0.0, seconds - last * HOP / LISTENING_RATE),
        speech_seconds=speech_seconds,
        pause_share=_pause_frames(active[first:last]) * HOP / LISTENING_RATE / speech_seconds,
        voiced_share=len(voiced) / int(active.sum()),
        pitch=float(median),
        pitch_range=12 * math.log2(high / low) if len(voiced) else math.nan,
    )


def active_frames(clip: Samples) -> npt.NDArray[np.bool_]:
    """(frames,): which frames are not silent."""
    count = len(clip) // HOP
    power = np.square(clip[: count * HOP].astype(np.float64)).reshape(count, HOP).mean(axis=1)
    level = 10 * np.log10(power + 1e-12)
    loud = np.percentile(level, 95) if count else SILENCE_DB
    return np.asarray(level > max(loud - BELOW_PEAK_DB, SILENCE_DB))


def _pause_frames(active: npt.NDArray[np.bool_]) -> int:
    """Frames that lie in pauses."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (~active).astype(np.int8), [0]])))
    lengths = edges[1::2] - edges[::2]
    return int(lengths[lengths >= MIN_PAUSE_SECONDS * LISTENING_RATE / HOP].sum())


def pitch_track(clip: Samples) -> Array:
    """(frames,): F0 in hertz, 0 where unvoiced, by autocorrelation normalised by that of the window.

    librosa.pyin takes 30 times as long: docs/decisions/0020-own-pitch-tracker.md.
    """
    size, window = LISTENING_RATE // 20, np.hanning(LISTENING_RATE // 20)
    padded = np.pad(clip.astype(np.float64), (size // 2, size))
    starts = np.arange(len(clip) // HOP) * HOP
    frames = padded[starts[:, None] + np.arange(size)]
    frames = (frames - frames.mean(axis=1, keepdims=True)) * window
    lags = np.arange(int(LISTENING_RATE / MAX_PITCH_HZ), int(LISTENING_RATE / MIN_PITCH_HZ) + 1)
    correlation = _autocorrelation(frames)[:, : lags[-1] + 2] / _autocorrelation(window[None])[0, : lags[-1] + 2]
    at_lags = correlation[:, lags]
    peaks = (at_lags >= correlation[:, lags - 1]) & (at_lags >= correlation[:, lags + 1])
    best = np.where(peaks, at_lags, 0.0).max(axis=1, initial=0.0)
    # Multiples of the period correlate nearly as well, and the pitch is the shortest of them.
    shortest = np.argmax(peaks & (at_lags >= 0.9 * best[:, None]), axis=1)
    return np.where(best >= MIN_VOICED_CORRELATION, LISTENING_RATE / lags[shortest], 0.0)


def _autocorrelation(frames: Array) -> Array:
    power = np.square(np.abs(np.fft.rfft(frames, 2 * frames.shape[1], axis=1)))
    correlation = np.fft.irfft(power, axis=1)[:, : frames.shape[1]]
    return np.asarray(correlation / np.maximum(correlation[:, :1], 1e-12))


def copy_similarity(samples: Samples, other: Samples, sample_rate: int) -> float:
    """Cross-correlation of two clips at the best shift in time: 1 is a copy, other words are well below.

    Compared are band levels and not samples, so that a copy through a codec is one too.
    """
    first, second = (_band_levels(as_mono_16khz(clip, sample_rate)) for clip in (samples, other))
    size = 1 << int(len(first) + len(second)).bit_length()
    spectrum = np.fft.rfft(first, size, axis=0) * np.conj(np.fft.rfft(second, size, axis=0))
    norm = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(np.fft.irfft(spectrum, size, axis=0).sum(axis=1).max() / norm) if norm else 0.0


def _band_levels(clip: Samples) -> Array:
    """(frames, bands): the level of each band in decibels, above its own mean."""
    size = 2 * HOP
    count = max(0, (len(clip) - size) // HOP + 1)
    if not count or not active_frames(clip).any():
        return np.zeros((1, BANDS))
    starts = np.arange(count) * HOP
    spectrum = np.abs(np.fft.rfft(clip[starts[:, None] + np.arange(size)] * np.hanning(size), axis=1))
    edges = np.unique(np.geomspace(2, spectrum.shape[1], BANDS + 1).astype(int))
    power = np.add.reduceat(np.square(spectrum), edges[:-1], axis=1)
    level = 10 * np.log10(np.maximum(power, power.max() * 1e-5))
    padded = np.zeros((count, BANDS))
    padded[:, : level.shape[1]] = level - level.mean(axis=0)
    return padded
