"""Recordings from a manifest, from parquet files or from a file gathered of both, decoded once into memory.

A tenth of the speakers is held out, by a rule that depends on nothing but their names (`corpus_making/held_out.py`). No
sound of theirs is ever trained on.
"""

from __future__ import annotations

import io
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import soxr  # type: ignore[import-untyped]
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from corpus_making.held_out import is_held_out
from myna.data.manifest import read_manifest
from myna.errors import DataError
from myna.io import sniff_suffix

Pcm = npt.NDArray[np.int16]

JUDGED = 24
"""Held-out clips of each source that are listened to in training."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A clip that is still encoded: the bytes of a FLAC, Opus or WAV file, or where they lie."""

    id: str
    speaker: str
    text: str
    sound: bytes | Path

    @property
    def data(self) -> bytes:
        """Read when it is asked for: most files of a large source are never looked at."""
        return self.sound if isinstance(self.sound, bytes) else self.sound.read_bytes()

    @property
    def is_held_out(self) -> bool:
        return is_held_out(self.speaker)


def recordings(source: Path) -> Iterator[Recording]:
    """A folder with manifest.jsonl (or the manifest itself), a folder of folders with one each, a parquet file or a
    folder of them, or a gathered file."""
    if source.suffix == ".safetensors":
        yield from _gathered(source)
    elif source.suffix == ".parquet":
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
            hint="pip install pyarrow, or write it anew where there is one with --gather FILE.safetensors",
        ) from None
    for batch in parquet.ParquetFile(path).iter_batches(64, columns=["id", "speaker", "text", "audio"]):
        for row in batch.to_pylist():
            yield Recording(row["id"], row["speaker"], row["text"], row["audio"]["bytes"])


def gather(source: Path, out: Path, limit: int | None) -> int:
    """What training reads of a source, as Opus in one file: it travels easily, and needs no pyarrow to be read."""
    learned, judged = split(source, limit)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(_as_opus, learned + judged))
    clips = [{"id": one.id, "speaker": one.speaker, "text": one.text} for one in found]
    ends = torch.tensor([len(one.data) for one in found], dtype=torch.int64).cumsum(0)
    data = torch.frombuffer(bytearray(b"".join(one.data for one in found)), dtype=torch.uint8)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file({"data": data, "ends": ends}, out, metadata={"clips": json.dumps(clips, ensure_ascii=False)})
    return len(found)


def _as_opus(recording: Recording) -> Recording:
    data = recording.data
    if sniff_suffix(data) == ".opus":
        return replace(recording, sound=data)
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    packed = io.BytesIO()
    soundfile.write(packed, samples, rate, format="OGG", subtype="OPUS")
    return replace(recording, sound=packed.getvalue())


def _gathered(path: Path) -> Iterator[Recording]:
    with safe_open(path, "pt") as file:
        clips: list[dict[str, str]] = json.loads(file.metadata()["clips"])
        data, ends = file.get_tensor("data").numpy(), file.get_tensor("ends").tolist()
    for clip, start, end in zip(clips, [0, *ends[:-1]], ends, strict=True):
        yield Recording(clip["id"], clip["speaker"], clip["text"], data[start:end].tobytes())


def decode(data: bytes, sample_rate: int) -> npt.NDArray[np.float32]:
    """Mono samples at the rate that is asked for."""
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    mono = samples.mean(axis=1)
    if rate != sample_rate:
        mono = soxr.resample(mono, rate, sample_rate, quality="VHQ")
    return np.ascontiguousarray(mono, dtype=np.float32)


def as_pcm(data: bytes, sample_rate: int) -> Pcm:
    """The same in 16 bits. Our own corpora are kept so, and nothing of theirs is computed."""
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        if (file.subtype, file.channels, file.samplerate) == ("PCM_16", 1, sample_rate):
            plain: Pcm = file.read(dtype="int16")
            return plain
    return np.round(decode(data, sample_rate).clip(-1, 1) * 32767).astype(np.int16)


@dataclass(frozen=True, slots=True)
class Clip:
    speaker: str
    text: str
    samples: Pcm


def decoded(found: Sequence[Recording], sample_rate: int) -> list[Clip]:
    """All of them, on all cores; files and decoders let go of the interpreter while they work."""

    def one(recording: Recording) -> Clip:
        return Clip(recording.speaker, recording.text, as_pcm(recording.data, sample_rate))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, found))


def as_waves(samples: torch.Tensor) -> torch.Tensor:
    """16-bit samples as numbers in [-1, 1]."""
    return samples.to(torch.float32) / 32767


def hours(clips: Sequence[Clip], sample_rate: int) -> float:
    return sum(len(clip.samples) for clip in clips) / sample_rate / 3600


def split(source: Path, limit: int | None) -> tuple[list[Recording], list[Recording]]:
    """The recordings to learn from, so many at most and of all speakers, and some of held-out speakers."""
    found = list(recordings(source))
    learned = [one for one in found if not one.is_held_out]
    if limit is not None and limit < len(learned):
        learned = [learned[place * len(learned) // limit] for place in range(limit)]
    if not learned:
        raise DataError(f"{source} holds nothing to learn from", hint="add clips of speakers that are not held out")
    return learned, turn_by_turn([one for one in found if one.is_held_out], JUDGED)


def turn_by_turn(found: Sequence[Recording], count: int) -> list[Recording]:
    """So many clips that no speaker is heard twice before all have been heard once."""
    turns: defaultdict[str, int] = defaultdict(int)
    ranked = []
    for one in found:
        ranked.append((turns[one.speaker], one.speaker, one.id, one))
        turns[one.speaker] += 1
    return [one for *_, one in sorted(ranked, key=lambda entry: entry[:3])][:count]


def described(clips: Sequence[Any]) -> str:
    return f"{len(clips)} clips of {len({clip.speaker for clip in clips})} speakers"
