"""Table of segments (`segments.parquet`) of a curated folder: its columns, and moving the edges of clips.

The segments of a recording tile it: every millisecond is in exactly one row. A row has every raw measure beside the
decision. Rows are sorted by recording and start.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class _Segment:
    row: int
    start: int
    end: int
    is_gap: bool
    new_id: str = ""


def move_edges(
    table: pa.Table, moves: Sequence[tuple[int, int | None, int | None]], notify: Callable[[str], None]
) -> pa.Table:
    """Move the edges of clips: a clip grows into the gaps beside it and leaves gaps where it shrinks; other clips never
    change.

    `moves` are row, start and end in milliseconds, in the order they were made; None leaves an edge. An edge that
    cannot be moved that far stays, and `notify` is told.
    """
    places = list(zip(table["recording"].to_pylist(), table["audio"].to_pylist(), strict=True))
    times = zip(table["start_ms"].to_pylist(), table["end_ms"].to_pylist(), table["kind"].to_pylist(), strict=True)
    segments: dict[tuple[str, str], list[_Segment]] = {places[row]: [] for row, *_ in moves}
    for row, (place, (start, end, kind)) in enumerate(zip(places, times, strict=True)):
        if place in segments:
            segments[place].append(_Segment(row, start, end, kind == "gap"))
    before = {one.row: [one] for place in segments.values() for one in place}
    wanted: dict[int, tuple[int | None, int | None]] = {}
    for row, start, end in moves:
        _move(segments[places[row]], row, start, end)
        last = wanted.get(row, (None, None))
        wanted[row] = (last[0] if start is None else start, last[1] if end is None else end)
    after: dict[int, list[_Segment]] = {row: [] for row in before}
    for one in (one for place in segments.values() for one in place):
        after[one.row].append(one)
    for row, edges in wanted.items():
        [clip] = [one for one in after[row] if not one.new_id]
        if edges[0] not in (None, clip.start) or edges[1] not in (None, clip.end):
            low, high = _room(segments[places[row]], row)
            room = f"it can lie between {low} and {high} ms, where other clips begin"
            notify(f"{table['id'][row].as_py()} stays at {clip.start} to {clip.end} ms: {room}")
    return _rebuild(table, {row: of for row, of in after.items() if of != before[row]})


def _room(segments: Sequence[_Segment], row: int) -> tuple[int, int]:
    """Return the earliest start and the latest end that a clip can be given."""
    at = next(n for n, one in enumerate(segments) if one.row == row and not one.new_id)
    first = at - 1 if at and segments[at - 1].is_gap else at
    last = at + 1 if segments[at + 1 : at + 2] and segments[at + 1].is_gap else at
    return segments[first].start, segments[last].end


def _move(segments: list[_Segment], row: int, new_start: int | None, new_end: int | None) -> None:
    at = next(n for n, one in enumerate(segments) if one.row == row and not one.new_id)
    clip, (low, high) = segments[at], _room(segments, row)
    start = clip.start if new_start is None else new_start
    end = clip.end if new_end is None else new_end
    if not low <= start < end <= high:
        return
    first, last = at - (low < clip.start), at + (high > clip.end)
    before = segments[first] if first < at else _Segment(row, low, start, True, "before")
    after = segments[last] if last > at else _Segment(row, end, high, True, "after")
    moved = (replace(before, end=start), replace(clip, start=start, end=end), replace(after, start=end))
    segments[first : last + 1] = [one for one in moved if one.start < one.end]


def _rebuild(table: pa.Table, segments: dict[int, list[_Segment]]) -> pa.Table:
    """Replace the rows of `segments` in the table; a new gap has only its position."""
    pieces, done = [], 0
    for row in sorted(segments):
        pieces.append(table.slice(done, row - done))
        [line] = table.slice(row, 1).to_pylist()
        kept = {key: line[key] for key in ("recording", "recording_hash", "part", "audio")}
        gap = empty_row() | kept | {"kind": "gap", "status": "dropped", "reason": "no speech"}
        lines = [
            (gap | {"id": f"{line['id']}-{one.new_id}"} if one.new_id else line)
            | {"start_ms": one.start, "end_ms": one.end}
            | {"audio_start_ms": line["audio_start_ms"] + one.start - line["start_ms"]}
            for one in segments[row]
        ]
        pieces.append(pa.Table.from_pylist(lines, schema=table.schema))
        done = row + 1
    return pa.concat_tables([*pieces, table.slice(done)])
