"""Curation tables for tests: recordings tiled by clips and gaps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from myna.data.segments import SCHEMA, empty_row


def segment(id: str, recording: str, start_ms: int, end_ms: int, kind: str = "clip", **values: Any) -> dict[str, Any]:
    """Make a row; missing fields are empty, missing measures NaN."""
    row = empty_row()
    row |= {"id": id, "recording": recording, "recording_hash": f"hash of {recording}", "part": f"part of {recording}"}
    row |= {"start_ms": start_ms, "end_ms": end_ms, "kind": kind}
    row |= {"audio": f"parts/{recording}.flac", "audio_start_ms": start_ms}
    row |= {"status": "kept", "reason": ""} if kind == "clip" else {"status": "dropped", "reason": "no speech"}
    return row | values


def segments_table(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)
