"""Signal measures of a recording: bandwidth, clipping, levels, loudness, noise floor, and speech spans by energy.

Pure functions of mono samples, without a model. Levels are in decibels of full scale (dBFS, root mean square). Measure
clipping at the rate of the file: resampling rounds the flat tops off.
"""

import numpy as np
import numpy.typing as npt

from myna.audio.files import Samples
from myna.core.errors import import_optional

Array = npt.NDArray[np.float64]
SpeechSpan = tuple[float, float]
"""Start and end of a stretch of speech, in seconds."""

FRAME_SECONDS, HOP_SECONDS = 0.025, 0.010
"""Seconds of the window of a level, and from one window to the next."""
SILENCE_FLOOR_DB = -100.0
"""Level of digital silence: below the last bit of 16."""
BANDWIDTH_FFT = 512
BANDWIDTH_DROP_DB = 50.0
"""Decibels below the strongest frequency at which the band ends (the rule of HiFiTTS-2)."""
BLACKMAN_HARRIS = (0.35875, -0.48829, 0.14128, -0.01168)
MIN_CLIPPED_RUN = 3
"""Minimum samples in a row at the extreme value; shorter runs occur without clipping."""
NOISE_PERCENTILE, LOUD_PERCENTILE = 3.0, 95.0
"""Percentiles of the levels of frames that stand for pauses, which a prompt has few of, and for loud speech."""
SPEECH_RANGE_DB = 35.0
"""Decibels below loud speech at which a frame is a pause even without noise."""
SPEECH_THRESHOLD = 0.3
"""Share of the way from the noise floor to loud speech, in decibels, at which speech begins."""
MIN_PAUSE_SECONDS, MIN_SPEECH_SECONDS = 0.3, 0.08
"""Seconds below which a pause belongs to the speech around it, and below which a stretch of speech is a click."""

BLOCK_SECONDS, BLOCK_OVERLAP = 0.4, 0.75
ABSOLUTE_GATE_LUFS, RELATIVE_GATE_LU = -70.0, -10.0
SHELF = (1681.974450955533, 0.7071752369554196, 3.999843853973347)
"""Frequency in hertz, quality and gain in dB of the filter that models the head."""
HIGH_PASS = (38.13547087602444, 0.5003270373238773)
"""Frequency and quality of the second filter."""


def bandwidth_hz(samples: Samples, sample_rate: int, drop_db: float = BANDWIDTH_DROP_DB) -> float:
    """Return the highest frequency whose mean power is within `drop_db` of the strongest; 0 without sound.

    The result is near half the rate of the original recording. An upsampled telephone call gives less than 4,000,
    whatever the rate of its file.
    """
    hop = max(1, round(HOP_SECONDS * sample_rate))
    padded = np.pad(samples, (0, max(0, BANDWIDTH_FFT - len(samples))))
    phases = 2 * np.pi * np.arange(BANDWIDTH_FFT) / BANDWIDTH_FFT
    window = sum(weight * np.cos(order * phases) for order, weight in enumerate(BLACKMAN_HARRIS))
    frames = np.lib.stride_tricks.sliding_window_view(padded, BANDWIDTH_FFT)[::hop]
    power = np.zeros(BANDWIDTH_FFT // 2 + 1)
    for start in range(0, len(frames), 1024):  # a minute at a time, so that memory stays bounded
        power += (np.abs(np.fft.rfft(frames[start : start + 1024] * window, axis=1)) ** 2).sum(axis=0)
    if not power.max() > 0:
        return 0.0
    within = np.flatnonzero(power > power.max() * 10 ** (-drop_db / 10))
    return float(within[-1]) * sample_rate / BANDWIDTH_FFT


def clipped_share(samples: Samples) -> float:
    """Return the share of samples in runs of three or more at the largest or smallest value: 0 in a clean recording."""
    if not len(samples) or samples.max() == samples.min():
        return 0.0
    clipped = 0
    for extreme in (samples.max(), samples.min()):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], samples == extreme, [False]])))
        runs = edges[1::2] - edges[::2]
        clipped += int(runs[runs >= MIN_CLIPPED_RUN].sum())
    return clipped / len(samples)


def frame_levels_db(samples: Samples, sample_rate: int) -> Array:
    """Return the level of every frame of 25 ms, 10 ms apart, without its mean, which is inaudible."""
    size, hop = round(FRAME_SECONDS * sample_rate), max(1, round(HOP_SECONDS * sample_rate))
    if len(samples) < size:
        return np.empty(0)
    wide = samples.astype(np.float64)
    first, second = (np.concatenate([[0.0], np.cumsum(wide**order)]) for order in (1, 2))
    mean, square = ((total[size::hop] - total[:-size:hop]) / size for total in (first, second))
    power = square - mean**2
    return np.asarray(10 * np.log10(np.maximum(power, 10 ** (SILENCE_FLOOR_DB / 10))))


def noise_floor_db(samples: Samples, sample_rate: int) -> float:
    """Return the level of the pauses: the third percentile of the frames that are not digital silence.

    Speech without any pause gives the level of its quietest sounds, 20 dB and more below speech.
    """
    levels = _sounding(frame_levels_db(samples, sample_rate))
    return float(np.percentile(levels, NOISE_PERCENTILE)) if len(levels) else SILENCE_FLOOR_DB


def speech_level_db(samples: Samples, sample_rate: int) -> float:
    """Return the level of the speech found by energy, without pauses; -100 without speech."""
    levels = frame_levels_db(samples, sample_rate)
    loud = levels[_speech_frames(levels)]
    return float(10 * np.log10(np.mean(10 ** (loud / 10)))) if len(loud) else SILENCE_FLOOR_DB


def snr_db(samples: Samples, sample_rate: int) -> float:
    """Estimate the signal-to-noise ratio: the speech level above the noise floor.

    It is within 2 dB of the true one from 10 to 20 dB; steady noise alone gives less than 2.
    """
    return speech_level_db(samples, sample_rate) - noise_floor_db(samples, sample_rate)


def speech_spans(samples: Samples, sample_rate: int) -> list[SpeechSpan]:
    """Return stretches that are louder than the pauses, in seconds: a voice activity detector by energy alone.

    It cannot tell speech from music or steady noise.
    """
    active = _speech_frames(frame_levels_db(samples, sample_rate))
    edges = np.flatnonzero(np.diff(np.concatenate([[False], active, [False]])))
    joined: list[list[float]] = []
    for first, after in zip(edges[::2], edges[1::2], strict=True):
        start, end = float(first) * HOP_SECONDS, float(after - 1) * HOP_SECONDS + FRAME_SECONDS
        if joined and start - joined[-1][1] < MIN_PAUSE_SECONDS:
            joined[-1][1] = end
        else:
            joined.append([start, end])
    length = len(samples) / sample_rate
    return [(start, min(end, length)) for start, end in joined if end - start >= MIN_SPEECH_SECONDS]


def _speech_frames(levels: Array) -> npt.NDArray[np.bool_]:
    sounding = _sounding(levels)
    if not len(sounding):
        return np.zeros(len(levels), np.bool_)
    floor, loud = np.percentile(sounding, [NOISE_PERCENTILE, LOUD_PERCENTILE])
    threshold = max(floor + SPEECH_THRESHOLD * (loud - floor), loud - SPEECH_RANGE_DB)
    return np.asarray((levels >= threshold) & (levels > SILENCE_FLOOR_DB))


def _sounding(levels: Array) -> Array:
    return levels[levels > SILENCE_FLOOR_DB]


def integrated_loudness(samples: Samples, sample_rate: int) -> float:
    """Return the loudness in LUFS by ITU-R BS.1770-4; NaN without a block of 0.4 s above -70 LUFS."""
    signal = import_optional("scipy.signal", 'pip install "myna[curate]"')
    weighted = samples.astype(np.float64)
    for numerator, denominator in k_weighting(sample_rate):
        weighted = signal.lfilter(numerator, denominator, weighted)
    size, step = round(BLOCK_SECONDS * sample_rate), round(BLOCK_SECONDS * (1 - BLOCK_OVERLAP) * sample_rate)
    sums = np.concatenate([[0.0], np.cumsum(weighted**2)])
    power = np.maximum((sums[size::step] - sums[:-size:step]) / size, 1e-30) if len(samples) >= size else np.empty(0)
    power = power[_lufs(power) > ABSOLUTE_GATE_LUFS]
    if not len(power):
        return float("nan")
    return float(_lufs(power[_lufs(power) > _lufs(power.mean()) + RELATIVE_GATE_LU].mean()))


def k_weighting(sample_rate: int) -> list[tuple[list[float], list[float]]]:
    """Return numerator and denominator of both filters, by the bilinear transform of their analogue forms."""
    frequency, quality, gain_db = SHELF
    k = np.tan(np.pi * frequency / sample_rate)
    high, middle = 10 ** (gain_db / 20), 10 ** (gain_db / 20 * 0.4996667741545416)
    norm = 1 + k / quality + k * k
    shelf = [high + middle * k / quality + k * k, 2 * (k * k - high), high - middle * k / quality + k * k]
    first = ([value / norm for value in shelf], [1.0, 2 * (k * k - 1) / norm, (1 - k / quality + k * k) / norm])
    frequency, quality = HIGH_PASS
    k = np.tan(np.pi * frequency / sample_rate)
    norm = 1 + k / quality + k * k
    return [first, ([1.0, -2.0, 1.0], [1.0, 2 * (k * k - 1) / norm, (1 - k / quality + k * k) / norm])]


def _lufs(power: npt.ArrayLike) -> npt.NDArray[np.float64]:
    return np.asarray(-0.691 + 10 * np.log10(power))
