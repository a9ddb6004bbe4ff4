"""Are the words there? A Whisper listens, and what it writes is compared with what was to be said."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from myna.audio.clip import Samples
from myna.errors import ModelError
from myna.evaluate.listening import heard_at, is_silent, needed
from myna.evaluate.writing import letters, words

INSTALL = ('pip install "myna[evaluate]"',)
FILES = ("model.bin", "tokenizer.json", "config.json")
"""Without them faster-whisper would look for a network, or fail deep inside."""

REPEATS = {1: 6, 2: 4, 3: 4, 4: 3, 5: 3, 6: 3, 7: 3, 8: 3}
"""So many times the same words in a row, by how many words they are, are nobody's way to speak."""
COMPRESSION = 2.4
"""Text that packs better than this is a loop: Whisper's own rule."""


@dataclass(frozen=True, slots=True)
class Heard:
    text: str
    looped: bool
    """The recogniser went round in circles: its text says little about the sound."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Words changed, added or dropped, out of so many. Add them up and divide once, so that every word counts alike."""

    errors: int = 0
    words: int = 0

    def __add__(self, other: Errors) -> Errors:
        return Errors(self.errors + other.errors, self.words + other.words)

    @property
    def rate(self) -> float:
        """Not a number where there was nothing to say."""
        return self.errors / self.words if self.words else math.nan

    @staticmethod
    def total(several: Iterable[Errors]) -> Errors:
        return sum(several, Errors())


class Recogniser:
    """The same sound always gives the same text: beams of five, no dice, and no memory of what was heard before."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @classmethod
    def open(cls, name_or_folder: str, device: str = "cpu", *, at_once: int = 1) -> Recogniser:
        """A folder with a CTranslate2 Whisper, or a name that faster-whisper knows where to download.

        So many threads may transcribe at once; the cores of this machine are shared out among them.
        """
        faster_whisper = needed("faster_whisper", *INSTALL)
        folder = _folder(name_or_folder, faster_whisper)
        cores = max(1, min(4, os.cpu_count() or 1) // at_once)
        try:
            return cls(
                faster_whisper.WhisperModel(
                    folder,
                    device=device,
                    compute_type="int8" if device == "cpu" else "float16",
                    cpu_threads=cores,
                    num_workers=at_once,
                )
            )
        except (RuntimeError, ValueError) as error:
            raise ModelError(
                f"{name_or_folder} cannot be opened on {device}: {error}",
                hint="give a Whisper converted with ct2-transformers-converter, and cpu or cuda",
            ) from error

    def transcribe(self, samples: Samples, sample_rate: int, language: str | None = "en") -> Heard:
        """`language` as Whisper has it (en, ar, vi ...); None lets it guess."""
        clip = heard_at(samples, sample_rate)
        # Whisper makes up words for silence: "I'm sorry" fifty times over, or thanks for watching.
        if is_silent(clip):
            return Heard("", looped=False)
        segments, _ = self._model.transcribe(
            clip, language=language, beam_size=5, temperature=0.0, condition_on_previous_text=False
        )
        text = " ".join(segment.text.strip() for segment in segments)
        return Heard(text, is_loop(text))


def _folder(name: str, faster_whisper: Any) -> str:
    path = Path(name).expanduser()
    if path.is_dir():
        missing = [file for file in FILES if not (path / file).is_file()]
        if missing:
            raise ModelError(
                f"{path} has no {', '.join(missing)}",
                hint="give the folder of a CTranslate2 Whisper with its tokenizer.json, or a name such as base",
            )
        return str(path)
    hint = (
        "name a folder that holds a CTranslate2 Whisper (model.bin, tokenizer.json, config.json), or base with network"
    )
    if path.is_absolute() or name.startswith((".", "~")):
        raise ModelError(f"there is no folder {path}", hint=hint)
    try:
        return str(faster_whisper.download_model(name))
    except Exception as error:
        raise ModelError(f"no recogniser {name} here, and it cannot be downloaded: {error}", hint=hint) from error


def word_errors(text: str, heard: Heard | str, language: str = "en") -> Errors:
    """How far what was heard is from what was to be said."""
    due = words(text, language)
    return Errors(edits(due, words(_text(heard), language)), len(due))


def letter_errors(text: str, heard: Heard | str, language: str = "en") -> Errors:
    """The same, letter by letter: a word that is nearly right counts for little."""
    due = letters(text, language)
    return Errors(edits(due, letters(_text(heard), language)), len(due))


def _text(heard: Heard | str) -> str:
    return heard.text if isinstance(heard, Heard) else heard


def edits(due: Sequence[str], heard: Sequence[str]) -> int:
    """Words to change, add or drop."""
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
