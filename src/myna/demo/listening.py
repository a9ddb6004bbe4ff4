"""What ears make of it: the real recordings, and the model before and after, line by line.

An ear that is not there leaves its numbers out and says what would bring it; nothing is made up in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from myna.audio.files import Samples
from myna.errors import MynaError
from myna.evaluate.resemblyzer import ResemblyzerEncoder
from myna.evaluate.wer import ASR, ErrorCount, Transcript, word_errors

REAL, BEFORE, AFTER = "real", "before", "after"
SYSTEMS = (REAL, BEFORE, AFTER)
Sounds = Mapping[str, Sequence[Samples]]
"""The same lines, by system."""
Score = TypeVar("Score")


@dataclass(frozen=True, slots=True)
class Likeness:
    """How like the voice each line is, 1 being the same."""

    to_voice: tuple[float, ...]
    """To the mean of the real recordings of the other lines: a recording is never compared with itself."""
    to_line: tuple[float, ...] | None
    """To the real recording of the same line; None for the real ones."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.to_voice))

    @property
    def line_mean(self) -> float | None:
        return None if self.to_line is None else float(np.mean(self.to_line))


@dataclass(frozen=True, slots=True)
class Understood:
    """What a recogniser wrote down, and how many words of it are wrong.

    Where it went round in circles, its text says little about the sound, and the line counts as wholly wrong.
    """

    heard: tuple[Transcript, ...]
    errors: tuple[ErrorCount, ...]

    @property
    def total(self) -> ErrorCount:
        return ErrorCount.total(self.errors)


@dataclass(frozen=True, slots=True)
class Scores:
    """By system; None with the reason where there was no ear."""

    likeness: Mapping[str, Likeness] | None
    no_likeness: str
    words: Mapping[str, Understood] | None
    no_words: str

    def to_json(self) -> dict[str, Any]:
        """For those who compare demos."""
        likeness, words = self.likeness or {}, self.words or {}
        systems: dict[str, dict[str, Any]] = {name: {} for name in SYSTEMS}
        for name, alike in likeness.items():
            systems[name] |= {"similarity": alike.mean, "similarity_to_line": alike.line_mean}
            systems[name] |= {"similarities": list(alike.to_voice)}
        for name, heard in words.items():
            systems[name] |= {"word_errors": heard.total.errors, "words": heard.total.words}
            systems[name] |= {"word_error_rate": heard.total.rate, "heard": [one.text for one in heard.heard]}
        missing = {"similarity": self.no_likeness, "word_errors": self.no_words}
        return {"systems": systems, "missing": {name: reason for name, reason in missing.items() if reason}}


def listen(
    sounds: Sounds,
    texts: Sequence[str],
    sample_rate: int,
    *,
    recogniser: str | None,
    language: str,
    advance: Callable[[], None],
) -> Scores:
    """Every ear to every sound. `advance` is called after each. A recogniser guesses a language that is not given."""
    likeness, no_likeness = _try(lambda: _likeness(ResemblyzerEncoder.open(), sounds, sample_rate, advance))
    if recogniser is None:
        words, no_words = None, "no recogniser was named: myna demo --recogniser base, or the folder of a Whisper"
    else:
        named = recogniser
        words, no_words = _try(lambda: _understand(ASR.open(named), sounds, texts, sample_rate, language, advance))
    return Scores(likeness, no_likeness, words, no_words)


def _try(judge: Callable[[], Score]) -> tuple[Score | None, str]:
    """What an ear says, or what it would take to have one."""
    try:
        return judge(), ""
    except MynaError as error:
        return None, f"{error.what}: {error.hint}"


def _likeness(
    ear: ResemblyzerEncoder, sounds: Sounds, sample_rate: int, advance: Callable[[], None]
) -> dict[str, Likeness]:
    voices: dict[str, list[Any]] = {name: [] for name in SYSTEMS}
    for name in SYSTEMS:
        for samples in sounds[name]:
            voices[name].append(ear.embed(samples, sample_rate))
            advance()
    real = voices[REAL]
    others = [
        np.mean([voice for place, voice in enumerate(real) if place != line], axis=0) for line in range(len(real))
    ]
    return {
        name: Likeness(
            to_voice=tuple(map(ear.similarity, voices[name], others)),
            to_line=None if name == REAL else tuple(map(ear.similarity, voices[name], real)),
        )
        for name in SYSTEMS
    }


def _understand(
    ear: ASR,
    sounds: Sounds,
    texts: Sequence[str],
    sample_rate: int,
    language: str,
    advance: Callable[[], None],
) -> dict[str, Understood]:
    understood = {}
    for name in SYSTEMS:
        heard, errors = [], []
        for samples, text in zip(sounds[name], texts, strict=True):
            said = ear.transcribe(samples, sample_rate, language or None)
            wrong = word_errors(text, said, language)
            heard.append(said)
            errors.append(ErrorCount(wrong.words, wrong.words) if said.looped else wrong)
            advance()
        understood[name] = Understood(tuple(heard), tuple(errors))
    return understood
