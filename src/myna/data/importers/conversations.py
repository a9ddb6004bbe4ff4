"""Utterances of imported conversations: targets, their transcripts and their references."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from myna.data.importers.base import ImportContext, ImportItem, RecordError, SourceRecord, build_utterances
from myna.data.importers.fields import require_field, require_type
from myna.data.importers.reading import json_records
from myna.data.utterance import Span, Utterance
from myna.text.normalization import normalise_text

T = TypeVar("T")
INSTRUCTION = "Please generate speech for given text in reference audio's voice:"
"""A prefix of the target's text in the user's turn, in the Arabic data."""


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
    """The first turn whose clips are targets."""
    reference_text: str = ""
    target_text: str = ""
    """Transcripts of clips whose turns have no text."""
    extras: dict[str, Any] = field(default_factory=dict)


def read_conversations(
    source: Path, context: ImportContext, parse: Callable[[SourceRecord], ImportedConversation]
) -> Iterator[ImportItem]:
    """The utterances of a JSON or JSONL file whose objects `parse` turns into conversations; it sets their ids too."""
    return build_utterances(json_records(source), lambda record: _utterances(parse(record), context))


def read_messages(sample: Mapping[str, Any], content_type: type[T]) -> Iterator[tuple[str, T]]:
    """Role and content of each message of a sample."""
    for message in require_field(sample, "messages", list):
        message = require_type(message, dict, "messages")
        yield require_field(message, "role", str), require_field(message, "content", content_type)


def _utterances(sample: ImportedConversation, context: ImportContext) -> Iterator[Utterance]:
    """The assistant's clips from `start` on are targets; all clips before a target are its references."""
    clips = list(transcribed_clips(sample))
    target_count = sum(is_target for _, _, is_target in clips)
    if not target_count:
        raise RecordError("malformed", "no clip in an assistant's turn to learn")
    previous_ids: list[str] = []
    targets_done = 0
    for clip, text, is_target in clips:
        if is_target:
            id = sample.id if target_count == 1 else f"{sample.id}/{targets_done}"
            text = text or (sample.target_text if target_count == 1 else "")
            extras = sample.extras | ({"references": list(dict.fromkeys(previous_ids))} if previous_ids else {})
            yield Utterance(id, clip.audio, text, sample.speaker, sample.language, clip.span, extras)
            targets_done += 1
        else:
            text = text or (sample.reference_text if len(clips) == target_count + 1 else "")
            name = f"{sample.id}/ref{len(previous_ids) - targets_done}"
            id, new = context.register_reference(name, clip.audio, text, sample.speaker, sample.language, clip.span)
            yield from new
        previous_ids.append(id)


def transcribed_clips(sample: ImportedConversation) -> Iterator[tuple[ImportedClip, str, bool]]:
    """Each clip, its transcript (its own turn's, or for the assistant's clip the user's last), if it is a target."""
    user_texts: list[str] = []
    for number, turn in enumerate(sample.turns):
        turn_texts: list[str] = []
        clip_count = sum(isinstance(part, ImportedClip) for part in turn.parts)
        for position, part in enumerate(turn.parts):
            if isinstance(part, str):
                turn_texts.append(part)
                continue
            if turn.role == "assistant":
                after = [text for text in turn.parts[position:] if isinstance(text, str)] if clip_count == 1 else []
                text = _join(turn_texts) or _join(after) or _join(user_texts).removeprefix(INSTRUCTION).strip()
            else:
                text = _join(user_texts + turn_texts) if turn.role == "user" else ""
            yield part, text, turn.role == "assistant" and number >= sample.start
            user_texts, turn_texts = [], []
        if turn.role == "user":
            user_texts = user_texts + turn_texts
        elif turn.role == "assistant":
            user_texts = []


def open_text(sample: ImportedConversation) -> str:
    """The user's words behind the last clip and the last answer: what is left to be spoken."""
    texts: list[str] = []
    for turn in sample.turns:
        for part in turn.parts:
            texts = [*texts, part] if isinstance(part, str) and turn.role == "user" else []
    return _join(texts).removeprefix(INSTRUCTION).strip()


def _join(texts: Sequence[str]) -> str:
    return normalise_text(" ".join(texts))
