"""Importer for Boson's ChatML: conversations whose messages hold texts and clips."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from myna.data.importers import conversations
from myna.data.importers.base import ImportContext, ImportItem, RecordError, SourceRecord
from myna.data.importers.conversations import ImportedClip, ImportedConversation, ImportedTurn
from myna.data.importers.fields import collect_extras, parse_span, require_type
from myna.data.importers.reading import find_file, read_head

DESCRIPTION = "boson ChatML, JSON or JSONL: {messages: [{role, content}], start_index, speaker, misc}"

MAPPED_FIELDS = ("id", "messages", "start_index", "speaker", "language", "misc")
SCENE = re.compile(r"<\|scene_desc_start\|>(.*?)<\|scene_desc_end\|>", re.DOTALL)


def matches(source: Path) -> bool:
    head = read_head(source, ".json", ".jsonl")
    return '"messages"' in head and '"audios"' not in head


def read(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    return conversations.read_conversations(source, context, lambda record: parse_conversation(record, context))


def parse_conversation(record: SourceRecord, context: ImportContext) -> ImportedConversation:
    """One sample; its id goes into the record too."""
    sample = record.data
    misc = require_type(sample.get("misc") or {}, dict, "misc")
    record.id = str(misc.get("sample_id") or sample.get("id") or f"{record.source.stem}-{record.line}")
    messages = conversations.read_messages(sample, object)
    turns = [ImportedTurn(role, list(_parts(content, context, record.source.parent))) for role, content in messages]
    extras = collect_extras({key: value for key, value in sample.items() if key not in MAPPED_FIELDS})
    extras |= collect_extras({key: value for key, value in misc.items() if key not in ("sample_id", "speaker")})
    return ImportedConversation(
        id=record.id,
        turns=turns,
        speaker=str(sample.get("speaker") or misc.get("speaker") or context.speaker),
        language=str(sample.get("language") or context.language),
        start=require_type(sample.get("start_index") or 0, int, "start_index"),
        reference_text=str(misc.get("ref_transcript") or ""),
        target_text=str(misc.get("target_transcript") or ""),
        extras=extras | _system_extras(turns),
    )


def _parts(content: Any, context: ImportContext, folder: Path) -> Iterator[str | ImportedClip]:
    match content:
        case str(text) | {"type": "text", "text": str(text)}:
            yield text
        case {"type": "audio"}:
            yield _clip(content, context, folder)
        case list():
            for part in content:
                yield from _parts(part, context, folder)
        case _:
            raise RecordError("malformed", "`content` is neither text nor audio nor a list of them")


def _clip(content: Mapping[str, Any], context: ImportContext, folder: Path) -> ImportedClip:
    span = parse_span(content.get("offset"), duration=content.get("duration"))
    url, raw = content.get("audio_url"), content.get("raw_audio")
    if url and url != "placeholder":
        path = require_type(url, str, "audio_url").removeprefix("file://")
        return ImportedClip(find_file(path, folder, Path()), span)
    if not raw:
        raise RecordError("placeholder without clip", "neither `audio_url` nor `raw_audio`")
    try:
        data = base64.b64decode(require_type(raw, str, "raw_audio"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError("unreadable audio", f"`raw_audio` is not base64: {error}") from None
    return ImportedClip(context.save_embedded_audio(data), span)


def _system_extras(turns: list[ImportedTurn]) -> dict[str, str]:
    """The scene, and the rest of the system message."""
    parts = (part for turn in turns if turn.role == "system" for part in turn.parts)
    text = "".join(part for part in parts if isinstance(part, str))
    scene = SCENE.search(text)
    extras = {"system": SCENE.sub("", text).strip(), "scene": scene[1].strip() if scene else ""}
    return {key: value for key, value in extras.items() if value}
