"""What the ears make of a folder of speech, line by line, and what that comes to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from myna.audio.files import read
from myna.evaluate.dependencies import RATE
from myna.evaluate.mos import DistillMOS
from myna.evaluate.resemblyzer import ResemblyzerEncoder, Voice, rank
from myna.evaluate.wer import ASR, ErrorCount, word_errors
from voice_judging.plan import Plan
from voice_judging.speaking import Tell, write_json

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ears:
    words: ASR
    voice: ResemblyzerEncoder
    quality: DistillMOS

    @classmethod
    def open(cls, recogniser: str, at_once: int) -> Ears:
        return cls(ASR.open(recogniser, at_once=at_once), ResemblyzerEncoder.open(), DistillMOS.open())


@dataclass(frozen=True, slots=True)
class Clip:
    """A file to listen to, and what it should be."""

    system: str
    id: str
    text: str
    voice: int


def real_clips(plan: Plan) -> list[Clip]:
    return [
        Clip(system, f"{voice.speaker}-{number:02d}", original.text, place)
        for system in ("originals", "round_trips")
        for place, voice in enumerate(plan.voices)
        for number, original in enumerate(voice.originals)
    ]


def cloned_clips(plan: Plan) -> list[Clip]:
    return [Clip("clones", task.id, task.text, task.voice) for task in plan.tasks if task.judged]


def known_voices(real: Path, plan: Plan, ear: ResemblyzerEncoder) -> list[Voice]:
    files = [real / "references" / f"{voice.speaker}.wav" for voice in plan.voices]
    return [ear.embed(read(file, sample_rate=RATE), RATE) for file in files]


def listen(
    folder: Path, todo: Sequence[Clip], voices: Sequence[Voice], ears: Ears, at_once: int, tell: Tell
) -> dict[str, list[Row]]:
    """Every clip that nobody has listened to yet, several at once; all rows, by system."""
    torch.set_num_threads(1)  # the clips share the cores out among themselves
    rows: dict[str, list[Row]] = {clip.system: [] for clip in todo}
    with ThreadPoolExecutor(at_once) as pool:
        for clip, row in zip(todo, pool.map(lambda clip: _row(folder, clip, voices, ears), todo), strict=True):
            rows[clip.system].append(row)
            tell(1)
    return rows


def _row(folder: Path, clip: Clip, voices: Sequence[Voice], ears: Ears) -> Row:
    file = folder / "heard" / clip.system / f"{clip.id}.json"
    if file.is_file():
        known: Row = json.loads(file.read_text(encoding="utf-8"))
        return known
    samples = read(folder / clip.system / f"{clip.id}.wav", sample_rate=RATE)
    heard, voice = ears.words.transcribe(samples, RATE, "en"), ears.voice.embed(samples, RATE)
    errors, alike = word_errors(clip.text, heard), [ears.voice.similarity(voice, other) for other in voices]
    row = {
        "id": clip.id,
        "text": clip.text,
        "heard": heard.text,
        "looped": heard.looped,
        "errors": errors.errors,
        "words": errors.words,
        "similarity": alike[clip.voice],
        "similarity to others": float(np.mean([one for place, one in enumerate(alike) if place != clip.voice])),
        "rank": rank(voice, clip.voice, voices),
        "quality": ears.quality.score(samples, RATE),
        "seconds": len(samples) / RATE,
    }
    write_json(file, row)
    return row


def scores(rows: Sequence[Row]) -> dict[str, float]:
    """A system in numbers. Errors of lines where the recogniser looped count here, and are told apart beside it."""

    def rate(some: Sequence[Row]) -> float:
        total = ErrorCount.total(ErrorCount(row["errors"], row["words"]) for row in some)
        return total.rate if total.words else 1.0

    def mean(name: str) -> float:
        return float(np.mean([row[name] for row in rows]))

    return {
        "word errors": rate(rows),
        "word errors without loops": rate([row for row in rows if not row["looped"]]),
        "loops": float(np.mean([row["looped"] for row in rows])),
        "similarity": mean("similarity"),
        "similarity to others": mean("similarity to others"),
        "nearest is its own": float(np.mean([row["rank"] == 1 for row in rows])),
        "DistillMOS": mean("quality"),
        "lines": float(len(rows)),
    }
