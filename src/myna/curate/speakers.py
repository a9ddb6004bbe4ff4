"""Speakers of a curation: local speakers of all parts linked by their voices, and a loudness gain for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from myna.audio.files import read_audio
from myna.curate.models import CurationModels
from myna.curate.recordings import CURATION_RATE
from myna.curate.refine import cosine
from myna.curate.settings import LoudnessSettings, SpeakerSettings
from myna.curate.table import set_columns
from myna.listen.diarization import LINKED_SPEAKER_COSINE, NOBODY, fewest_seconds, link_speakers

FloatArray = npt.NDArray[np.float32]


def enrolment_embeddings(enrolment: Sequence[str], models: CurationModels) -> dict[str, FloatArray]:
    """Embeddings of recordings given as FILE or NAME=FILE, by name."""
    named = (one.partition("=")[::2] if "=" in one else (Path(one).stem, one) for one in enrolment)
    return {name: models.embed(read_audio(Path(path)), CURATION_RATE) for name, path in named}


def link_table_speakers(
    table: pa.Table, settings: SpeakerSettings, enrolled: dict[str, FloatArray] | None = None
) -> pa.Table:
    """The table with `speaker` and `speaker_similarity`. Without embeddings each recording is one speaker's."""
    embeddings = table["embedding"].to_pylist()
    clips = [row for row, kind in enumerate(table["kind"].to_pylist()) if kind == "clip"]
    speaker = np.full(len(table), "", object)
    similarity = np.full(len(table), math.nan, np.float32)
    voiced = [row for row in clips if embeddings[row]]
    if not voiced:
        recordings = table["recording"].to_pylist()
        speaker[clips] = [str(PurePosixPath(recordings[row]).with_suffix("")) for row in clips]
        return set_columns(table, {"speaker": speaker, "speaker_similarity": similarity})
    groups = _local_groups(table, voiced)
    seconds = (table["end_ms"].to_numpy() - table["start_ms"].to_numpy()) / 1000
    vectors = np.array([embeddings[row] for row in voiced], np.float32)
    vector_of = dict(zip(voiced, vectors, strict=True))
    means = np.array([_mean([vector_of[row] for row in rows], seconds[rows]) for _, rows in groups], np.float32)
    # What nobody's turn covers founds no speaker, and joins the nearest.
    weights = np.array([seconds[rows].sum() if named else 0.0 for named, rows in groups])
    names = list(enrolled or {})
    [labels] = link_speakers(
        [(means, weights if weights.any() else np.array([seconds[rows].sum() for _, rows in groups]))],
        speakers=settings.number,
        threshold=settings.threshold if settings.threshold is not None else LINKED_SPEAKER_COSINE,
        enrolment=np.array([enrolled[name] for name in names], np.float32) if enrolled else None,
        enrolment_threshold=settings.enrolment_threshold,
        min_share=settings.min_share if settings.number else 0.0,
    )
    heard = {*labels.tolist()} - _marginal(table, labels, [rows for _, rows in groups], settings.min_share)
    for label, (_, rows) in zip(labels.tolist(), groups, strict=True):
        if label in heard and not (names and label >= len(names)):  # with enrolments, everyone else is nobody
            speaker[rows] = names[label] if names else f"speaker-{label + 1}"
    for name in sorted(set(speaker[voiced]) - {""}):
        rows = [row for row in voiced if speaker[row] == name]
        mean = _mean([vector_of[row] for row in rows], seconds[rows])
        similarity[rows] = [cosine(vector_of[row], mean) for row in rows]
    return set_columns(table, {"speaker": speaker, "speaker_similarity": similarity})


def _marginal(
    table: pa.Table, labels: npt.NDArray[np.int64], groups: Sequence[list[int]], min_share: float
) -> set[int]:
    """Nobody's label, and those of speakers that have too little speech in every recording they are heard in."""
    length = table["end_ms"].to_numpy() - table["start_ms"].to_numpy()
    recordings = table["recording"].to_pylist()
    spoken: dict[str, dict[int, int]] = {}
    for label, rows in zip(labels.tolist(), groups, strict=True):
        for row in rows:
            shares = spoken.setdefault(recordings[row], {})
            shares[label] = shares.get(label, 0) + int(length[row])
    main = {
        label
        for shares in spoken.values()
        for label, milliseconds in shares.items()
        if milliseconds / 1000 >= fewest_seconds(sum(shares.values()) / 1000, min_share)
    }
    return ({*labels.tolist()} - main) | {NOBODY}


def _local_groups(table: pa.Table, rows: Sequence[int]) -> list[tuple[bool, list[int]]]:
    """Rows of each speaker of each part, and whether a turn covers them; a clip that none covers is by itself."""
    parts, locals_ = table["part"].to_pylist(), table["local_speaker"].to_pylist()
    groups: dict[tuple[str, str, int], list[int]] = {}
    for row in rows:
        groups.setdefault((parts[row], locals_[row], row if not locals_[row] else -1), []).append(row)
    return [(bool(local), members) for (_, local, _), members in groups.items()]


def _mean(vectors: Sequence[FloatArray], weights: npt.NDArray[np.float64]) -> FloatArray:
    mean = np.average(np.array(vectors), axis=0, weights=weights)
    norm = np.linalg.norm(mean)
    return np.asarray(mean / norm if norm else mean, np.float32)


def loudness_gains(table: pa.Table, settings: LoudnessSettings) -> pa.Table:
    """The table with `gain_db`: one for the kept clips of each speaker in each recording, to a tenth of a decibel."""
    gain = np.full(len(table), math.nan, np.float32)
    kept = np.flatnonzero(table["status"].to_numpy(zero_copy_only=False) == "kept")
    speakers, recordings = table["speaker"].to_pylist(), table["recording"].to_pylist()
    loudness, peak = table["loudness_lufs"].to_numpy(), table["peak_dbfs"].to_numpy()
    seconds = (table["end_ms"].to_numpy() - table["start_ms"].to_numpy()) / 1000
    groups: dict[tuple[str, str], list[int]] = {}
    for row in kept.tolist():
        groups.setdefault((speakers[row], recordings[row]), []).append(row)
    for rows in groups.values():
        known = [row for row in rows if math.isfinite(loudness[row])]
        if settings.target_lufs is None or not known:
            gain[rows] = 0.0
            continue
        power = np.average(10 ** (loudness[known] / 10), weights=seconds[known])
        headroom = settings.max_peak_dbfs - np.nanmax(peak[rows])
        wanted = min(settings.target_lufs - 10 * math.log10(power), float(headroom))
        gain[rows] = math.floor(10 * wanted) / 10
    return set_columns(table, {"gain_db": gain})
