"""Rows of named columns, as tables and datasets have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from myna.data.importers.base import Bad, Context, Record
from myna.data.importers.fields import extras, stretch
from myna.data.importers.reading import locate
from myna.data.utterance import Utterance

COLUMNS = {
    "audio": ("audio", "audio_file", "audio_path", "path", "file", "file_name", "filename", "wav"),
    "text": ("text", "transcript", "transcription", "sentence"),
    "speaker": ("speaker", "speaker_id", "client_id"),
    "language": ("language", "lang", "locale"),
    "id": ("id",),
    "start": ("start", "offset"),
    "end": ("end",),
    "duration": ("duration",),
}
"""Names under which a field is known, the likeliest first."""


def named(columns: Iterable[str]) -> dict[str, str]:
    """Which column holds which field."""
    known = {column.strip().lower(): column for column in columns}
    return {field: known[name] for field, names in COLUMNS.items() for name in names[::-1] if name in known}


def is_known(columns: Iterable[str]) -> bool:
    return {"audio", "text"} <= set(named(columns))


def utterance(record: Record, context: Context, folders: Iterable[Path]) -> Utterance:
    """The row as an utterance; columns we have no field for become extras."""
    row: Mapping[str, Any] = record.data
    columns = {field: column for field, column in named(row).items() if row[column] not in (None, "")}
    embedded = [column for column, item in row.items() if isinstance(item, dict) and "bytes" in item]
    if embedded and columns.get("audio") not in embedded:
        columns["audio"] = embedded[0]
    if "start" not in columns or "end" in columns:  # then the duration only describes
        columns.pop("duration", None)
    value = {field: row[column] for field, column in columns.items()}
    record.id = str(value["id"]) if "id" in value else None
    span = stretch(value.get("start"), value.get("end"), value.get("duration"))
    audio, name = _audio(value.get("audio"), context, folders)
    record.id = record.id or name + (f"@{span.start:g}" if span else "")
    return Utterance(
        id=record.id,
        audio=audio,
        text=str(value.get("text", "")),
        speaker=str(value.get("speaker", context.speaker)),
        language=str(value.get("language", context.language)),
        span=span,
        extras=extras({key: item for key, item in row.items() if key not in columns.values()}),
    )


def _audio(value: Any, context: Context, folders: Iterable[Path]) -> tuple[Path, str]:
    """The file, and what to call the clip where nothing else does."""
    match value:
        case {"bytes": bytes(data), **rest}:
            path = context.keep(data)
            return path, _name(str(rest.get("path") or path))
        case bytes(data):
            path = context.keep(data)
            return path, path.stem
        case {"path": str(name)} | str(name):
            return locate(name, *folders), _name(name)
        case _:
            raise Bad("missing file", "the row names no audio")


def _name(audio: str) -> str:
    path = Path(audio)
    return path.stem if path.is_absolute() else (path.parent / path.stem).as_posix()
