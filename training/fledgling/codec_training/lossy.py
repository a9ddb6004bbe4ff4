"""Round trips through lossy audio codecs: MP3, Opus, Vorbis, GSM and ADPCM, as libsndfile has them."""

from __future__ import annotations

import io
import random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import soundfile
import soxr  # type: ignore[import-untyped]


class LossyFormat(NamedTuple):
    """Sample rate and settings of `soundfile.write`."""

    rate: int
    settings: dict[str, Any]


MP3 = {"format": "MP3", "subtype": "MPEG_LAYER_III", "bitrate_mode": "CONSTANT"}
OPUS = {"format": "OGG", "subtype": "OPUS"}
FORMATS = {
    "mp3 24 kbit/s at 16 kHz": LossyFormat(16_000, MP3 | {"compression_level": 0.9}),
    "mp3 24 kbit/s": LossyFormat(24_000, MP3 | {"compression_level": 0.9}),
    "mp3 40 kbit/s": LossyFormat(24_000, MP3 | {"compression_level": 0.8}),
    "opus 8 kbit/s": LossyFormat(16_000, OPUS | {"compression_level": 1.0}),
    "opus 14 kbit/s": LossyFormat(16_000, OPUS | {"compression_level": 0.97}),
    "vorbis 34 kbit/s": LossyFormat(24_000, {"format": "OGG", "subtype": "VORBIS", "compression_level": 1.0}),
    "gsm": LossyFormat(8_000, {"format": "WAV", "subtype": "GSM610"}),
    "ima adpcm": LossyFormat(16_000, {"format": "WAV", "subtype": "IMA_ADPCM"}),
    "g.721 adpcm": LossyFormat(8_000, {"format": "WAV", "subtype": "G721_32"}),
}
"""Bitrates were measured on clips of 4 s."""


def lossy_round_trip(samples: npt.NDArray[np.float32], sample_rate: int, rng: random.Random) -> npt.NDArray[np.float32]:
    """Return the clip, at its length, after one of `FORMATS`. Some of them delay it by up to 50 ms."""
    rate, settings = FORMATS[rng.choice(sorted(FORMATS))]
    coded = io.BytesIO()
    soundfile.write(coded, soxr.resample(samples, sample_rate, rate), rate, **settings)
    coded.seek(0)
    decoded, rate = soundfile.read(coded, dtype="float32")  # Opus may come back at another rate
    again = soxr.resample(decoded, rate, sample_rate)[: len(samples)]
    return np.pad(again, (0, len(samples) - len(again))).astype(np.float32)
