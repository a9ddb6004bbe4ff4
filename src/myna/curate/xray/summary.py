"""Numbers of an X-ray: hours by reason, measures, speakers, recordings, texts, duplicates."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from myna.core.progress import ProgressCallback, silent
from myna.curate.decision import decide
from myna.curate.xray.histograms import measure_histograms, missing_measures
from myna.curate.xray.source import XraySource
from myna.curate.xray.text import text_summary
from myna.curate.xray.verdict import KEPT, verdict
from myna.curate.xray.voices import speaker_summary
from myna.data.corrections import apply_hand_decisions, is_corrected
from myna.data.segments import DROP_REASONS
from myna.data.split import SPEAKERS, TEXTS, TRAIN
from myna.text.normalization import alphanumeric

SHOWN_RECORDINGS = 200
INDEX_FILE = "recordings.json"
"""Of a curated folder: its models, among others."""


def xray_numbers(source: XraySource, tokenizer: Any = None, progress: ProgressCallback = silent) -> dict[str, Any]:
    """Everything that the page shows, as plain values. Lengths are in milliseconds, and add up exactly."""
    stages = 5
    progress("X-ray", 0, stages)
    table = source.table
    kept = table.filter(pc.equal(table["status"], KEPT))
    numbers: dict[str, Any] = {
        "myna": version("myna"),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "folder": str(source.folder),
        "curated": source.is_curated,
        "notes": [*source.notes, *_stale_notes(source)],
        "hours": hours_by_reason(table),
    }
    progress("X-ray", 1, stages)
    numbers["measures"] = measure_histograms(source)
    numbers["missing_measures"] = missing_measures(table)
    progress("X-ray", 2, stages)
    numbers["speakers"] = speaker_summary(source)
    progress("X-ray", 3, stages)
    numbers["recordings"] = _recordings(table)
    numbers["languages"] = _milliseconds_by(kept, "language")
    numbers["text_sources"] = _milliseconds_by(kept, "text_source")
    texts, spoken = (kept[name].to_pylist() for name in ("text", "normalised_text"))
    numbers["text"] = text_summary(texts, [one or text for one, text in zip(spoken, texts, strict=True)], tokenizer)
    progress("X-ray", 4, stages)
    numbers["duplicates"] = _duplicates(table)
    numbers["splits"] = _splits(kept)
    numbers["corrections"] = len(source.corrections)
    numbers["settings"] = source.settings.model_dump(mode="json") if source.is_curated else None
    numbers["models"] = _models(source)
    numbers["verdict"] = verdict(numbers)
    progress("X-ray", stages, stages)
    return numbers


def hours_by_reason(table: pa.Table) -> dict[str, Any]:
    """Milliseconds of all recordings, by what became of them; their sum is the length of all recordings."""
    lengths = _lengths(table)
    reasons = pc.if_else(pc.equal(table["status"], KEPT), KEPT, table["reason"])
    columns = pa.table({"reason": reasons, "ms": lengths})
    grouped = columns.group_by("reason").aggregate([("ms", "sum"), ("ms", "count")]).to_pylist()
    order = {reason: n for n, reason in enumerate((KEPT, *DROP_REASONS))}
    parts = [{"reason": row["reason"], "ms": row["ms_sum"], "segments": row["ms_count"]} for row in grouped]
    parts.sort(key=lambda part: (part["reason"] != KEPT, -part["ms"], order.get(part["reason"], len(order))))
    clips = pc.equal(table["kind"], "clip")
    return {
        "total_ms": int(lengths.sum()),
        "parts": parts,
        "recordings": len(table["recording"].unique()),
        "segments": len(table),
        "clips": int(pc.sum(clips).as_py() or 0),
        "untiled": _untiled(table),
    }


def _untiled(table: pa.Table) -> list[str]:
    """Recordings whose segments do not follow one another from 0 on: there the sums would be wrong."""
    names = table["recording"].to_numpy(zero_copy_only=False)
    starts, ends = table["start_ms"].to_numpy(), table["end_ms"].to_numpy()
    follows = np.r_[True, names[1:] == names[:-1]] if len(names) else np.empty(0, np.bool_)
    follows[:1] = False
    expected = np.where(follows, np.r_[0, ends[:-1]], 0) if len(names) else starts
    return sorted(set(names[starts != expected]))


def _lengths(table: pa.Table) -> npt.NDArray[np.int64]:
    return np.asarray(table["end_ms"].to_numpy() - table["start_ms"].to_numpy(), np.int64)


def _milliseconds_by(table: pa.Table, column: str) -> dict[str, int]:
    grouped = pa.table({"key": table[column], "ms": _lengths(table)}).group_by("key").aggregate([("ms", "sum")])
    pairs = zip(grouped["key"].to_pylist(), grouped["ms_sum"].to_pylist(), strict=True)
    return {str(key): int(ms) for key, ms in sorted(pairs, key=lambda pair: -pair[1])}


def _recordings(table: pa.Table) -> dict[str, Any]:
    """Recordings that lost the most first."""
    lengths, is_kept = _lengths(table), table["status"].to_numpy(zero_copy_only=False) == KEPT
    columns = {
        "recording": table["recording"],
        "ms": lengths,
        "kept_ms": np.where(is_kept, lengths, 0),
        "clips": is_kept.astype(np.int64),
        **{name: pc.if_else(pc.is_nan(table[name]), None, table[name]) for name in ("bandwidth_hz", "snr_db")},
    }
    grouped = (
        pa.table(columns)
        .group_by("recording")
        .aggregate([("ms", "sum"), ("kept_ms", "sum"), ("clips", "sum"), ("bandwidth_hz", "mean"), ("snr_db", "mean")])
    )
    rows = [
        {
            "recording": row["recording"],
            "ms": row["ms_sum"],
            "kept_ms": row["kept_ms_sum"],
            "clips": row["clips_sum"],
            "bandwidth_hz": None if row["bandwidth_hz_mean"] is None else round(row["bandwidth_hz_mean"]),
            "snr_db": None if row["snr_db_mean"] is None else round(row["snr_db_mean"], 1),
        }
        for row in grouped.to_pylist()
    ]
    rows.sort(key=lambda row: (row["kept_ms"] - row["ms"], row["recording"]))
    return {"count": len(rows), "shown": rows[:SHOWN_RECORDINGS]}


def _duplicates(table: pa.Table) -> dict[str, Any]:
    copies = table.filter(pc.not_equal(table["duplicate_of"], ""))
    return {"segments": len(copies), "ms": int(_lengths(copies).sum()), "kept": int(_count(copies, "status", KEPT))}


def _count(table: pa.Table, column: str, value: str) -> int:
    return int(pc.sum(pc.equal(table[column], value)).as_py() or 0)


def _splits(kept: pa.Table) -> dict[str, Any]:
    """Clips of each subset, and what is on both sides of a split: all of that must be nothing."""
    splits = kept["split"].to_numpy(zero_copy_only=False)
    subset_of = dict(zip(kept["id"].to_pylist(), splits, strict=True))
    pairs = kept.filter(pc.not_equal(kept["duplicate_of"], "")).select(["id", "duplicate_of"]).to_pylist()
    sides = [(subset_of[pair["id"]], subset_of.get(pair["duplicate_of"])) for pair in pairs]
    crossing = [pair for pair in sides if pair[1] is not None and pair[0] != pair[1]]

    def values(column: str, subset: str) -> set[str]:
        return set(kept[column].filter(pa.array(splits == subset)).to_pylist()) - {""}

    texts = {subset: {alphanumeric(text) for text in values("text", subset)} for subset in (TRAIN, TEXTS)}
    return {
        "subsets": {name: int((splits == name).sum()) for name in sorted(set(splits)) if name},
        "duplicates_across": len(crossing),
        "texts_across": len(texts[TRAIN] & texts[TEXTS] - {""}),
        "speakers_across": len(values("speaker", TRAIN) & values("speaker", SPEAKERS)),
    }


def _models(source: XraySource) -> list[str]:
    index = source.folder / INDEX_FILE
    if not source.is_curated or not index.is_file():
        return []
    return [str(name) for name in json.loads(index.read_text(encoding="utf-8")).get("models", [])]


def _stale_notes(source: XraySource) -> list[str]:
    """What the table does not know yet: settings or corrections that came after it."""
    if not source.is_curated:
        return []
    again = f"myna curate --out {source.folder}"
    if not is_corrected(source.table, source.corrections):
        return [f"corrections were made after the table was: {again}"]
    decided = apply_hand_decisions(decide(source.table, source.settings), source.corrections)
    different = int(pc.sum(pc.not_equal(decided["status"], source.table["status"])).as_py() or 0)
    if different:
        return [f"{different} segments would be decided otherwise with these settings and corrections: {again}"]
    return []
