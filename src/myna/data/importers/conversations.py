"""Conversations with clips in them: which clip is to be learned, what is said in it, and which ones set its voice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from myna.data.importers.base import Bad, Context, reference
from myna.data.utterance import Span, Utterance, normalise_text

INSTRUCTION = "Please generate speech for given text in reference audio's voice:"
"""What the Arabic data puts before the target's text in the user's turn."""


@dataclass(frozen=True, slots=True)
class ImportedClip:
    audio: Path
    span: Span | None = None


@dataclass(frozen=True, slots=True)
class ImportedTurn:
    role: str
    parts: Sequence[str | ImportedClip]


@dataclass(frozen=True, slots=True)
class ImportedConversation:
    id: str
    turns: Sequence[ImportedTurn]
    speaker: str
    language: str
    start: int = 0
    """Turns before this one are context."""
    reference_text: str = ""
    target_text: str = ""
    """What the clips say, where the turns do not tell."""
    extras: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Spoken:
    audio: Path
    span: Span | None
    text: str
    is_target: bool


def utterances(sample: ImportedConversation, context: Context) -> Iterator[Utterance]:
    """The assistant's clips from `start` on are targets; whatever sounded before one of them is its reference."""
    spoken = list(_spoken(sample))
    targets = [clip for clip in spoken if clip.is_target]
    if not targets:
        raise Bad("malformed", "no clip in an assistant's turn to learn")
    heard: list[str] = []
    learned = 0
    for clip in spoken:
        if clip.is_target:
            id = sample.id if len(targets) == 1 else f"{sample.id}/{learned}"
            text = clip.text or (sample.target_text if len(targets) == 1 else "")
            asked = {"references": list(dict.fromkeys(heard))} if heard else {}
            yield Utterance(id, clip.audio, text, sample.speaker, sample.language, clip.span, sample.extras | asked)
            learned += 1
        else:
            text = clip.text or (sample.reference_text if len(spoken) == len(targets) + 1 else "")
            name = f"{sample.id}/ref{len(heard) - learned}"
            id, new = context.share(reference(name, clip.audio, text, sample.speaker, sample.language, clip.span))
            yield from new
        heard.append(id)


def _spoken(sample: ImportedConversation) -> Iterator[_Spoken]:
    """Each clip with its text: its own turn's, or for the assistant's clip what the user last asked for."""
    asked: list[str] = []
    for number, turn in enumerate(sample.turns):
        told: list[str] = []
        clips = sum(isinstance(part, ImportedClip) for part in turn.parts)
        for place, part in enumerate(turn.parts):
            if isinstance(part, str):
                told.append(part)
                continue
            if turn.role == "assistant":
                after = [text for text in turn.parts[place:] if isinstance(text, str)] if clips == 1 else []
                text = _joined(told) or _joined(after) or _joined(asked).removeprefix(INSTRUCTION).strip()
            else:
                text = _joined(asked + told) if turn.role == "user" else ""
            yield _Spoken(part.audio, part.span, text, turn.role == "assistant" and number >= sample.start)
            asked, told = [], []
        if turn.role == "user":
            asked = asked + told
        elif turn.role == "assistant":
            asked = []


def _joined(texts: Sequence[str]) -> str:
    return normalise_text(" ".join(texts))
