"""ms-swift JSONL: messages with `<audio>` where the clips listed under `audios` belong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from myna.data.importers import conversations
from myna.data.importers.base import Bad, Context, Found, Record, Rejected, build
from myna.data.importers.conversations import ImportedClip, ImportedTurn
from myna.data.importers.fields import extras, required, typed
from myna.data.importers.reading import head, json_records, locate
from myna.data.utterance import Utterance

DESCRIPTION = "ms-swift JSONL: {messages: [{role, content with <audio>}], audios: [paths]}"

OURS = ("id", "messages", "audios", "speaker", "speaker_id", "language")
PLACEHOLDER = "<audio>"


def matches(source: Path) -> bool:
    if source.suffix not in (".json", ".jsonl") or not source.is_file():
        return False
    start = head(source)
    return '"messages"' in start and '"audios"' in start


def read(source: Path, context: Context) -> Iterator[Found | Rejected]:
    def make(record: Record) -> Iterator[Utterance]:
        sample = record.data
        record.id = str(sample.get("id") or f"{source.stem}-{record.line}")
        messages = [_message(message) for message in required(sample, "messages", list)]
        names = [typed(name, str, "audios") for name in typed(sample.get("audios") or [], list, "audios")]
        clips = [ImportedClip(locate(name, source.parent, Path())) for name in names]
        conversation = _placed(messages, clips)
        system = " ".join(text for role, text in messages if role == "system").strip()
        return conversations.utterances(
            conversations.ImportedConversation(
                id=record.id,
                turns=conversation,
                speaker=str(sample.get("speaker") or sample.get("speaker_id") or context.speaker),
                language=str(sample.get("language") or context.language),
                extras=extras({key: value for key, value in sample.items() if key not in OURS} | {"system": system}),
            ),
            context,
        )

    return build(json_records(source), make)


def _message(message: Any) -> tuple[str, str]:
    message = typed(message, dict, "messages")
    return required(message, "role", str), required(message, "content", str)


def _placed(messages: list[tuple[str, str]], clips: list[ImportedClip]) -> list[ImportedTurn]:
    """Each clip at its placeholder. A lone one outside the assistant's only turn is what that turn transcribes."""
    placeholders = sum(text.count(PLACEHOLDER) for _, text in messages)
    answers = [number for number, (role, _) in enumerate(messages) if role == "assistant"]
    transcribed = len(clips) == len(answers) == 1 and PLACEHOLDER not in messages[answers[0]][1]
    if placeholders != len(clips) and not (transcribed and placeholders == 0):
        raise Bad("placeholder without clip", f"{placeholders} {PLACEHOLDER} for {len(clips)} clips")
    if transcribed:
        return [ImportedTurn("assistant", [messages[answers[0]][1], *clips])]
    left = iter(clips)
    return [ImportedTurn(role, list(_parts(text, left))) for role, text in messages]


def _parts(text: str, clips: Iterator[ImportedClip]) -> Iterator[str | ImportedClip]:
    first, *others = text.split(PLACEHOLDER)
    yield first
    for other in others:
        yield next(clips)
        yield other
