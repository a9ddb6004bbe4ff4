"""Checks and cleaning of a reference recording.

An offset, long silence at the ends and an unusual level are corrected; a recording without these stays unchanged, bit
for bit. Clipping, a narrow band, noise, and too little, too much or no speech are reported with what to do. Whether two
people speak is not checked: that takes a speaker encoder.
"""

from dataclasses import dataclass

import numpy as np
import soxr  # type: ignore[import-untyped]

from myna.audio import signal_measures as measures
from myna.audio.files import Samples
from myna.audio.signal_measures import speech_level_db, speech_spans

LEVEL_RANGE_DB = (-32.0, -12.0)
"""Speech levels that are left unchanged; others are brought to `LEVEL_DB`."""
LEVEL_DB = -22.0
MAX_PEAK = 0.97
MAX_OFFSET = 0.01
"""Mean of the samples above which it is subtracted."""
MAX_EDGE_SECONDS, KEPT_EDGE_SECONDS = 1.0, 0.2
"""Seconds of silence at an end above which it is trimmed, and seconds of it that are kept."""

QUIET_DB = -45.0
"""Speech level below which the recorder's own noise is so near that amplifying does not help."""
MAX_CLIPPED_SHARE = 0.001
NARROW_BAND_HZ = 5_000.0
"""Bandwidth below which a recording is narrow: a telephone reaches 3.4 to 4 kHz, a recording at 11 kHz 5.5."""
MIN_SNR_DB = 15.0
MIN_SPEECH_SECONDS, MAX_SPEECH_SECONDS = 1.5, 30.0
MIN_SPEECH_SHARE = 0.3
MIN_LEVEL_RANGE_DB = 9.0
"""Minimum decibels between loud and quiet frames: speech has 20 and more, steady noise and most music less than
this."""


@dataclass(frozen=True, slots=True)
class CheckedReference:
    """Cleaned reference, and the problems of the recording, each with what to do."""

    samples: Samples
    problems: tuple[str, ...] = ()


def check_reference(samples: Samples, recorded_rate: int, sample_rate: int) -> CheckedReference:
    """Check samples at the rate of their file, and clean them at `sample_rate`."""
    resampled = samples
    if recorded_rate != sample_rate:
        resampled = np.asarray(soxr.resample(samples, recorded_rate, sample_rate, quality="VHQ"), np.float32)
    spans = speech_spans(resampled, sample_rate)
    problems = _problems(samples, resampled, sample_rate, sum(end - start for start, end in spans))
    if spans:
        first, last, seconds = spans[0][0], spans[-1][1], len(resampled) / sample_rate
        start = first - KEPT_EDGE_SECONDS if first > MAX_EDGE_SECONDS else 0.0
        end = last + KEPT_EDGE_SECONDS if seconds - last > MAX_EDGE_SECONDS else seconds
        resampled = resampled[round(start * sample_rate) : round(end * sample_rate)]
    offset = float(resampled.mean(dtype=np.float64)) if len(resampled) else 0.0
    if abs(offset) > MAX_OFFSET:
        resampled = resampled - np.float32(offset)
    level, peak = speech_level_db(resampled, sample_rate), float(np.abs(resampled).max(initial=0.0))
    if peak and not LEVEL_RANGE_DB[0] <= level <= LEVEL_RANGE_DB[1]:
        resampled = resampled * np.float32(min(10 ** ((LEVEL_DB - level) / 20), MAX_PEAK / peak))
    return CheckedReference(resampled, tuple(problems))


def _problems(recorded: Samples, samples: Samples, sample_rate: int, speech: float) -> list[str]:
    level, floor = speech_level_db(samples, sample_rate), measures.noise_floor_db(samples, sample_rate)
    seconds, found = len(samples) / sample_rate, []
    loud, quiet = np.percentile(measures.frame_levels_db(samples, sample_rate) if speech else np.zeros(1), [95, 5])
    if speech and loud - quiet < MIN_LEVEL_RANGE_DB:
        found.append("no speech can be told from steady noise or music in it: give a recording of one voice alone")
    elif level - floor < MIN_SNR_DB:
        found.append(f"noise is {level - floor:.0f} dB below the voice: record in a quiet room, near the microphone")
    if speech < MIN_SPEECH_SECONDS:
        found.append(f"it holds {speech:.1f} s of speech: give 3 to 15 s, so that the voice can be told")
    elif speech > MAX_SPEECH_SECONDS:
        found.append(f"it holds {speech:.0f} s of speech: 3 to 15 s are as good, and faster")
    elif speech < MIN_SPEECH_SHARE * seconds:
        found.append(f"it is mostly silence ({speech:.1f} of {seconds:.1f} s are speech): cut the pauses out")
    if level < QUIET_DB:
        found.append(f"the voice is very quiet ({level:.0f} dB): record nearer to the microphone, or with more gain")
    if (share := measures.clipped_share(recorded)) > MAX_CLIPPED_SHARE:
        found.append(f"it is clipped ({share:.1%} of its samples): record with less gain")
    if speech and (band := measures.bandwidth_hz(samples, sample_rate)) < NARROW_BAND_HZ:
        narrow = f"it has nothing above {band / 1000:.1f} kHz, like a telephone call"
        found.append(f"{narrow}, and the speech will sound like one: give a recording made at 16 kHz or more")
    return found
