"""Rows on the disk, a Parquet file for each system: whatever was heard is not heard again.

OUT/sounds/SYSTEM/LINE.flac   what was said
OUT/lines/SYSTEM.parquet      a row for each line, kept up to date while work goes on
OUT/lines.parquet             all of them, when all is done
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq

from myna.errors import DataError
from myna.evaluate.scoring import ROW_FIELDS, ItemScores, as_json
from myna.io import bytes_hash, replacing

_TYPES = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


def _arrow(hint: Any) -> Any:
    plain = next(kind for kind in (get_args(hint) or (hint,)) if kind is not type(None))
    return _TYPES[plain]


SCHEMA = pa.schema([(name, _arrow(hint)) for name, hint in get_type_hints(ItemScores).items()])


class Results:
    """The rows of one system, by line."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: dict[str, ItemScores] = {row.id: row for row in read_rows(file)} if file.is_file() else {}

    @classmethod
    def of(cls, out: Path, system: str) -> Results:
        return cls(out / "lines" / f"{file_name(system)}.parquet")

    def save(self) -> None:
        write_rows(self.file, self.rows.values())


def write_rows(file: Path, rows: Iterable[ItemScores]) -> None:
    """Whole or not at all."""
    with replacing(file) as temporary:
        pq.write_table(pa.Table.from_pylist([as_json(row) for row in rows], SCHEMA), temporary)


def read_rows(file: Path) -> list[ItemScores]:
    """Rows as they were written. Columns that did not exist then are as if nobody had heard them yet."""
    try:
        lines = pq.read_table(file).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{file} cannot be read: {error}", hint="delete it; its lines are then heard again") from None
    try:
        return [ItemScores(**{name: value for name, value in line.items() if name in ROW_FIELDS}) for line in lines]
    except TypeError as error:
        raise DataError(f"{file} holds no results of an evaluation: {error}", hint="choose another --out") from None


def file_name(name: str) -> str:
    """A name that any disk takes. Names that would become the same keep apart by their hash."""
    plain = re.sub(r"[^\w.-]+", "_", name).strip("._")[:80]
    return plain if plain == name else f"{plain}-{bytes_hash(name.encode())[:8]}"
