"""Boson's ChatML: conversations whose messages hold texts and clips."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from myna.data.importers import conversations, ms_swift
from myna.data.importers.base import Bad, Context, Found, Record, Rejected, build
from myna.data.importers.conversations import ImportedClip, ImportedTurn
from myna.data.importers.fields import extras, required, stretch, typed
from myna.data.importers.reading import head, json_records, locate
from myna.data.utterance import Utterance

DESCRIPTION = "boson ChatML, JSON or JSONL: {messages: [{role, content}], start_index, speaker, misc}"

OURS = ("id", "messages", "start_index", "speaker", "language", "misc")
SCENE = re.compile(r"<\|scene_desc_start\|>(.*?)<\|scene_desc_end\|>", re.DOTALL)


def matches(source: Path) -> bool:
    if source.suffix not in (".json", ".jsonl") or not source.is_file():
        return False
    return '"messages"' in head(source) and not ms_swift.matches(source)


def read(source: Path, context: Context) -> Iterator[Found | Rejected]:
    def make(record: Record) -> Iterator[Utterance]:
        sample = record.data
        misc = typed(sample.get("misc") or {}, dict, "misc")
        record.id = str(misc.get("sample_id") or sample.get("id") or f"{source.stem}-{record.line}")
        conversation = [_turn(message, context, source.parent) for message in required(sample, "messages", list)]
        kept = extras({key: value for key, value in sample.items() if key not in OURS})
        kept |= extras({key: value for key, value in misc.items() if key not in ("sample_id", "speaker")})
        return conversations.utterances(
            conversations.ImportedConversation(
                id=record.id,
                turns=conversation,
                speaker=str(sample.get("speaker") or misc.get("speaker") or context.speaker),
                language=str(sample.get("language") or context.language),
                start=typed(sample.get("start_index") or 0, int, "start_index"),
                reference_text=str(misc.get("ref_transcript") or ""),
                target_text=str(misc.get("target_transcript") or ""),
                extras=kept | _system(conversation),
            ),
            context,
        )

    return build(json_records(source), make)


def _turn(message: Any, context: Context, folder: Path) -> ImportedTurn:
    message = typed(message, dict, "messages")
    role = required(message, "role", str)
    return ImportedTurn(role, list(_parts(required(message, "content", object), context, folder)))


def _parts(content: Any, context: Context, folder: Path) -> Iterator[str | ImportedClip]:
    match content:
        case str(text) | {"type": "text", "text": str(text)}:
            yield text
        case {"type": "audio"}:
            yield _clip(content, context, folder)
        case list():
            for part in content:
                yield from _parts(part, context, folder)
        case _:
            raise Bad("malformed", "`content` is neither text nor audio nor a list of them")


def _clip(content: Mapping[str, Any], context: Context, folder: Path) -> ImportedClip:
    span = stretch(content.get("offset"), duration=content.get("duration"))
    url, raw = content.get("audio_url"), content.get("raw_audio")
    if url and url != "placeholder":
        return ImportedClip(locate(typed(url, str, "audio_url").removeprefix("file://"), folder, Path()), span)
    if not raw:
        raise Bad("placeholder without clip", "neither `audio_url` nor `raw_audio`")
    try:
        return ImportedClip(context.keep(base64.b64decode(typed(raw, str, "raw_audio"), validate=True)), span)
    except (binascii.Error, ValueError) as error:
        raise Bad("unreadable audio", f"`raw_audio` is not base64: {error}") from None


def _system(conversation: list[ImportedTurn]) -> dict[str, str]:
    """The scene, and what else the system message says."""
    text = "".join(
        part for turn in conversation if turn.role == "system" for part in turn.parts if isinstance(part, str)
    )
    scene = SCENE.search(text)
    parts = {"system": SCENE.sub("", text).strip(), "scene": scene[1].strip() if scene else ""}
    return {key: value for key, value in parts.items() if value}
