"""Importer for Myna's own manifest: `manifest.jsonl`, or the folder that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from myna.data.importers.base import ImportContext, ImportItem, RecordError, SourceRecord, build_utterances
from myna.data.importers.reading import index_file, json_records, read_head
from myna.data.manifest import SpanError, parse_manifest_line
from myna.data.pronunciation import scored_jsonl
from myna.data.utterance import Utterance

DESCRIPTION = "Myna's own manifest.jsonl"


def matches(source: Path) -> bool:
    file = index_file(source, "manifest.jsonl")
    first = read_head(file, ".jsonl").partition("\n")[0]
    is_manifest = all(f'"{key}"' in first for key in ("id", "audio", "text"))
    return is_manifest and '"messages"' not in first and not scored_jsonl.matches(file)


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

    return build_utterances(json_records(index_file(source, "manifest.jsonl")), make)
