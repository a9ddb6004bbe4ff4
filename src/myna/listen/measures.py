"""Measures of a clip that decide whether it is kept: noise, music, predicted quality, loudness, clipping, bandwidth."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from myna.audio.files import Samples
from myna.audio.signal_measures import bandwidth_hz, clipped_share
from myna.core.system_memory import release_free_memory
from myna.listen.ecapa import EcapaEncoder
from myna.listen.loudness import integrated_loudness
from myna.listen.models import AnalysisModels, require
from myna.listen.quality import CALIBRATIONS

NAN = float("nan")
NARROW_WINDOW_SECONDS, NARROW_DROP_DB = 2.0, 60.0
"""Window in which a band counts as narrow whatever the rest of the clip has, and the drop that ends it there: of 60 dB,
for 2 s of vowels may have nothing above 4 kHz within 50. Of wide clips of LibriSpeech 0.8 % are then narrow (28 % with
50 dB), of a synthetic corpus none; a telephone's last 2 s are found in nine of ten clips, and in none by their mean."""
FloatArray = npt.NDArray[np.float32]
T = TypeVar("T")
R = TypeVar("R")


def measure(samples: Samples, sample_rate: int, models: AnalysisModels) -> dict[str, float]:
    """All measures of a mono clip by name, in the order of the table; NaN where a model is missing."""
    peak = float(np.abs(samples).max(initial=0.0))
    scores = models.quality.score(samples, sample_rate) if models.quality else dict.fromkeys(CALIBRATIONS, NAN)
    return {
        "music_share": models.music.music_share(samples, sample_rate) if models.music else NAN,
        "snr_db": models.noise.snr_db(samples, sample_rate) if models.noise else NAN,
        "bandwidth_hz": narrowest_bandwidth_hz(samples, sample_rate),
        "clipped_share": clipped_share(samples),
        **{name: scores[name] for name in ("dnsmos_ovrl", "dnsmos_bak", "dnsmos_sig")},
        "loudness_lufs": integrated_loudness(samples, sample_rate),
        "peak_dbfs": float(20 * np.log10(peak)) if peak else NAN,
    }


def narrowest_bandwidth_hz(samples: Samples, sample_rate: int) -> float:
    """Bandwidth of a clip, or of its narrowest two seconds: a mean hides that a telephone begins in the clip."""
    size = round(NARROW_WINDOW_SECONDS * sample_rate)
    count = max(1, -(-2 * len(samples) // size) - 1)  # half a window apart, or less
    starts = np.linspace(0, max(0, len(samples) - size), count).astype(int)
    windows = (bandwidth_hz(samples[start : start + size], sample_rate, NARROW_DROP_DB) for start in starts)
    return min(bandwidth_hz(samples, sample_rate), *windows)


def embed_speaker(samples: Samples, sample_rate: int, models: AnalysisModels) -> FloatArray:
    """Speaker embedding of length one; zeros where there is no voice."""
    return require(models.speaker_encoder, "speaker embeddings").embed(samples, sample_rate)


def embed_speakers(clips: Iterable[Samples], sample_rate: int, models: AnalysisModels) -> Iterator[FloatArray]:
    """The same of many clips, in batches where the encoder has them."""
    encoder = require(models.speaker_encoder, "speaker embeddings")
    if not isinstance(encoder, EcapaEncoder):
        yield from (encoder.embed(clip, sample_rate) for clip in clips)
        return

    def embed(batch: list[Samples]) -> list[FloatArray]:
        embeddings = encoder.embed_batch(batch, sample_rate)
        release_free_memory()  # else up to 500 MB of freed memory add up over the windows of a part
        return embeddings

    yield from map_batches(embed, clips, encoder.batch_size, len)


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Items by `size`, the last ones fewer; taken one batch after the other."""
    source = iter(items)
    while batch := list(itertools.islice(source, size)):
        yield batch


def map_batches(
    call: Callable[[list[T]], Iterable[R]], items: Iterable[T], size: int, length: Callable[[T], int]
) -> Iterator[R]:
    """Results of a call that takes a batch, in the order of the items. Batches have similar lengths, for each takes as
    long as its longest; as many items are looked at as make four."""
    for group in batches(items, 4 * size if size > 1 else 1):
        order = sorted(range(len(group)), key=lambda number: length(group[number]))
        results: dict[int, R] = {}
        for numbers in batches(order, size):
            results |= zip(numbers, call([group[number] for number in numbers]), strict=True)
        yield from (results[number] for number in range(len(group)))
