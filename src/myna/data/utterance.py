"""Utterance: a clip with transcript and speaker, as importers produce it and manifests store it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from myna.text.normalization import normalise_text

TASKS = (
    "zero_shot_voice_cloning",
    "single_speaker_smart_voice",
    "multi_speaker_smart_voice",
    "multi_speaker_voice_cloning",
)
SPEAKER_TAG = re.compile(r"\[SPEAKER(\d+)\]")
"""Says who speaks from there on, in a text of several speakers."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a recording, in seconds. `end` None means up to the end of the file."""

    start: float
    end: float | None

    def __post_init__(self) -> None:
        if not 0 <= self.start < (math.inf if self.end is None else self.end):  # so written that NaN fails too
            raise ValueError(f"a span must run forwards from 0 or later, not {self.start} to {self.end}")


@dataclass(frozen=True, slots=True)
class Utterance:
    """A clip with its transcript and speaker.

    `extras` holds the source's other fields. These keys are reserved:

    references      ids of the utterances that set the voice, one per speaker tag in order; [] for no reference;
                    without the key another clip of the same speaker is sampled, but none for a dialogue
    reference_only  true for a clip that only ever serves as a reference
    scene           a sentence about the room or the manner
    task            one of `TASKS`
    answer          the text to be learned of the clip, which is then an input and not a speech target
    question        the text of the prompt beside it
    """

    id: str
    audio: Path
    text: str
    speaker: str
    language: str = ""
    span: Span | None = None
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def references(self) -> tuple[str, ...] | None:
        """The references that the source names; None where one is to be sampled."""
        if self.answer:
            return ()
        return tuple(self.extras["references"]) if "references" in self.extras else None

    @property
    def answer(self) -> str:
        """The answer to be learned of the clip; empty for a speech target."""
        return str(self.extras.get("answer") or "")

    @property
    def is_target(self) -> bool:
        return not self.extras.get("reference_only", False)

    @property
    def is_dialogue(self) -> bool:
        """Whether several people speak in the clip: by its task, or by the speaker tags of its text."""
        is_multi_speaker = str(self.extras.get("task") or "").startswith("multi_speaker")
        return is_multi_speaker or len(set(SPEAKER_TAG.findall(self.text))) > 1

    def to_json(self) -> dict[str, Any]:
        return self.to_line(self.audio.as_posix())

    def to_line(self, audio: str) -> dict[str, Any]:
        """A manifest line with `audio` as its path. Written out, since `asdict` copies every path and every extra."""
        line: dict[str, Any] = {"id": self.id} if self.id else {}
        line |= {"audio": audio, "text": self.text, "speaker": self.speaker}
        if self.language:
            line["language"] = self.language
        if self.span is not None:
            line["span"] = {"start": self.span.start, "end": self.span.end}
        if self.extras:
            line["extras"] = self.extras
        return line

    @classmethod
    def from_json(cls, line: dict[str, Any], folder: Path) -> Utterance:
        """A manifest line; relative audio paths are relative to the manifest's folder."""
        span = line.get("span")
        return cls(
            id=str(line["id"]),
            audio=folder / line["audio"],
            text=normalise_text(line["text"]),
            speaker=str(line["speaker"]),
            language=line.get("language", ""),
            span=Span(**span) if span else None,
            extras=line.get("extras", {}),
        )
