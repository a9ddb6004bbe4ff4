"""Round trips of real recordings: what a recogniser hears and a speaker encoder recognises, before and after.

Texts are not needed: what counts is how many words (or characters) of the original's transcript change.

WORK/originals/SET/ID.json      transcript and speaker embedding of a recording
WORK/REVISION/SET/ID.json       the same of its round trip through the codec of that revision, and its level
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import soundfile
import torch
from pyarrow import parquet

from codec_training.recordings import decode
from corpus_making.held_out import is_held_out
from myna.audio.files import Samples, probe, read_audio
from myna.audio.signal_measures import speech_level_db
from myna.core.errors import DataError
from myna.core.io import atomic_write, string_hash
from myna.data.importers.records import list_recordings
from myna.listen.asr import ASR
from myna.listen.speaker_encoders import EcapaEncoder
from myna.text.wer import ErrorCount, character_errors, word_errors

CLIP_SECONDS = (1.5, 12.0)
"""Bounds of a clip: a shorter one has too few words, a longer one takes long."""
RATE = 24_000
COLUMNS = ["id", "text", "speaker", "language", "seconds", "audio"]

Clip = Mapping[str, Any]
"""A row of a parquet file of recordings."""
MeasuredClip = tuple[Clip, dict[str, Any], dict[str, Any]]
"""A clip, the measures of the original, and those of its round trip."""
Scores = dict[str, float]


class SpeechMeasures(Protocol):
    """Measures a recording, or its round trip."""

    def measure(self, samples: Samples, rate: int, language: str) -> dict[str, Any]:
        """`transcript`, `looped`, `embedding` (of length one) and `level` in dB."""


class RoundTripCodec(Protocol):
    """Part of a codec that a round trip needs."""

    @property
    def revision(self) -> str: ...
    @property
    def sample_rate(self) -> int: ...
    @property
    def hop(self) -> int: ...
    def encode(self, clips: Samples) -> Any: ...
    def decode(self, codes: Any) -> Samples: ...


class ShiftedCopy:
    """Stand-in for a codec: the recording 10 ms later, 3 dB softer and with inaudible noise. What changes is the
    recogniser's own uncertainty, below which no codec can be measured."""

    revision, sample_rate, hop = "shifted", 24_000, 960

    def encode(self, clips: Samples) -> Samples:
        return clips

    def decode(self, codes: Samples) -> Samples:
        shifted = 0.7 * np.pad(codes, (250, 0))
        noise = np.random.default_rng(0).standard_normal(len(shifted))
        return (shifted + 10 ** (-65 / 20) * noise).astype(np.float32)


@dataclass(frozen=True, slots=True)
class RealMetrics:
    """The models that hear a recording and its round trip."""

    asr: ASR
    speaker_encoder: EcapaEncoder

    @classmethod
    def open(cls, whisper: str, ecapa: Path, workers: int) -> RealMetrics:
        """Open the metrics for `workers` threads, each of which computes alone: on a busy machine they do not wait
        for one another."""
        torch.set_num_threads(1)
        return cls(ASR.open(whisper, workers=workers, threads=1), EcapaEncoder.open(ecapa))

    def measure(self, samples: Samples, rate: int, language: str) -> dict[str, Any]:
        transcript = self.asr.transcribe(samples, rate, language)
        return {
            "transcript": transcript.text,
            "looped": transcript.looped,
            "embedding": self.speaker_encoder.embed(samples, rate).tolist(),
            "level": speech_level_db(samples, rate),
        }


def real_sets(
    folders: Iterable[Path],
    held_out_folders: Iterable[Path],
    clips: int,
    names: Sequence[str] = (),
    language: str = "en",
) -> dict[str, list[Clip]]:
    """Up to `clips` clips of each set, or of those that are named, by a hash of their names. Of `held_out_folders` only
    speakers that are held out.

    A set is NAME-0.parquet, NAME-1.parquet ...; parts without a name of their own are called after their folder. A
    folder without parquet files is one set of audio files, all in `language`.
    """
    found: defaultdict[str, list[Clip]] = defaultdict(list)
    for folders_used, only_held_out in ((folders, False), (held_out_folders, True)):
        for name, read in (one for folder in folders_used for one in _parts(folder, language)):
            for clip in read() if not names or name in names else ():
                fits = CLIP_SECONDS[0] <= clip["seconds"] <= CLIP_SECONDS[1]
                if fits and (not only_held_out or is_held_out(clip["speaker"])):
                    found[name].append(clip)
    return {name: sorted(some, key=lambda clip: string_hash(clip["id"]))[:clips] for name, some in found.items()}


def _parts(folder: Path, language: str) -> Iterator[tuple[str, Callable[[], Iterable[Clip]]]]:
    """Yield the set of each parquet file or recording of a folder, and a function that reads its clips."""
    parts = sorted(folder.glob("*.parquet"))
    files = list_recordings(folder) if not parts else []
    if not parts and not files:
        raise DataError(
            f"{folder} holds neither parquet files nor recordings",
            hint=f"python training/fledgling/real_corpora.py --out {folder.parent}",
        )
    for part in parts:
        name = part.stem.rpartition("-")[0] or part.stem
        yield folder.name if name == "part" else name, partial(_read_parquet, part)
    for file in files:
        yield folder.name, partial(_read_recording, file, folder, language)


def _read_parquet(part: Path) -> Iterable[Clip]:
    clips: list[Clip] = parquet.read_table(part, columns=COLUMNS).to_pylist()
    return clips


def _read_recording(file: Path, folder: Path, language: str) -> Iterable[Clip]:
    """The first seconds of an audio file; its speaker is the first folder that it lies in."""
    place = file.relative_to(folder)
    seconds = min(probe(file).seconds, CLIP_SECONDS[1])
    content = io.BytesIO()
    soundfile.write(content, read_audio(file, sample_rate=RATE, span=(0.0, seconds)), RATE, format="FLAC")
    yield {
        "id": "_".join(place.parts),
        "text": "",
        "speaker": place.parts[0] if len(place.parts) > 1 else folder.name,
        "language": language,
        "seconds": seconds,
        "audio": {"bytes": content.getvalue(), "path": str(place)},
    }


def measure_clips(
    name: str, clips: Iterable[Clip], codec: RoundTripCodec, work: Path, metrics: SpeechMeasures, workers: int = 1
) -> Iterator[MeasuredClip]:
    """Each clip with the measures of the original and of its round trip; what is in `work` is not measured again."""
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(lambda clip: _measure(clip, work, name, codec, metrics), clips)


def _measure(clip: Clip, work: Path, name: str, codec: RoundTripCodec, metrics: SpeechMeasures) -> MeasuredClip:
    files = [work / which / name / f"{clip['id']}.json" for which in ("originals", codec.revision)]
    measured: list[Any] = [json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None for file in files]
    if None in measured:
        samples = decode(clip["audio"]["bytes"], codec.sample_rate)
        samples = samples[: len(samples) // codec.hop * codec.hop]
        for index, file in enumerate(files):
            if measured[index] is None:
                heard = codec.decode(codec.encode(samples[None])[0]) if index else samples
                measured[index] = metrics.measure(heard, codec.sample_rate, clip["language"])
                with atomic_write(file) as temporary:
                    temporary.write_text(json.dumps(measured[index], ensure_ascii=False), encoding="utf-8")
    return clip, measured[0], measured[1]


def score_set(measured: Sequence[MeasuredClip]) -> Scores:
    """Words and characters changed, similarity and level of the round trips; errors where texts are known."""

    def rate(count: Any, which: tuple[int, int]) -> float:
        pairs = [(_text(row[which[0]]), _text(row[which[1]]), row[0]["language"]) for row in measured]
        return float(sum((count(*pair) for pair in pairs if pair[0]), ErrorCount()).rate)

    similarities = [_cosine(original, copy) for _, original, copy in measured]
    levels = [copy["level"] - original["level"] for _, original, copy in measured]
    same = [
        _cosine(measured[i][1], measured[j][1])
        for i in range(len(measured))
        for j in range(i)
        if measured[i][0]["speaker"] == measured[j][0]["speaker"]
    ]
    scores = {
        "words changed": rate(word_errors, (1, 2)),
        "characters changed": rate(character_errors, (1, 2)),
        "ECAPA original / round trip": float(np.mean(similarities)),
        "level change, dB": float(np.mean(levels)),
        "loops": float(np.mean([copy["looped"] for _, _, copy in measured])),
    }
    if same:
        scores["ECAPA same speaker"] = float(np.mean(same))
    if any(clip["text"] for clip, _, _ in measured):
        scores |= {
            f"{unit} errors {when}": rate(count, (0, which))
            for unit, count in (("word", word_errors), ("character", character_errors))
            for when, which in (("before", 1), ("after", 2))
        }
    return scores


def other_speaker_similarity(sets: Mapping[str, Sequence[MeasuredClip]]) -> float | None:
    """Mean similarity of originals of different speakers, of all sets; None where there is one speaker."""
    rows = [(clip["speaker"], original["embedding"]) for measured in sets.values() for clip, original, _ in measured]
    embeddings = np.array([embedding for _, embedding in rows])
    speakers = np.array([speaker for speaker, _ in rows])
    others = speakers[:, None] != speakers[None]
    return float((embeddings @ embeddings.T)[others].mean()) if others.any() else None


def _text(row: Mapping[str, Any]) -> str:
    return str(row["transcript"] if "transcript" in row else row["text"])


def _cosine(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    """Cosine of embeddings of length one, or zeros."""
    return float(np.dot(first["embedding"], second["embedding"]))
