"""Source of an X-ray: the table of a curated folder, or one made from the manifest of a prepared folder."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from myna.audio.files import probe, read_audio
from myna.audio.signal_measures import bandwidth_hz, clipped_share, snr_db
from myna.core.errors import AudioError, DataError
from myna.core.io import string_hash
from myna.core.progress import ProgressCallback, silent
from myna.curate.settings import CurateSettings, load_curate_settings
from myna.curate.texts import measure_text
from myna.data.corrections import Correction, correct_utterances, load_corrections
from myna.data.manifest import Utterance, iterate_manifest
from myna.data.segments import SCHEMA, TABLE_FILE, empty_row
from myna.data.split import DatasetSplit

LARGE_COLUMNS = ("embedding", "fingerprint")
MEASURED_CLIPS = 2000
"""Clips of a prepared folder whose audio is measured; of more clips, a sample."""
BATCH_ROWS = 50_000

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class XraySource:
    """Table of segments with its folder, settings and corrections."""

    folder: Path
    table: pa.Table
    """Table without embeddings and fingerprints."""
    settings: CurateSettings
    is_curated: bool
    """True if `myna curate` made and decided the table; otherwise all of it is kept."""
    corrections: Sequence[Correction] = ()
    notes: Sequence[str] = field(default_factory=tuple)

    def audio_path(self, row: Mapping[str, Any]) -> Path:
        return self.folder / str(row["audio"])

    def embeddings(self) -> Iterator[tuple[npt.NDArray[np.int64], FloatArray]]:
        """Yield the numbers of the rows that have an embedding, block by block, and the embeddings (rows,
        dimensions)."""
        if not self.is_curated:
            return
        first = 0
        for batch in pq.ParquetFile(self.folder / TABLE_FILE).iter_batches(BATCH_ROWS, columns=["embedding"]):
            column = batch.column(0)
            rows = np.flatnonzero(column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))
            if len(rows):
                vectors = column.flatten().to_numpy(zero_copy_only=False)
                yield rows + first, vectors.reshape(len(rows), -1)
            first += len(batch)


def open_xray_source(folder: Path, progress: ProgressCallback = silent) -> XraySource:
    """Open a curated folder, or a folder with a manifest."""
    notes: list[str] = []
    corrections = load_corrections(folder, notes.append)
    if (folder / TABLE_FILE).is_file():
        names = [name for name in SCHEMA.names if name not in LARGE_COLUMNS]
        table = pq.read_table(folder / TABLE_FILE, columns=names).combine_chunks()
        return XraySource(folder, table, load_curate_settings(folder), True, corrections, notes)
    if not (folder / "manifest.jsonl").is_file():
        problem = f"{folder} holds neither {TABLE_FILE} nor manifest.jsonl"
        raise DataError(problem, hint="name a folder that `myna curate` or `myna prepare` has made")
    utterances = correct_utterances(iterate_manifest(folder / "manifest.jsonl"), corrections)
    if not utterances:
        raise DataError(f"{folder / 'manifest.jsonl'} is empty", hint="prepare the recordings first: myna prepare")
    table = _manifest_table(folder, utterances, notes, progress)
    return XraySource(folder, table, CurateSettings(), False, corrections, notes)


def _manifest_table(
    folder: Path, utterances: Sequence[Utterance], notes: list[str], progress: ProgressCallback
) -> pa.Table:
    """Return a row for each utterance, with the measures that need no model."""
    split = DatasetSplit.read(folder)
    order = sorted(range(len(utterances)), key=lambda n: string_hash(utterances[n].id))
    measured = set(order[:MEASURED_CLIPS])
    if len(measured) < len(utterances):
        notes.append(f"level, bandwidth, clipping and noise are those of {len(measured)} of {len(utterances)} clips")
    rows, unreadable = [], []
    for number, utterance in enumerate(utterances):
        if not number % 100:
            progress("measuring clips", number, len(utterances))
        row = empty_row() | {
            "id": utterance.id,
            "recording": utterance.audio.name,
            "kind": "clip",
            "audio": os.path.relpath(utterance.audio, folder),
            "speaker": utterance.speaker,
            "text": utterance.text,
            "normalised_text": utterance.text,
            "language": utterance.language,
            "split": split.subset_of.get(utterance.id, "") if split else "",
            "status": "kept",
        }
        start, end = (utterance.span.start, utterance.span.end) if utterance.span else (0.0, None)
        try:
            info = probe(utterance.audio)
            end = info.seconds if end is None else end
            row |= {"start_ms": round(1000 * start), "end_ms": round(1000 * end), "audio_start_ms": round(1000 * start)}
            if number in measured:
                row |= _signal_measures(utterance.audio, info.sample_rate, start, end)
        except AudioError as error:
            unreadable.append(f"{utterance.id}: {error.what}")
            row |= {"status": "dropped", "reason": "unreadable"}
        pace = measure_text(utterance.text, "", utterance.language, max(1e-3, (end or 0.0) - start))
        rows.append(row | {name: pace[name] for name in ("characters_per_second", "unique_word_share")})
    progress("measuring clips", len(utterances), len(utterances))
    notes += [f"{len(unreadable)} clips cannot be read: {'; '.join(unreadable[:3])}"] if unreadable else []
    rows.sort(key=lambda row: (row["recording"], row["start_ms"]))
    return pa.Table.from_pylist(rows, schema=SCHEMA).drop_columns(list(LARGE_COLUMNS))


def _signal_measures(path: Path, rate: int, start: float, end: float) -> dict[str, float]:
    samples = read_audio(path, sample_rate=rate, span=(start, end))
    peak = float(np.abs(samples).max(initial=0.0))
    return {
        "clipped_share": clipped_share(samples),
        "bandwidth_hz": bandwidth_hz(samples, rate),
        "snr_db": snr_db(samples, rate),
        "peak_dbfs": 20 * math.log10(peak) if peak else math.nan,
    }
