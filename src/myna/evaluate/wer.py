"""Are the words there? A Whisper listens, and what it writes is compared with what was to be said."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from myna.audio.files import Samples
from myna.data.text_normalization import letters, words
from myna.errors import ModelError
from myna.evaluate.asr_faster_whisper import HINT, WEIGHTS, FasterWhisper, download
from myna.evaluate.asr_transformers import TransformersWhisper
from myna.evaluate.dependencies import HUB_FILES, fetched, heard_at, is_silent
from myna.models.files import read_json

TRANSFORMERS = "transformers:"
"""Before a name or a folder: by transformers, whatever else could open it."""
REPEATS = {1: 6, 2: 4, 3: 4, 4: 3, 5: 3, 6: 3, 7: 3, 8: 3}
"""So many times the same words in a row, by how many words they are, are nobody's way to speak."""
COMPRESSION = 2.4
"""Text that packs better than this is a loop: Whisper's own rule."""


@dataclass(frozen=True, slots=True)
class Transcript:
    text: str
    looped: bool
    """The recogniser went round in circles: its text says little about the sound."""


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """Words changed, added or dropped, out of so many. Add them up and divide once, so that every word counts alike."""

    errors: int = 0
    words: int = 0

    def __add__(self, other: ErrorCount) -> ErrorCount:
        return ErrorCount(self.errors + other.errors, self.words + other.words)

    @property
    def rate(self) -> float:
        """Not a number where there was nothing to say."""
        return self.errors / self.words if self.words else math.nan

    @staticmethod
    def total(several: Iterable[ErrorCount]) -> ErrorCount:
        return sum(several, ErrorCount())


class WritesDown(Protocol):
    """A Whisper of some make."""

    @property
    def name(self) -> str:
        """What it is and not where it lies: what another one has heard is heard again."""

    def write(self, clip: Samples, language: str | None) -> str: ...


class ASR:
    """The same sound always gives the same text: beams of five, no dice, and no memory of what was heard before."""

    def __init__(self, whisper: WritesDown) -> None:
        self._whisper = whisper

    @classmethod
    def open(cls, name_or_folder: str, device: str = "cpu", *, at_once: int = 1) -> ASR:
        """A folder with a Whisper, of CTranslate2 or of transformers, as its files tell; or a name to download.

        `base` is one of faster-whisper's names, `owner/name` one of the hub's, and `transformers:base` the Whisper of
        that size as it was published. So many threads may transcribe at once.
        """
        by_transformers = name_or_folder.startswith(TRANSFORMERS)
        name = name_or_folder.removeprefix(TRANSFORMERS)
        folder = _folder(name, by_transformers=by_transformers)
        if not by_transformers and not is_transformers(folder):
            return cls(FasterWhisper.open(folder, name, device, at_once))
        return cls(TransformersWhisper.open(folder, name, device))

    @property
    def name(self) -> str:
        return self._whisper.name

    def transcribe(self, samples: Samples, sample_rate: int, language: str | None = "en") -> Transcript:
        """`language` as Whisper has it (en, ar, vi ...); None lets it guess."""
        clip = heard_at(samples, sample_rate)
        # Whisper makes up words for silence: "I'm sorry" fifty times over, or thanks for watching.
        if is_silent(clip):
            return Transcript("", looped=False)
        text = self._whisper.write(clip, language)
        return Transcript(text, is_loop(text))


def is_transformers(folder: Path) -> bool:
    """By what is in it. A folder with both is CTranslate2's, which is quicker."""
    configured = folder / "config.json"
    return not (folder / WEIGHTS).is_file() and configured.is_file() and "model_type" in read_json(configured)


def _folder(name: str, *, by_transformers: bool) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")):
        raise ModelError(f"there is no folder {path}", hint=HINT)
    if "/" not in name and not by_transformers:
        return download(name)
    repository = name if "/" in name else f"openai/whisper-{name}"
    return fetched(repository, WEIGHTS, *HUB_FILES)


def word_errors(text: str, heard: Transcript | str, language: str = "en") -> ErrorCount:
    """How far what was heard is from what was to be said."""
    due = words(text, language)
    return ErrorCount(edit_distance(due, words(_text(heard), language)), len(due))


def letter_errors(text: str, heard: Transcript | str, language: str = "en") -> ErrorCount:
    """The same, letter by letter: a word that is nearly right counts for little."""
    due = letters(text, language)
    return ErrorCount(edit_distance(due, letters(_text(heard), language)), len(due))


def _text(heard: Transcript | str) -> str:
    return heard.text if isinstance(heard, Transcript) else heard


def edit_distance(due: Sequence[object], heard: Sequence[object]) -> int:
    """Words, or whatever else is put in a row, to change, add or drop."""
    row = list(range(len(heard) + 1))
    for number, word in enumerate(due, start=1):
        above, row = row, [number]
        for place, other in enumerate(heard, start=1):
            row.append(min(above[place] + 1, row[-1] + 1, above[place - 1] + (word != other)))
    return row[-1]


def is_loop(text: str) -> bool:
    """Does it say the same thing over and over?"""
    said = [word.strip(".,;:!?…-'\"").casefold() for word in text.split()]
    for size, limit in REPEATS.items():
        run = 0
        for one, next_one in zip(said, said[size:], strict=False):
            run = run + 1 if one == next_one else 0
            if run >= size * (limit - 1):
                return True
    packed = text.strip().encode()
    return len(packed) > COMPRESSION * len(zlib.compress(packed))
