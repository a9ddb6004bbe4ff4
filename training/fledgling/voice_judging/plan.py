"""Who is to say what: it follows from the seed and from names alone, so that every model is asked the same."""

from __future__ import annotations

import gzip
import io
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import soundfile

from codec_training.sounds import Recording, recordings
from corpus_making.held_out import is_held_out, is_held_out_line
from myna.data.hash_rng import hash_of
from myna.errors import DataError

REFERENCE = (3.0, 8.0)
"""Seconds of a reference."""
FEWEST_WORDS = 4
"""Of a line whose words and voice are judged. Shorter ones say little about a voice; stopping is judged on them too."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Voice:
    """A held-out speaker: the clip that is cloned, and what else there is of the real voice."""

    speaker: str
    reference: Recording
    originals: tuple[Recording, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A line to be spoken in a voice."""

    id: str
    voice: int
    text: str
    judged: bool
    """By words, voice and quality. Of the others only the stopping counts."""

    @property
    def is_one_word(self) -> bool:
        return len(self.text.split()) == 1


@dataclass(frozen=True, slots=True)
class Plan:
    voices: tuple[Voice, ...]
    tasks: tuple[Task, ...]


def plan(source: Path, lines: Sequence[str], seed: int, voices: int, each: int, short: int, more: int) -> Plan:
    """So many voices with so many judged lines each; then one-word lines, and lines of any length, for the stopping."""
    chosen = _voices(source, seed, voices, each)
    drawn = _shuffled(lines, f"{seed}/lines", str)
    long = [line for line in drawn if len(line.split()) >= FEWEST_WORDS]
    said, rest = long[: voices * each], [line for line in drawn if line not in set(long[: voices * each])]
    single = _shuffled(_single_words(lines), f"{seed}/words", str)
    if len(said) < voices * each or len(rest) < more or len(single) < short:
        raise DataError(f"{len(lines)} held-out lines are not enough", hint="ask for fewer, or make them with texts.py")
    tasks = [
        Task(f"{chosen[number % voices].speaker}-{kind}-{number // voices:02d}", number % voices, text, kind == "line")
        for kind, texts in (("line", said), ("word", single[:short]), ("more", rest[:more]))
        for number, text in enumerate(texts)
    ]
    return Plan(tuple(chosen), tuple(tasks))


def read_lines(file: Path) -> list[str]:
    if not file.is_file():
        raise DataError(f"there is no {file}", hint=f"python training/fledgling/texts.py --out {file.parent}")
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        return [line.strip() for line in opened if line.strip()]


def _voices(source: Path, seed: int, count: int, originals: int) -> list[Voice]:
    of: defaultdict[str, list[Recording]] = defaultdict(list)
    for one in recordings(source):
        if is_held_out(one.speaker):
            of[one.speaker].append(one)
    found: list[Voice] = []
    for speaker in _shuffled(list(of), f"{seed}/speakers", str):
        clips = _shuffled(of[speaker], f"{seed}/clips", lambda one: one.id)
        # A reference that says a line which is to be spoken would give the words away.
        fit = [one for one in clips if REFERENCE[0] <= seconds(one) <= REFERENCE[1] and not is_held_out_line(one.text)]
        if fit and len(clips) > originals:
            others = [one for one in clips if one.id != fit[0].id and one.text != fit[0].text]
            found.append(Voice(speaker, fit[0], tuple(others[:originals])))
        if len(found) == count:
            return found
    raise DataError(
        f"{source} has {len(found)} held-out speakers with a clip of 3 to 8 s and {originals} others",
        hint=f"make more natural speech, or ask for --voices {len(found)}",
    )


def seconds(recording: Recording) -> float:
    info = soundfile.info(io.BytesIO(recording.data))
    return float(info.frames / info.samplerate)


def _single_words(lines: Sequence[str]) -> list[str]:
    """Words of the held-out lines, each as a line of its own."""
    found = {word.strip(".,;:!?").capitalize() for line in lines for word in line.split()}
    return sorted(f"{word}." for word in found if word.isascii() and word.isalpha() and len(word) > 2)


def _shuffled(items: Sequence[T], occasion: str, name: Callable[[T], str]) -> list[T]:
    return sorted(items, key=lambda item: hash_of(f"{occasion}/{name(item)}"))
