"""Records with named columns, as tables and Hugging Face datasets have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from myna.data.importers.base import ImportContext, RecordError, SourceRecord
from myna.data.importers.fields import collect_extras, parse_span
from myna.data.importers.reading import find_file
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
"""Column names of each field, the likeliest first."""


def map_columns(columns: Iterable[str]) -> dict[str, str]:
    """The column that holds each field."""
    present = {column.strip().lower(): column for column in columns}
    return {field: present[name] for field, names in COLUMNS.items() for name in names[::-1] if name in present}


def utterance_from_row(record: SourceRecord, context: ImportContext, folders: Iterable[Path]) -> Utterance:
    """A record with columns as an utterance; columns without a field become extras."""
    row: Mapping[str, Any] = record.data
    columns = {field: column for field, column in map_columns(row).items() if row[column] not in (None, "")}
    embedded = [column for column, item in row.items() if isinstance(item, dict) and "bytes" in item]
    if embedded and columns.get("audio") not in embedded:
        columns["audio"] = embedded[0]
    if "start" not in columns or "end" in columns:  # then the duration is only information
        columns.pop("duration", None)
    value = {field: row[column] for field, column in columns.items()}
    record.id = str(value["id"]) if "id" in value else None
    span = parse_span(value.get("start"), value.get("end"), value.get("duration"))
    audio, name = _audio(value.get("audio"), context, folders)
    record.id = record.id or name + (f"@{span.start:g}" if span else "")
    defaults = {"text": "", "speaker": context.speaker, "language": context.language}
    text, speaker, language = (str(value.get(field, default)) for field, default in defaults.items())
    extras = collect_extras({key: item for key, item in row.items() if key not in columns.values()})
    return Utterance(record.id, audio, text, speaker, language, span, extras)


def _audio(value: Any, context: ImportContext, folders: Iterable[Path]) -> tuple[Path, str]:
    """The file, and an id for the clip if it has no other."""
    match value:
        case {"bytes": bytes(data), **rest}:
            path = context.save_embedded_audio(data)
            return path, _name(str(rest.get("path") or path))
        case bytes(data):
            path = context.save_embedded_audio(data)
            return path, path.stem
        case {"path": str(name)} | str(name):
            return find_file(name, *folders), _name(name)
        case _:
            raise RecordError("missing file", "the row names no audio")


def _name(audio: str) -> str:
    path = Path(audio)
    return path.stem if path.is_absolute() else (path.parent / path.stem).as_posix()
