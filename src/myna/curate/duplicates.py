"""Near-duplicates among the clips of a table, by their fingerprints: the same sound again, shifted or compressed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from myna.curate.table import set_columns
from myna.listen.fingerprints import find_duplicates

MIN_COVERED_SHARE = 0.5
"""Of a clip that earlier clips must hold."""


def mark_duplicates(table: pa.Table) -> pa.Table:
    """The table with `duplicate_of` of clips most of which was heard before: the clip that holds the most of it."""
    clips = np.flatnonzero(table["kind"].to_numpy(zero_copy_only=False) == "clip")
    found: dict[int, list[tuple[float, float, int]]] = {}
    for match in find_duplicates(table["fingerprint"].take(clips).to_pylist()):
        (start, earlier), (again, later) = (match.first_start, match.first), (match.second_start, match.second)
        if earlier > later:
            again, earlier, later = start, later, earlier
        if earlier != later:
            found.setdefault(later, []).append((again, again + match.seconds, earlier))
    seconds = (table["end_ms"].to_numpy() - table["start_ms"].to_numpy()) / 1000
    ids, original = table["id"].to_pylist(), table["duplicate_of"].to_pylist()
    for later, spans in found.items():
        row = int(clips[later])
        if _covered((start, end) for start, end, _ in spans) >= MIN_COVERED_SHARE * seconds[row]:
            _, earlier = max((end - start, -earlier) for start, end, earlier in spans)
            original[row] = original[clips[-earlier]] or ids[clips[-earlier]]
    return set_columns(table, {"duplicate_of": original})


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, reached = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
