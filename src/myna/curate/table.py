"""Curation tables: the rows of all parts of all recordings in one, and the check that they tile each recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from myna.core.errors import DataError
from myna.core.io import atomic_write, fsync
from myna.curate.recordings import DecodedRecording, RecordingFile
from myna.curate.refine import Part, segment_id
from myna.data.segments import SCHEMA, TABLE_FILE, empty_row

ROW_GROUP_ROWS = 100_000

Recordings = Sequence[tuple[RecordingFile, DecodedRecording]]


def find_copies(recordings: Recordings) -> dict[str, str]:
    """Recordings whose samples are those of an earlier one, by name, with the name of that one."""
    first: dict[str, str] = {}
    copies = {}
    for file, decoded in recordings:
        if decoded.recording_hash and first.setdefault(decoded.recording_hash, file.name) != file.name:
            copies[file.name] = first[decoded.recording_hash]
    return copies


def assemble_table(
    recordings: Recordings, parts: Mapping[str, Sequence[Part]], findings: Mapping[str, Path]
) -> pa.Table:
    """All rows, sorted by recording and start. `parts` are by recording name, `findings` the files of parts by id."""
    copies = find_copies(recordings)
    tables = [SCHEMA.empty_table()]
    for file, decoded in sorted(recordings, key=lambda pair: pair[0].name):
        done = 0
        if file.name in copies:
            row = _whole_row(file, decoded, 0, decoded.duration_ms, "duplicate")
            tables.append(_rows([row | {"duplicate_of": copies[file.name]}]))
            continue
        for part in parts.get(file.name, ()):
            table = pq.read_table(findings[part.id], schema=SCHEMA)
            name = pa.array([file.name] * len(table), pa.string())
            tables.append(table.set_column(SCHEMA.get_field_index("recording"), "recording", name))
            done = part.end_ms
        if done < decoded.duration_ms or not decoded.duration_ms:
            tables.append(_rows([_whole_row(file, decoded, done, decoded.duration_ms, "unreadable")]))
    table = pa.concat_tables(tables).combine_chunks()
    check_tiling(table, {file.name: decoded.duration_ms for file, decoded in recordings})
    return table


def _whole_row(file: RecordingFile, decoded: DecodedRecording, start: int, end: int, reason: str) -> dict[str, Any]:
    """A stretch of a recording that was not listened to."""
    return empty_row() | {
        "id": segment_id(decoded.recording_hash or decoded.file_hash, start, end)
        if reason == "unreadable"
        else segment_id(decoded.file_hash, start, end),
        "recording": file.name,
        "recording_hash": decoded.recording_hash,
        "start_ms": start,
        "end_ms": end,
        "kind": "gap",
        "status": "dropped",
        "reason": reason,
    }


def _rows(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, SCHEMA)


def check_tiling(table: pa.Table, durations: Mapping[str, int]) -> None:
    """Every millisecond of every recording is in exactly one row; an error is a bug of ours, or a damaged file."""
    names = table["recording"].to_numpy(zero_copy_only=False)
    starts, ends = table["start_ms"].to_numpy(), table["end_ms"].to_numpy()
    first = np.flatnonzero(np.r_[True, names[1:] != names[:-1]]) if len(names) else np.empty(0, np.int64)
    last = np.r_[first[1:] - 1, len(names) - 1] if len(names) else first
    joined = np.ones(len(names), np.bool_)
    joined[1:] = starts[1:] == ends[:-1]
    joined[first] = starts[first] == 0
    found = dict(zip(names[first], ends[last].tolist(), strict=True))
    if not joined.all() or (ends < starts).any() or found != dict(durations) or len(found) != len(first):
        wrong = (
            names[np.flatnonzero(~joined)[0]]
            if not joined.all()
            else sorted(set(found.items()) ^ set(durations.items()))
        )
        raise DataError(
            f"the segments do not tile their recordings: {wrong}",
            hint="this is a bug, or a file in parts/ is damaged: delete DIR/parts and curate again",
        )


def write_segments(folder: Path, table: pa.Table) -> None:
    with atomic_write(folder / TABLE_FILE) as temporary:
        pq.write_table(table, temporary, compression="zstd", row_group_size=ROW_GROUP_ROWS)
        fsync(temporary)


def set_columns(table: pa.Table, columns: Mapping[str, Any]) -> pa.Table:
    """The table with these columns replaced."""
    for name, values in columns.items():
        column = SCHEMA.field(name)
        array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, column.type)
        table = table.set_column(table.schema.get_field_index(name), column, array)
    return table
