"""Recordings from a manifest or parquet files, decoded once into memory.

A tenth of the speakers is held out, by a hash of their names (`corpus_making/held_out.py`), and never trained on.
"""

from __future__ import annotations

import io
import os
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import soxr  # type: ignore[import-untyped]
import torch

from codec_training.lossy import lossy_round_trip
from corpus_making.held_out import is_held_out
from myna.core.errors import DataError
from myna.data.manifest import read_manifest

PCM = npt.NDArray[np.int16]

HELD_OUT_CLIPS = 24
"""Held-out clips of each source that are evaluated during training."""


@dataclass(frozen=True, slots=True)
class Recording:
    """An encoded clip: the bytes of a FLAC, Opus or WAV file, or its path."""

    id: str
    speaker: str
    text: str
    audio: bytes | Path

    @property
    def data(self) -> bytes:
        """Read on access: most files of a large source are never needed."""
        return self.audio if isinstance(self.audio, bytes) else self.audio.read_bytes()

    @property
    def is_held_out(self) -> bool:
        return is_held_out(self.speaker)


def recordings(source: Path) -> Iterator[Recording]:
    """A folder with manifest.jsonl (or the manifest itself), a folder of folders with one each, a parquet file, or
    a folder of them."""
    if source.suffix == ".parquet":
        yield from _parquet(source)
    elif source.is_dir() and (parts := sorted(source.glob("*.parquet"))):
        for part in parts:
            yield from _parquet(part)
    elif source.is_dir() and (parts := sorted(source.glob("*/manifest.jsonl"))):
        for part in parts:
            yield from recordings(part)
    else:
        manifest = source / "manifest.jsonl" if source.is_dir() else source
        for utterance in read_manifest(manifest):
            if utterance.span is not None:
                raise DataError(
                    f"{manifest}: {utterance.id} is a span of a longer recording",
                    hint="cut the recordings into files first; the codec is trained on whole clips",
                )
            yield Recording(utterance.id, utterance.speaker, utterance.text, utterance.audio)


def _parquet(path: Path) -> Iterator[Recording]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{path} cannot be read without pyarrow",
            hint="pip install pyarrow",
        ) from None
    for batch in parquet.ParquetFile(path).iter_batches(64, columns=["id", "speaker", "text", "audio"]):
        for row in batch.to_pylist():
            yield Recording(row["id"], row["speaker"], row["text"], row["audio"]["bytes"])


def decode(data: bytes, sample_rate: int) -> npt.NDArray[np.float32]:
    """Mono samples at `sample_rate`."""
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    mono = samples.mean(axis=1)
    if rate != sample_rate:
        mono = soxr.resample(mono, rate, sample_rate, quality="VHQ")
    return np.ascontiguousarray(mono, dtype=np.float32)


def decode_pcm(data: bytes, sample_rate: int) -> PCM:
    """Decode to 16-bit PCM, without any conversion where the file is that already, as our own corpora are."""
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        if (file.subtype, file.channels, file.samplerate) == ("PCM_16", 1, sample_rate):
            plain: PCM = file.read(dtype="int16")
            return plain
    return _to_pcm(decode(data, sample_rate))


def _to_pcm(samples: npt.NDArray[np.float32]) -> PCM:
    return np.round(samples.clip(-1, 1) * 32767).astype(np.int16)


@dataclass(frozen=True, slots=True)
class DecodedClip:
    """A clip as 16-bit samples."""

    speaker: str
    text: str
    samples: PCM


def decode_all(found: Sequence[Recording], sample_rate: int, lossy_share: float = 0.0) -> list[DecodedClip]:
    """Decode all recordings in threads; files and decoders release the GIL. A share of them, drawn by their ids, goes
    through a lossy codec."""

    def decode_one(recording: Recording) -> DecodedClip:
        samples, rng = decode_pcm(recording.data, sample_rate), random.Random(f"lossy/{recording.id}")
        if rng.random() < lossy_share and len(samples) > sample_rate // 4:
            samples = _to_pcm(lossy_round_trip((samples / 32767).astype(np.float32), sample_rate, rng))
        return DecodedClip(recording.speaker, recording.text, samples)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(decode_one, found))


def pcm_to_float(samples: torch.Tensor) -> torch.Tensor:
    """16-bit samples as floats in [-1, 1]."""
    return samples.to(torch.float32) / 32767


def hours(clips: Sequence[DecodedClip], sample_rate: int) -> float:
    return sum(len(clip.samples) for clip in clips) / sample_rate / 3600


def split_held_out(source: Path, limit: int | None) -> tuple[list[Recording], list[Recording]]:
    """Training recordings, at most `limit` spread over all speakers, and some of held-out speakers."""
    found = list(recordings(source))
    train = [recording for recording in found if not recording.is_held_out]
    if limit is not None and limit < len(train):
        train = [train[place * len(train) // limit] for place in range(limit)]
    if not train:
        raise DataError(f"{source} has no training clips", hint="add clips of speakers that are not held out")
    return train, round_robin_by_speaker([recording for recording in found if recording.is_held_out], HELD_OUT_CLIPS)


def round_robin_by_speaker(found: Sequence[Recording], count: int) -> list[Recording]:
    """`count` clips, such that no speaker comes twice before all have come once."""
    clips_of: defaultdict[str, int] = defaultdict(int)
    ranked = []
    for recording in found:
        ranked.append((clips_of[recording.speaker], recording.speaker, recording.id, recording))
        clips_of[recording.speaker] += 1
    return [recording for *_, recording in sorted(ranked, key=lambda entry: entry[:3])][:count]


def clip_summary(clips: Sequence[Any]) -> str:
    return f"{len(clips)} clips of {len({clip.speaker for clip in clips})} speakers"
