"""Evaluation items: a text to synthesize, the reference clips of its voice, and its recording where there is one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from myna.audio.files import Samples, probe, read_audio
from myna.core.io import bytes_hash, file_hash
from myna.data.manifest import Utterance
from myna.text.normalization import UNSPACED, base_language

LengthClass = Literal["word", "sentence", "long"]
LONG_TEXT_CHARACTERS = 200
"""From here on a text is long: a quarter of a minute."""
CHARACTERS_PER_SECOND, UNSPACED_CHARACTERS_PER_SECOND = 13.0, 5.0
"""Usual speaking rates; in scripts without spaces a character is a syllable or more."""
MAX_SECONDS_STEPS = (6.0, 12.0, 24.0, 48.0, 96.0, 192.0, 384.0)
"""Lengths at which generation is cut. It depends on the item alone, so that its batch changes nothing."""


@dataclass(frozen=True, slots=True)
class EvalItem:
    id: str
    text: str
    speaker: str = ""
    language: str = ""
    references: tuple[Utterance, ...] = ()
    """The clips that set the voice, one for each speaker of the text."""
    recording: Utterance | None = None
    """The real recording of the text."""
    scene: str = ""

    @property
    def length_class(self) -> LengthClass:
        if base_language(self.language) not in UNSPACED and len(self.text.split()) == 1:
            return "word"
        return "long" if len(self.text) >= LONG_TEXT_CHARACTERS else "sentence"

    @property
    def expected_seconds(self) -> float:
        """Seconds of the recording, or at the usual speaking rate."""
        if self.recording is not None:
            return clip_seconds(self.recording)
        is_unspaced = base_language(self.language) in UNSPACED
        return len(self.text) / (UNSPACED_CHARACTERS_PER_SECOND if is_unspaced else CHARACTERS_PER_SECOND)

    @property
    def max_seconds(self) -> float:
        """Twice the expected length and a few seconds more: a model that still speaks then has not found the end."""
        enough = 2 * self.expected_seconds + 3
        return next((step for step in MAX_SECONDS_STEPS if step >= enough), float(round(enough)))

    @property
    def key(self) -> str:
        """Changes whenever other audio could be asked for: text, scene, references or maximum length."""
        clips = [(recording_key(clip), clip.text) for clip in self.references]
        return bytes_hash(repr((self.text, self.scene, self.max_seconds, clips)).encode())


@dataclass(frozen=True, slots=True)
class EvalSet:
    """Items, and real recordings of each speaker to compare their voices with."""

    items: tuple[EvalItem, ...]
    speaker_clips: Mapping[str, tuple[Utterance, ...]]
    notes: tuple[str, ...] = ()
    """For people: items without a reference, or without a language."""


def load_clip(utterance: Utterance, sample_rate: int) -> Samples:
    span = utterance.span
    return read_audio(utterance.audio, sample_rate=sample_rate, span=(span.start, span.end) if span else None)


@functools.lru_cache(maxsize=65_536)
def _file_seconds(path: Path) -> float:
    return probe(path).seconds


def clip_seconds(utterance: Utterance) -> float:
    span = utterance.span
    if span is not None and span.end is not None:
        return span.end - span.start
    return _file_seconds(utterance.audio) - (span.start if span else 0.0)


_file_key = functools.lru_cache(maxsize=65_536)(file_hash)


def recording_key(utterance: Utterance) -> str:
    """A recording by its content, wherever the file is."""
    span = utterance.span
    return f"{_file_key(utterance.audio)}@{span.start}-{span.end}" if span else _file_key(utterance.audio)
