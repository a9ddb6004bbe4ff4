"""Corrections of a folder: checked against what it holds before they are written, and applied to its utterances."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from myna.core.errors import DataError
from myna.curate.corrections import (
    CORRECTIONS_FILE,
    ClipDrop,
    ClipRestore,
    Correction,
    EdgeMove,
    Notify,
    SpeakerCorrection,
    SpeakerMerge,
    TextCorrection,
    append_correction,
    apply_corrections,
    apply_hand_decisions,
    check_correction,
    is_corrected,
    load_corrections,
)
from myna.curate.schema import SCHEMA, TABLE_FILE, empty_row
from myna.data.manifest import iterate_manifest
from myna.data.utterance import Span, Utterance

MANIFEST_FILE = "manifest.jsonl"
NEEDED_COLUMNS = [name for name in SCHEMA.names if name not in ("embedding", "fingerprint")]


def add_correction(folder: Path, correction: Correction, notify: Notify = lambda _: None) -> None:
    """Check a correction against a curated or prepared folder as it was corrected before, and append it."""
    corrections = load_corrections(folder, notify)
    if (folder / TABLE_FILE).is_file():
        table = pq.read_table(folder / TABLE_FILE, columns=NEEDED_COLUMNS)
        table = apply_hand_decisions(apply_corrections(table, corrections), corrections)
    else:
        table = _manifest_table(folder, corrections, correction)
    check_correction(table, corrections, correction)
    append_correction(folder, correction)


def _manifest_table(folder: Path, corrections: Sequence[Correction], correction: Correction) -> pa.Table:
    """A table of the utterances, each a recording of its own with all the room that a new edge needs."""
    utterances = correct_utterances(iterate_manifest(folder / MANIFEST_FILE), corrections, keep_dropped=True)
    rows = []
    for one in utterances:
        if isinstance(correction, EdgeMove) and one.id == correction.clip:
            _corrected(one, correction)
        row = {"id": one.id, "kind": "clip", "recording": one.id, "speaker": one.speaker, "text": one.text}
        start, end = (getattr(correction, name, None) for name in ("start_ms", "end_ms"))
        rows.append(empty_row() | row | {"start_ms": start or 0, "end_ms": (start or 0) + 1 if end is None else end})
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def check_corrections_applied(folder: Path) -> None:
    """Refuse a curated folder with corrections that were made after it was decided."""
    corrections = load_corrections(folder)
    if not corrections or not (folder / TABLE_FILE).is_file():
        return
    if not is_corrected(pq.read_table(folder / TABLE_FILE, columns=NEEDED_COLUMNS), corrections):
        problem = f"{folder / CORRECTIONS_FILE} has corrections that its clips do not have yet"
        raise DataError(problem, hint=f"myna curate --out {folder}")


def corrected_utterances(folder: Path, utterances: list[Utterance], notify: Notify = lambda _: None) -> list[Utterance]:
    """Utterances of a folder as it was corrected; those of a curated one are corrected when it is decided."""
    corrections = load_corrections(folder, notify)
    if not corrections or (folder / TABLE_FILE).is_file():
        return utterances
    notify(f"{len(corrections)} corrections of {folder / CORRECTIONS_FILE} were applied")
    return correct_utterances(utterances, corrections)


def correct_utterances(
    utterances: Iterable[Utterance], corrections: Sequence[Correction], *, keep_dropped: bool = False
) -> list[Utterance]:
    """Utterances of a manifest as they were corrected, without those that were dropped."""
    by_clip: dict[str, list[tuple[int, Correction]]] = {}
    for pair in enumerate(corrections):
        by_clip.setdefault(getattr(pair[1], "clip", ""), []).append(pair)
    merges = by_clip.pop("", [])
    corrected = []
    for utterance in utterances:
        is_kept = True
        for _, correction in sorted([*by_clip.get(utterance.id, []), *merges], key=lambda pair: pair[0]):
            if isinstance(correction, ClipDrop | ClipRestore):
                is_kept = isinstance(correction, ClipRestore)
            utterance = _corrected(utterance, correction)
        if is_kept or keep_dropped:
            corrected.append(utterance)
    return corrected


def _corrected(utterance: Utterance, correction: Correction) -> Utterance:
    match correction:
        case TextCorrection():
            return replace(utterance, text=correction.text)
        case SpeakerCorrection():
            return replace(utterance, speaker=correction.speaker)
        case SpeakerMerge() if utterance.speaker == correction.speaker:
            return replace(utterance, speaker=correction.into)
        case EdgeMove():
            span = utterance.span or Span(0.0, None)
            start = span.start if correction.start_ms is None else correction.start_ms / 1000
            end = span.end if correction.end_ms is None else correction.end_ms / 1000
            try:
                return replace(utterance, span=Span(start, end))
            except ValueError as error:
                problem = f"{utterance.id} cannot be moved: {error}"
                raise DataError(problem, hint="give --start and --end in seconds of its recording") from None
    return utterance
