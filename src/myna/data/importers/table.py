"""Importer for a CSV or TSV file with named columns."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from myna.data.importers import tabular
from myna.data.importers.base import ImportContext, ImportItem, RecordError, SourceRecord, build_utterances
from myna.data.importers.reading import read_head

DESCRIPTION = "a CSV or TSV file whose header names at least an audio and a text column"

SUFFIXES = (".csv", ".tsv")
CLIPS = "clips"
"""Where Common Voice keeps the audio its tables name."""


def matches(source: Path) -> bool:
    file = _table(source)
    return file is not None and {"audio", "text"} <= tabular.map_columns(_header(file)[1]).keys()


def read(source: Path, context: ImportContext) -> Iterator[ImportItem]:
    file = _table(source) or source
    folders = (file.parent, file.parent / CLIPS, Path())
    return build_utterances(_rows(file), lambda record: [tabular.utterance_from_row(record, context, folders)])


def _table(source: Path) -> Path | None:
    """The file itself, or the only table in a folder."""
    tables = [source] if source.is_file() else sorted(source.glob("[!.]*")) if source.is_dir() else []
    tables = [path for path in tables if path.suffix.lower() in SUFFIXES]
    return tables[0] if len(tables) == 1 else None


def _header(file: Path) -> tuple[str, list[str]]:
    """The delimiter under which the first line has most known columns, and the columns."""
    first = read_head(file).removeprefix("\ufeff").splitlines()[:1]
    splits = [(delimiter, next(_parse(iter(first), delimiter), list[str]())) for delimiter in ",\t;|"]
    return max(splits, key=lambda split: (len(tabular.map_columns(split[1])), len(split[1])))


def _rows(file: Path) -> Iterator[SourceRecord]:
    delimiter, header = _header(file)
    with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as lines:
        reader = _parse(lines, delimiter)
        try:
            next(reader, None)
        except csv.Error as error:
            yield SourceRecord(file, 1, RecordError("malformed", str(error)))
            return
        while True:
            record = SourceRecord(file, reader.line_num + 1, None)
            try:
                cells = next(reader)
                if not any(cells):
                    continue
                record.data = _row(header, cells, unquote=reader.dialect.quoting == csv.QUOTE_NONE)
            except StopIteration:
                return
            except csv.Error as error:
                record.data = RecordError("malformed", str(error))
            yield record


def _parse(lines: Iterator[str], delimiter: str) -> Any:
    """With tabs and bars, which no text holds, quotes are literal."""
    return csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE if delimiter in "\t|" else csv.QUOTE_MINIMAL)


def _row(header: list[str], cells: list[str], *, unquote: bool) -> dict[str, str] | RecordError:
    if any("\udc80" <= letter <= "\udcff" for cell in cells for letter in cell):
        return RecordError("not UTF-8")
    if len(cells) != len(header):
        return RecordError("malformed", f"{len(cells)} cells under {len(header)} columns")
    return dict(zip(header, [_unquoted(cell) for cell in cells] if unquote else cells, strict=True))


def _unquoted(cell: str) -> str:
    """A cell without the quotes that a spreadsheet puts around the whole of it."""
    inner = cell[1:-1]
    if len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inner.replace('""', ""):
        return inner.replace('""', '"')
    return cell
