"""Scores on disk, a Parquet file for each system, so that nothing is generated or scored twice.

OUT/audio/SYSTEM/ITEM.flac    generated audio
OUT/audio/SYSTEM/ITEM+reference.flac  the clip that set its voice (-0, -1 for several), of `myna evaluate` and `compare`
OUT/items/SYSTEM.parquet      a row for each item, kept up to date during the evaluation
OUT/items.parquet             all of them, at the end
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq

from myna.core.errors import DataError
from myna.core.io import atomic_write, safe_file_name
from myna.evaluate.scoring import ItemScores

ITEMS_FILE, ITEMS_FOLDER, AUDIO_FOLDER = "items.parquet", "items", "audio"
_TYPES = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


def _arrow_type(hint: Any) -> Any:
    return _TYPES[next(kind for kind in (get_args(hint) or (hint,)) if kind is not type(None))]


SCHEMA = pa.schema([(name, _arrow_type(hint)) for name, hint in get_type_hints(ItemScores).items()])


class ItemScoresFile:
    """The rows of one system, by item."""

    def __init__(self, out: Path, system: str) -> None:
        self.path = out / ITEMS_FOLDER / f"{safe_file_name(system)}.parquet"
        self.rows = {row.id: row for row in read_item_scores(self.path)} if self.path.is_file() else {}

    def save(self) -> None:
        write_item_scores(self.path, self.rows.values())


def write_item_scores(file: Path, rows: Iterable[ItemScores]) -> None:
    """Written whole or not at all."""
    with atomic_write(file) as temporary:
        pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows], SCHEMA), temporary)


def read_item_scores(file: Path) -> list[ItemScores]:
    """Rows as they were written. Columns that did not exist then count as not scored yet."""
    try:
        rows = pq.read_table(file).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{file} cannot be read: {error}", hint="delete it; its items are then scored again") from None
    try:
        return [ItemScores(**{name: value for name, value in row.items() if name in SCHEMA.names}) for row in rows]
    except TypeError as error:
        raise DataError(f"{file} holds no results of an evaluation: {error}", hint="choose another --out") from None


def audio_path(system: str, item: str) -> str:
    """Of an item's audio, inside the results folder."""
    return f"{AUDIO_FOLDER}/{safe_file_name(system)}/{safe_file_name(item)}.flac"


def reference_paths(audio: str, count: int) -> list[str]:
    """Of the references that an item's audio was spoken with, beside it: `+` is in no item's name."""
    stem = audio.removesuffix(".flac")
    numbers = [""] if count == 1 else [f"-{number}" for number in range(count)]
    return [f"{stem}+reference{number}.flac" for number in numbers]


def saved_references(audio: Path) -> list[Path]:
    """The references beside an item's audio."""
    return sorted(audio.parent.glob(f"{audio.stem}+reference*.flac"))


def step_folder(step: int) -> str:
    """Of the speech evaluation of a training step, inside RUN/speech_eval."""
    return f"step-{step:06d}"
