"""Source of an X-ray: a table of segments, a stratified sample of audible pieces, and timelines of recordings."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import soundfile

from myna.audio.files import FloatArray, probe, read_audio
from myna.audio.signal_measures import bandwidth_hz, clipped_share, snr_db
from myna.core.errors import AudioError, DataError
from myna.core.io import safe_file_name, string_hash
from myna.core.progress import ProgressCallback, silent
from myna.curate.settings import CurateSettings, load_curate_settings
from myna.curate.texts import measure_text
from myna.data.corrections import Correction, correct_utterances, load_corrections
from myna.data.manifest import Utterance, iterate_manifest
from myna.data.segments import SCHEMA, TABLE_FILE, codes_of, empty_row, values_of
from myna.data.split import DatasetSplit
from myna.report.page import encode_flac

LARGE_COLUMNS = ("embedding", "fingerprint")
MEASURED_CLIPS = 2000
"""Clips of a prepared folder whose audio is measured; of more clips, a sample."""
BATCH_ROWS = 50_000


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
        """Yield numbers of rows that have an embedding, block by block, and the embeddings (rows, dimensions)."""
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


PIECES_PER_REASON = 6
DOUBTFUL_CLIPS = 30
"""Number of clips in each of the two lists of doubtful texts."""
DUPLICATE_PAIRS = 12
MAX_PIECE_SECONDS = 15
PIECE_RATE = 24_000
TIMELINES = 12
TIMELINE_SEGMENTS = 8000
"""Number of segments in all timelines together."""
WAVEFORM_COLUMNS = 500
WAVEFORM_HOURS = 2.0
"""Hours of recordings whose waveforms are drawn."""

Rows = npt.NDArray[np.int64]


class PieceRows(NamedTuple):
    """Rows of the table that the page plays, by the section that shows them."""

    reasons: Mapping[str, Sequence[int]]
    doubtful_kept: Sequence[int]
    doubtful_dropped: Sequence[int]
    duplicates: Sequence[tuple[int, int]]
    examples: Sequence[int]

    def all(self) -> list[int]:
        pairs = [row for pair in self.duplicates for row in pair]
        chosen = [row for rows in self.reasons.values() for row in rows]
        return sorted({*chosen, *self.doubtful_kept, *self.doubtful_dropped, *pairs, *self.examples})


def choose_pieces(table: pa.Table, reasons: Iterable[str], example_ids: Sequence[str]) -> PieceRows:
    """Choose pieces that depend on the table alone; those of one reason come from many recordings."""
    names = pc.if_else(pc.equal(table["status"], "kept"), "kept", table["reason"]).to_numpy(zero_copy_only=False)
    audible, recordings = values_of(table, "audio") != "", codes_of(table, "recording")
    chosen = {reason: _spread(np.flatnonzero((names == reason) & audible), recordings) for reason in reasons}
    cer = values_of(table, "cer")
    doubt = np.where(np.isfinite(cer), np.fmax(cer, values_of(table, "edge_cer")), -1.0)
    kept = np.flatnonzero((names == "kept") & (doubt > 0))
    dropped = np.flatnonzero((names == "doubtful text") & (doubt >= 0))
    copies = np.flatnonzero((values_of(table, "duplicate_of") != "") & audible)
    originals = rows_of(table, table["duplicate_of"].take(copies).combine_chunks())
    pairs = [
        (row, copy) for row, copy in zip(originals, copies.tolist(), strict=True) if row is not None and audible[row]
    ]
    return PieceRows(
        chosen,
        kept[np.argsort(-doubt[kept], kind="stable")][:DOUBTFUL_CLIPS].tolist(),
        dropped[np.argsort(doubt[dropped], kind="stable")][:DOUBTFUL_CLIPS].tolist(),
        pairs[:DUPLICATE_PAIRS],
        [row for row in rows_of(table, pa.array(example_ids, pa.string())) if row is not None],
    )


def rows_of(table: pa.Table, ids: pa.Array) -> list[int | None]:
    """Return the row of each id; None if the table lacks it."""
    rows: list[int | None] = pc.index_in(ids, value_set=table["id"].combine_chunks()).to_pylist()
    return rows


def _spread(rows: Rows, recordings: npt.NDArray[Any]) -> list[int]:
    """Choose some rows, the second of a recording only once every recording has had its first."""
    shuffled = np.random.default_rng(0).permutation(rows)
    turn = np.empty(len(shuffled), np.int64)
    order = np.argsort(recordings[shuffled], kind="stable")
    codes = recordings[shuffled][order]
    first = np.flatnonzero(np.r_[True, codes[1:] != codes[:-1]]) if len(codes) else np.empty(0, np.int64)
    turn[order] = np.arange(len(codes)) - np.repeat(first, np.diff(np.r_[first, len(codes)]))
    return sorted(shuffled[np.argsort(turn, kind="stable")][:PIECES_PER_REASON].tolist())


def write_pieces(
    source: XraySource, rows: Sequence[int], out: Path, progress: ProgressCallback = silent
) -> tuple[dict[int, dict[str, Any]], int]:
    """Copy the pieces into `out`/clips; return what the page tells of each by row, and how many could not be read."""
    (out / "clips").mkdir(parents=True, exist_ok=True)
    pieces: dict[int, dict[str, Any]] = {}
    unreadable = 0
    values_of = source.table.take(pa.array(rows, pa.int64())).to_pylist()
    for number, (row, values) in enumerate(zip(rows, values_of, strict=True)):
        progress("copying pieces", number, len(rows))
        length = values["end_ms"] - values["start_ms"]
        piece = {key: values[key] for key in PIECE_COLUMNS} | {"ms": length, "file": "", "heard_ms": 0}
        start = values["audio_start_ms"] / 1000
        seconds = min(length / 1000, MAX_PIECE_SECONDS)
        try:
            samples = read_audio(source.audio_path(values), sample_rate=PIECE_RATE, span=(start, start + seconds))
            piece["file"] = f"clips/{safe_file_name(values['id'])}.flac"
            piece["heard_ms"] = round(1000 * seconds)
            (out / piece["file"]).write_bytes(encode_flac(samples, PIECE_RATE))
        except AudioError:
            unreadable += 1
        pieces[row] = piece
    progress("copying pieces", len(rows), len(rows))
    return pieces, unreadable


PIECE_COLUMNS = (
    *("id", "recording", "start_ms", "end_ms", "kind", "speaker", "text", "check_text", "language", "status", "reason"),
    *("cer", "edge_cer", "duplicate_of", "split"),
)


def timelines(source: XraySource, recordings: Sequence[str], out: Path) -> list[dict[str, Any]]:
    """Return the segments of some recordings from beginning to end, with waveforms of the first of them."""
    table = source.table
    chosen: list[dict[str, Any]] = []
    count, seconds = 0, 0.0
    for name in recordings[:TIMELINES]:
        columns = ("id", "start_ms", "end_ms", "status", "reason", "speaker", "audio", "audio_start_ms")
        rows = table.filter(pc.equal(table["recording"], name)).select(columns).to_pylist()
        count += len(rows)
        if count > TIMELINE_SEGMENTS and chosen:
            break
        seconds += rows[-1]["end_ms"] / 1000
        files = sorted({row["audio"] for row in rows if row["audio"]})
        segments = [
            [
                row["start_ms"],
                row["end_ms"],
                "kept" if row["status"] == "kept" else row["reason"],
                row["speaker"],
                files.index(row["audio"]) if row["audio"] else -1,
                row["audio_start_ms"],
                row["id"],
            ]
            for row in rows
        ]
        peaks = _waveform(source, rows) if seconds <= 3600 * WAVEFORM_HOURS else []
        links = [os.path.relpath(source.folder / file, out).replace(os.sep, "/") for file in files]
        chosen.append({"recording": name, "files": links, "segments": segments, "peaks": peaks})
    return chosen


def _waveform(source: XraySource, rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return peaks of a recording in per cent of full scale, at most `WAVEFORM_COLUMNS`; none if audio is missing."""
    total = rows[-1]["end_ms"]
    peaks = np.zeros(WAVEFORM_COLUMNS)
    for row in rows:
        path = source.audio_path(row)
        if not row["audio"] or not path.is_file() or row["end_ms"] <= row["start_ms"]:
            continue
        try:
            with soundfile.SoundFile(path) as file:
                file.seek(min(file.frames, round(row["audio_start_ms"] * file.samplerate / 1000)))
                frames = round((row["end_ms"] - row["start_ms"]) * file.samplerate / 1000)
                samples = np.abs(file.read(frames, dtype="float32", always_2d=True)).max(axis=1)
        except soundfile.SoundFileError:
            return []
        block = max(1, file.samplerate // 100)
        loudest = np.maximum.reduceat(samples, np.arange(0, len(samples), block)) if len(samples) else samples
        at = (row["start_ms"] + 10 * np.arange(len(loudest))) * WAVEFORM_COLUMNS / total
        np.maximum.at(peaks, np.minimum(at.astype(int), WAVEFORM_COLUMNS - 1), loudest)
    return [round(100 * float(peak)) for peak in peaks]
