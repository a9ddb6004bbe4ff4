"""Table of segments (`segments.parquet`) of a curated folder: its columns, and moving the edges of clips.

The segments of a recording tile it: every millisecond is in exactly one row. A row has every raw measure beside the
decision. Rows are sorted by recording and start.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

DropReason = Literal[
    "unreadable", "duplicate", "no speech", "music", "too short", "no silent cut", "too long", "overlap",
    "mixed speakers", "other speaker", "clipped", "narrow band", "noisy", "low quality", "wrong language",
    "doubtful text", "pace", "dropped by hand",
]  # fmt: skip
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)
RECOGNITION_MEASURES = (
    "avg_log_prob", "compression_ratio", "cer", "edge_cer", "characters_per_second", "unique_word_share",
)  # fmt: skip
"""Measures of a recognised text. They do not apply to a text that a person gave."""
MEASURES = (
    "language_probability", *RECOGNITION_MEASURES, "overlap_share", "music_share", "snr_db", "gap_snr_db",
    "bandwidth_hz", "clipped_share", "dnsmos_ovrl", "dnsmos_bak", "dnsmos_sig", "loudness_lufs", "peak_dbfs",
    "speaker_similarity", "start_speaker_similarity", "end_speaker_similarity", "start_gap_ms", "end_gap_ms",
)  # fmt: skip
"""Numeric columns that decisions are made by; NaN if a measure could not be made."""
SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # of recording hash, start and end: the same segment has the same id in every run
        ("recording", pa.string()),  # path relative to the source folder, with / between names
        ("recording_hash", pa.string()),  # SHA-256 of the decoded 16-bit PCM; empty where nothing could be decoded
        ("part", pa.string()),  # id of the part that it was found in; empty for what was never listened to
        ("start_ms", pa.int64()),
        ("end_ms", pa.int64()),
        ("kind", pa.string()),  # clip: speech that may become an utterance; gap: everything between clips
        ("audio", pa.string()),  # FLAC within the folder that holds the segment: a part's
        ("audio_start_ms", pa.int64()),  # where the segment begins in it
        ("clip", pa.string()),  # FLAC of the kept clip, loudness adjusted; empty unless kept
        ("speaker", pa.string()),  # after linking over all recordings
        ("local_speaker", pa.string()),  # within the part
        ("text", pa.string()),
        ("text_source", pa.string()),  # recognised, script, corrected, or empty
        ("normalised_text", pa.string()),  # as it is read aloud: numbers and abbreviations in words
        ("check_text", pa.string()),  # second transcription, of the clip alone
        ("language", pa.string()),
        *((name, pa.float32()) for name in MEASURES),
        ("gain_db", pa.float32()),  # applied to the kept clip; one for each speaker and recording
        ("embedding", pa.list_(pa.float32())),
        ("fingerprint", pa.binary()),
        ("duplicate_of", pa.string()),  # id of the segment, or the recording, that it repeats; else empty
        ("split", pa.string()),  # of kept clips: a subset of data/split.py
        ("status", pa.string()),  # kept or dropped
        ("reason", pa.string()),  # why it was dropped; empty where kept
    ]
)
TABLE_FILE = "segments.parquet"
SETTINGS_FILE = "curate.yaml"
"""File beside the table with the settings it was decided with."""


def empty_row() -> dict[str, Any]:
    """Return an empty row: empty strings and lists, NaN for measures."""
    empty = {"string": "", "float": math.nan, "int64": 0, "binary": b""}
    return {column.name: empty.get(str(column.type), []) for column in SCHEMA}


def values_of(table: pa.Table, name: str) -> npt.NDArray[Any]:
    """Return a column as an array."""
    values: npt.NDArray[Any] = table[name].to_numpy(zero_copy_only=False)
    return values


def codes_of(table: pa.Table, name: str) -> npt.NDArray[Any]:
    """Return for each row the number of its value among the different values of a column."""
    codes: npt.NDArray[Any] = table[name].combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    return codes


def lengths_ms(table: pa.Table) -> npt.NDArray[np.int64]:
    """Return the milliseconds of each row."""
    return np.asarray(values_of(table, "end_ms") - values_of(table, "start_ms"), np.int64)


def set_columns(table: pa.Table, columns: Mapping[str, Any]) -> pa.Table:
    """Return the table with these columns replaced; values are converted to the column's type."""
    for name, values in columns.items():
        field = table.schema.field(name)
        array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, field.type)
        table = table.set_column(table.schema.get_field_index(name), field, array)
    return table


# Edges of clips

EdgeTimes = tuple[int | None, int | None]
"""Start and end of a clip in milliseconds; None leaves an edge."""


def move_edges(table: pa.Table, moves: Sequence[tuple[int, EdgeTimes]], notify: Callable[[str], None]) -> pa.Table:
    """Move the edges of clips: a clip grows into the gaps beside it and leaves gaps where it shrinks; other clips never
    change.

    `moves` are rows and times, in the order they were made. An edge that cannot be moved that far stays, and `notify`
    is told.
    """
    places = list(zip(table["recording"].to_pylist(), table["audio"].to_pylist(), strict=True))
    by_place: dict[tuple[str, str], list[tuple[str, EdgeTimes]]] = {}
    for row, times in moves:
        by_place.setdefault(places[row], []).append((table["id"][row].as_py(), times))
    pieces, done = [], 0
    for place, rows in groupby(range(len(places)), key=places.__getitem__):
        if place in by_place:
            first, *others = rows
            pieces.append(table.slice(done, first - done))
            done = first + 1 + len(others)
            lines = table.slice(first, done - first).to_pylist()
            _move_clips(lines, by_place[place], notify)
            pieces.append(pa.Table.from_pylist(lines, schema=table.schema))
    return pa.concat_tables([*pieces, table.slice(done)])


def _move_clips(
    lines: list[dict[str, Any]], moves: Sequence[tuple[str, EdgeTimes]], notify: Callable[[str], None]
) -> None:
    """Move clips, given by id, in the rows of one piece of audio."""
    wanted: dict[str, EdgeTimes] = {}
    for id, (start, end) in moves:
        _move_clip(lines, id, start, end)
        last = wanted.get(id, (None, None))
        wanted[id] = (last[0] if start is None else start, last[1] if end is None else end)
    for id, (start, end) in wanted.items():
        at, first, last_row = _room(lines, id)
        clip = lines[at]
        if start not in (None, clip["start_ms"]) or end not in (None, clip["end_ms"]):
            low, high = lines[first]["start_ms"], lines[last_row]["end_ms"]
            room = f"it can lie between {low} and {high} ms, where other clips begin"
            notify(f"{id} stays at {clip['start_ms']} to {clip['end_ms']} ms: {room}")


def _room(lines: list[dict[str, Any]], id: str) -> tuple[int, int, int]:
    """Return the position of a clip, and of the first and the last row that it may grow into."""
    at = next(position for position, line in enumerate(lines) if line["id"] == id)
    has_gap = [0 <= near < len(lines) and lines[near]["kind"] == "gap" for near in (at - 1, at + 1)]
    return at, at - has_gap[0], at + has_gap[1]


def _move_clip(lines: list[dict[str, Any]], id: str, new_start: int | None, new_end: int | None) -> None:
    at, first, last = _room(lines, id)
    clip, low, high = lines[at], lines[first]["start_ms"], lines[last]["end_ms"]
    start = clip["start_ms"] if new_start is None else new_start
    end = clip["end_ms"] if new_end is None else new_end
    if not low <= start < end <= high:
        return
    kept = {key: clip[key] for key in ("recording", "recording_hash", "part", "audio", "start_ms", "audio_start_ms")}
    gap = empty_row() | kept | {"kind": "gap", "status": "dropped", "reason": "no speech"}
    before = lines[first] if first < at else gap | {"id": f"{id}-before"}
    after = lines[last] if last > at else gap | {"id": f"{id}-after"}
    moved = ((before, low, start), (clip, start, end), (after, end, high))
    lines[first : last + 1] = [
        line | {"start_ms": a, "end_ms": b, "audio_start_ms": line["audio_start_ms"] + a - line["start_ms"]}
        for line, a, b in moved
        if a < b
    ]
