"""Importer for Myna's own manifest: `manifest.jsonl`, or the folder that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from myna.data.importers.base import ImportContext, ImportItem, RecordError, SourceRecord, build_utterances
from myna.data.importers.reading import json_records, read_head
from myna.data.manifest import SpanError, parse_manifest_line
from myna.data.pronunciation import scored_jsonl
from myna.data.utterance import Utterance

DESCRIPTION = "Myna's own manifest.jsonl"


def matches(source: Path) -> bool:
    file = _manifest(source)
    if not file.is_file() or file.suffix != ".jsonl":
        return False
    first = read_head(file).partition("\n")[0]
    if '"messages"' in first or scored_jsonl.matches(file):
        return False
    return all(f'"{key}"' in first for key in ("id", "audio", "text"))


def read(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    def make(record: SourceRecord) -> Iterator[Utterance]:
        record.id = str(record.data["id"]) if "id" in record.data else None
        defaults = {"speaker": context.speaker, "language": context.language}
        try:
            yield parse_manifest_line(defaults | record.data, record.source.parent)
        except SpanError as error:
            raise RecordError("bad span", str(error)) from None
        except ValueError as error:
            raise RecordError("malformed", str(error)) from None

    return build_utterances(json_records(_manifest(source)), make)


def _manifest(source: Path) -> Path:
    return source / "manifest.jsonl" if source.is_dir() else source
