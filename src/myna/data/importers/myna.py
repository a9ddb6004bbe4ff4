"""Our own manifest: `manifest.jsonl`, or the folder that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from myna.data.importers import assessed
from myna.data.importers.base import Bad, Context, Found, Record, Rejected, build
from myna.data.importers.reading import head, json_records
from myna.data.manifest import SpanError, parse_line
from myna.data.utterance import Utterance

DESCRIPTION = "Myna's own manifest.jsonl"


def matches(source: Path) -> bool:
    file = _manifest(source)
    if not file.is_file() or file.suffix != ".jsonl":
        return False
    first = head(file).partition("\n")[0]
    if '"messages"' in first or assessed.matches(file):
        return False
    return all(f'"{key}"' in first for key in ("id", "audio", "text"))


def read(source: Path, context: Context) -> Iterator[Found | Rejected]:
    def make(record: Record) -> Iterator[Utterance]:
        record.id = str(record.data["id"]) if "id" in record.data else None
        known = {"speaker": context.speaker, "language": context.language}
        try:
            yield parse_line(known | record.data, record.source.parent)
        except SpanError as error:
            raise Bad("bad span", str(error)) from None
        except ValueError as error:
            raise Bad("malformed", str(error)) from None

    return build(json_records(_manifest(source)), make)


def _manifest(source: Path) -> Path:
    return source / "manifest.jsonl" if source.is_dir() else source
