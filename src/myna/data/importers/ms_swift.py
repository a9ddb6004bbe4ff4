"""Importer for ms-swift JSONL: messages with `<audio>` where the clips listed under `audios` belong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from myna.data.importers import conversations
from myna.data.importers.base import ImportContext, ImportItem, RecordError, SourceRecord
from myna.data.importers.conversations import ImportedClip, ImportedConversation, ImportedTurn
from myna.data.importers.fields import collect_extras, require_type
from myna.data.importers.reading import find_file, read_head

DESCRIPTION = "ms-swift JSONL: {messages: [{role, content with <audio>}], audios: [paths]}"

MAPPED_FIELDS = ("id", "messages", "audios", "speaker", "speaker_id", "language")
PLACEHOLDER = "<audio>"


def matches(source: Path) -> bool:
    head = read_head(source, ".json", ".jsonl")
    return '"messages"' in head and '"audios"' in head


def read(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    def parse(record: SourceRecord) -> ImportedConversation:
        sample = record.data
        record.id = str(sample.get("id") or f"{source.stem}-{record.line}")
        messages = list(conversations.read_messages(sample, str))
        names = [require_type(name, str, "audios") for name in require_type(sample.get("audios") or [], list, "audios")]
        clips = [ImportedClip(find_file(name, source.parent, Path())) for name in names]
        system = " ".join(text for role, text in messages if role == "system").strip()
        return ImportedConversation(
            id=record.id,
            turns=_place_clips(messages, clips),
            speaker=str(sample.get("speaker") or sample.get("speaker_id") or context.speaker),
            language=str(sample.get("language") or context.language),
            extras=collect_extras({k: v for k, v in sample.items() if k not in MAPPED_FIELDS} | {"system": system}),
        )

    return conversations.read_conversations(source, context, parse)


def _place_clips(messages: list[tuple[str, str]], clips: list[ImportedClip]) -> list[ImportedTurn]:
    """Turns with each clip at its placeholder. A lone clip without one is spoken in the assistant's only turn."""
    placeholders = sum(text.count(PLACEHOLDER) for _, text in messages)
    answers = [number for number, (role, _) in enumerate(messages) if role == "assistant"]
    is_transcript = len(clips) == len(answers) == 1 and PLACEHOLDER not in messages[answers[0]][1]
    if placeholders != len(clips) and not (is_transcript and placeholders == 0):
        raise RecordError("placeholder without clip", f"{placeholders} {PLACEHOLDER} for {len(clips)} clips")
    if is_transcript:
        return [ImportedTurn("assistant", [messages[answers[0]][1], *clips])]
    remaining = iter(clips)
    return [ImportedTurn(role, list(_parts(text, remaining))) for role, text in messages]


def _parts(text: str, clips: Iterator[ImportedClip]) -> Iterator[str | ImportedClip]:
    first, *others = text.split(PLACEHOLDER)
    yield first
    for other in others:
        yield next(clips)
        yield other
