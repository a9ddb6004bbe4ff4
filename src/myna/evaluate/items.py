"""A line to be judged: what is to be said, in whose voice, and the recording of it where there is one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from myna.audio.files import Samples, probe, read
from myna.data.text_normalization import UNSPACED, base_language
from myna.data.utterance import Utterance
from myna.io import bytes_hash, file_hash

Kind = Literal["word", "line", "long"]
LONG = 200
"""Letters from which a line is very long: a quarter of a minute."""
PACE, UNSPACED_PACE = 13.0, 5.0
"""Letters a second that people speak, and those of scripts in which a letter is a syllable or more."""
CAPS = (6.0, 12.0, 24.0, 48.0, 96.0, 192.0, 384.0)
"""Seconds at which a line is cut. It depends on the line alone, so that its company changes nothing."""


@dataclass(frozen=True, slots=True)
class EvalItem:
    id: str
    text: str
    speaker: str = ""
    language: str = ""
    references: tuple[Utterance, ...] = ()
    """The clips that set the voice, one for each speaker of the line."""
    real: Utterance | None = None
    """The same words as they were really spoken."""
    scene: str = ""

    @property
    def kind(self) -> Kind:
        if base_language(self.language) not in UNSPACED and len(self.text.split()) == 1:
            return "word"
        return "long" if len(self.text) >= LONG else "line"

    @property
    def expected_seconds(self) -> float:
        """How long it should take: as long as the recording, or as people speak."""
        if self.real is not None:
            return seconds_of(self.real)
        return len(self.text) / (UNSPACED_PACE if base_language(self.language) in UNSPACED else PACE)

    @property
    def cap(self) -> float:
        """Twice as long as it should take and a few seconds more: who still speaks then has not found the end."""
        enough = 2 * self.expected_seconds + 3
        return next((cap for cap in CAPS if cap >= enough), float(round(enough)))

    @property
    def key(self) -> str:
        """Changes whenever another sound could be asked for."""
        clips = [(clip_key(clip), clip.text) for clip in self.references]
        return bytes_hash(repr((self.text, self.scene, self.cap, clips)).encode())


@dataclass(frozen=True, slots=True)
class EvalSet:
    """All lines, and what else there is of the real voices."""

    tasks: tuple[EvalItem, ...]
    clips: Mapping[str, tuple[Utterance, ...]]
    """Real recordings of each speaker, to compare voices with."""
    notes: tuple[str, ...] = ()
    """What a person should know: lines without a reference, what was left out."""


def samples_of(utterance: Utterance, sample_rate: int) -> Samples:
    span = utterance.span
    return read(utterance.audio, sample_rate=sample_rate, span=(span.start, span.end) if span else None)


@functools.lru_cache(maxsize=65_536)
def _whole_seconds(path: Path) -> float:
    return probe(path).seconds


def seconds_of(utterance: Utterance) -> float:
    span = utterance.span
    if span is not None and span.end is not None:
        return span.end - span.start
    return _whole_seconds(utterance.audio) - (span.start if span else 0.0)


@functools.lru_cache(maxsize=65_536)
def _file_key(path: Path) -> str:
    return file_hash(path)


def clip_key(utterance: Utterance) -> str:
    """A sound by what it is, wherever it lies."""
    span = utterance.span
    return f"{_file_key(utterance.audio)}@{span.start}-{span.end}" if span else _file_key(utterance.audio)
