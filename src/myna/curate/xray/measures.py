"""Measures of an X-ray: histograms in hours with the cost of each threshold, and speakers by their embeddings.

A threshold lies on an edge of two bins, so hours on either side of any edge are exact, and the page can move it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from myna.curate.decision import MIN_LOOP_WORDS, TYPICAL_WORD_CHARACTERS, decide, letter_pace
from myna.curate.xray.source import XraySource
from myna.data.corrections import apply_hand_decisions
from myna.data.segments import codes_of, lengths_ms, values_of
from myna.listen.speaker_encoders import unit_vectors

BINS = 60
"""Approximate number of bins between the ends of the common values."""
OUTLIER_SHARE = 0.005
"""Share of the values at either end that share one open bin."""

Side = Literal["min", "max", "range"]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MeasureInfo:
    """Measure of the table, and the setting that drops clips by it."""

    column: str
    title: str
    unit: str
    setting: str = ""
    """Name of the setting in `keep`; empty for a measure that drops nothing."""
    side: Side = "min"


MEASURE_INFOS = (
    MeasureInfo("cer", "Disagreement of both transcriptions", "character error rate", "max_cer", "max"),
    MeasureInfo("edge_cer", "Disagreement at the edges", "error rate at one end", "max_edge_cer", "max"),
    MeasureInfo("snr_db", "Speech above noise, where there is some", "dB", "min_snr_db", "min"),
    MeasureInfo("gap_snr_db", "Speech above the silences at its ends", "dB", "min_gap_snr_db", "min"),
    MeasureInfo("dnsmos_ovrl", "Predicted quality, where there is noise", "DNSMOS OVRL, 1 to 5", "min_dnsmos_ovrl"),
    MeasureInfo("clean_dnsmos_ovrl", "Predicted quality without noise", "DNSMOS OVRL, 1 to 5", "min_clean_dnsmos_ovrl"),
    MeasureInfo("bandwidth_hz", "Bandwidth", "Hz", "min_bandwidth_hz", "min"),
    MeasureInfo("music_share", "Music", "share of the clip", "max_music_share", "max"),
    MeasureInfo("overlap_share", "Two voices at once", "share of the clip", "max_overlap_share", "max"),
    MeasureInfo("clipped_share", "Clipped samples", "share of the samples", "max_clipped_share", "max"),
    MeasureInfo("lowest_similarity", "Likeness to the speaker", "lowest cosine", "min_speaker_similarity", "min"),
    MeasureInfo("characters_per_second", "Pace", "letters a second", "characters_per_second", "range"),
    MeasureInfo("avg_log_prob", "Certainty of the text", "mean log probability", "min_avg_log_prob", "min"),
    MeasureInfo("language_probability", "Certainty of the language", "probability", "min_language_probability", "min"),
    MeasureInfo("compression_ratio", "Compressibility of the text", "ratio", "max_compression_ratio", "max"),
    MeasureInfo("unique_word_share", "Different words in long texts", "share", "min_unique_word_share", "min"),
    MeasureInfo("loudness_lufs", "Loudness", "LUFS"),
    MeasureInfo("peak_dbfs", "Peak", "dB of full scale"),
    MeasureInfo("seconds", "Length of clips", "seconds"),
    MeasureInfo("start_gap_ms", "Silence that the first cut lies in", "ms"),
    MeasureInfo("end_gap_ms", "Silence that the last cut lies in", "ms"),
)
DECIDES_IN_NOISE = {"snr_db": True, "dnsmos_ovrl": True, "clean_dnsmos_ovrl": False}
"""True for measures that decide about clips with a noisy background, False for a clean one."""
OFF = {"min": -math.inf, "max": math.inf, "range": (-math.inf, math.inf)}
"""Limits that drop nothing."""


def measure_histograms(source: XraySource) -> list[dict[str, Any]]:
    """Return a histogram of each available measure over all clips, in milliseconds per bin.

    Also given are the milliseconds that are kept, and those that only this measure's threshold could drop.
    """
    table = source.table
    is_clip = values_of(table, "kind") == "clip"
    table = table.filter(pa.array(is_clip))
    lengths = lengths_ms(table)
    kept = _is_kept(table)
    histograms = []
    for info in MEASURE_INFOS:
        values = _values(table, info.column)
        if info.column in DECIDES_IN_NOISE:
            is_clean = _values(table, "dnsmos_bak") >= source.settings.keep.clean_dnsmos_bak
            values = np.where(is_clean == DECIDES_IN_NOISE[info.column], math.nan, values)
        known = np.isfinite(values)
        if not known.any():
            continue
        limits: list[float] = (
            np.atleast_1d(getattr(source.settings.keep, info.setting)).tolist() if info.setting else []
        )
        low = limits[0] if limits and info.side != "max" else -math.inf
        high = limits[-1] if limits and info.side != "min" else math.inf
        is_outside = ~((values >= low) & (values <= high)) & known
        can_win = bool(info.setting) and source.is_curated and bool((is_outside & ~kept).any())
        passes = kept
        if can_win:  # decide again with a threshold that drops nothing
            keep = source.settings.keep.model_copy(update={info.setting: OFF[info.side]})
            decided = decide(source.table, source.settings.model_copy(update={"keep": keep}))
            passes = _is_kept(apply_hand_decisions(decided, source.corrections))[is_clip]
        histograms.append(
            {
                "measure": info.column,
                "title": info.title,
                "unit": info.unit,
                "setting": f"keep.{info.setting}" if info.setting else "",
                "side": info.side if info.setting else "",
                "limits": limits,
                "missing_ms": int(lengths[~known].sum()),
                "missing_kept_ms": int(lengths[~known & passes].sum()),
                "kept_ms": int(lengths[kept].sum()),
                **histogram(values[known], lengths[known], kept[known], passes[known], limits, info.side),
            }
        )
    return histograms


def missing_measures(table: pa.Table) -> list[str]:
    """Return the titles of the measures that no clip has."""
    return [info.title for info in MEASURE_INFOS if not np.isfinite(_values(table, info.column)).any()]


def histogram(
    values: FloatArray,
    lengths: npt.NDArray[np.int64],
    kept: npt.NDArray[np.bool_],
    passes: npt.NDArray[np.bool_],
    limits: Sequence[float],
    side: Side,
) -> dict[str, Any]:
    """Return edges and milliseconds of each bin. The first and last bin are open: there is one more bin than edges.

    A value on an edge is above it for a lower limit and below it for an upper one, as in the decision.
    """
    edges = bin_edges(values, limits)
    # Both limits of a range keep values that equal them.
    bins = np.searchsorted(edges, values, side="left" if side == "max" else "right")
    if side == "range":
        bins -= np.isin(values, limits[1:])
    count = len(edges) + 1

    def total(mask: npt.NDArray[np.bool_]) -> list[int]:
        sums = np.bincount(bins[mask], lengths[mask].astype(np.float64), count)
        return [int(value) for value in sums]

    every = np.ones(len(values), np.bool_)
    return {"edges": edges.tolist(), "ms": total(every), "now_ms": total(kept), "pass_ms": total(passes)}


def bin_edges(values: FloatArray, limits: Sequence[float]) -> FloatArray:
    """Return round numbers over the common values; every limit is one of them."""
    low, high = np.quantile(values, [OUTLIER_SHARE, 1 - OUTLIER_SHARE])
    low, high = min(low, *limits, high), max(high, *limits, low)
    anchor = limits[0] if limits else 0.0
    rough = (high - low) / BINS or max(abs(high), 1.0) / BINS
    size = 10.0 ** math.floor(math.log10(rough))
    width = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.floor((low - anchor) / width + 1e-9), math.ceil((high - anchor) / width - 1e-9)
    edges = {round(anchor + number * width, 10) for number in range(first, max(last, first + 1) + 1)}
    return np.array(sorted(edges.union(limits)))


def _values(table: pa.Table, column: str) -> FloatArray:
    def measure(name: str) -> FloatArray:
        return np.asarray(values_of(table, name), np.float64)

    if column == "seconds":
        return np.asarray(lengths_ms(table) / 1000)
    if column == "lowest_similarity":
        ends = np.fmin(measure("start_speaker_similarity"), measure("end_speaker_similarity"))
        return np.asarray(np.fmin(ends, measure("speaker_similarity")))
    if column == "clean_dnsmos_ovrl":
        return measure("dnsmos_ovrl")
    if column == "unique_word_share":  # a short text may repeat a word
        is_long = letter_pace(table) * _values(table, "seconds") >= MIN_LOOP_WORDS * TYPICAL_WORD_CHARACTERS
        return np.asarray(np.where(is_long, measure(column), math.nan))
    return letter_pace(table) if column == "characters_per_second" else measure(column)


def _is_kept(table: pa.Table) -> npt.NDArray[np.bool_]:
    return np.asarray(values_of(table, "status") == "kept", np.bool_)


SHOWN_SPEAKERS = 24
MATRIX_SPEAKERS = 12
SAMPLED_CLIPS = 300
"""Clips of a speaker whose embeddings are compared one by one."""
MAP_POINTS = 400
EXAMPLES = 3
MIN_PART_SHARE = 0.1
"""Minimum share of a speaker's clips that a second voice must have."""
SAME_VOICE_RATIO, DIFFERENT_VOICE_RATIO = 0.8, 0.65
"""Ratio of the mean cosine between two sets of clips to that within them: at least 0.8, perhaps one person; below 0.65,
two."""
MAX_ITERATIONS = 20
MIN_CLIPS = 6
"""Minimum clips of a speaker for a search for a second voice."""

Embeddings = npt.NDArray[np.float32]


def speaker_summary(source: XraySource) -> dict[str, Any]:
    """Return the hours of each speaker, and measures of their embeddings."""
    table = source.table
    is_kept, names_of = _is_kept(table), values_of(table, "speaker")
    ids = table["id"]
    lengths = lengths_ms(table)
    recordings = codes_of(table, "recording")
    named = np.flatnonzero((names_of != "") & (values_of(table, "kind") == "clip"))
    names, codes = np.unique(names_of[named].astype(str), return_inverse=True)
    row_code = np.full(len(table), -1)
    row_code[named] = codes
    kept_ms = np.bincount(row_code[is_kept & (row_code >= 0)], lengths[is_kept & (row_code >= 0)], len(names))
    order = np.argsort(-kept_ms, kind="stable")
    centroids, samples = _read_embeddings(source, row_code, is_kept, len(names))
    speakers = []
    for code in order[:SHOWN_SPEAKERS].tolist():
        rows = np.flatnonzero((row_code == code) & is_kept)
        entry: dict[str, Any] = {
            "speaker": str(names[code]),
            "kept_ms": int(kept_ms[code]),
            "clips": len(rows),
            "recordings": len(np.unique(recordings[rows])),
        }
        members, vectors = samples.get(code, (np.empty(0, np.int64), np.empty((0, 0), np.float32)))
        if len(members):
            likeness = vectors @ centroids[code]
            by_likeness = members[np.argsort(-likeness, kind="stable")]
            at = sorted({0, len(members) // 2, len(members) - 1})
            entry |= {
                "likeness": float(np.median(likeness)),
                "examples": [ids[int(by_likeness[n])].as_py() for n in at],
                "second_voice": second_voice(vectors),
            }
        else:
            middle = rows[np.linspace(0, len(rows) - 1, min(EXAMPLES, len(rows)), dtype=int)] if len(rows) else rows
            entry["examples"] = [ids[int(row)].as_py() for row in middle]
        speakers.append(entry)
    shown = [code for code in order[:MATRIX_SPEAKERS].tolist() if code in samples]
    matrix = [[round(float(centroids[a] @ centroids[b]), 3) for b in shown] for a in shown]
    return {
        "count": len(names),
        "kept_ms": int(kept_ms.sum()),
        "unnamed_kept_ms": int(lengths[is_kept & (row_code < 0)].sum()),
        "speakers": speakers,
        "matrix": {"speakers": [str(names[code]) for code in shown], "cosine": matrix},
        "twins": _twins([str(names[code]) for code in shown], [samples[code][1] for code in shown]),
        "map": _voice_map(samples, [str(name) for name in names], shown, ids),
    }


def _read_embeddings(
    source: XraySource, row_code: npt.NDArray[np.int64], is_kept: npt.NDArray[np.bool_], count: int
) -> tuple[Embeddings, dict[int, tuple[npt.NDArray[np.int64], Embeddings]]]:
    """Return the normalised mean of each speaker's kept clips, and an even sample of the clips."""
    clips = np.bincount(row_code[is_kept & (row_code >= 0)], minlength=count)
    steps = np.maximum(1, np.ceil(clips / SAMPLED_CLIPS)).astype(int)
    seen = np.zeros(count, np.int64)
    sums: Embeddings = np.empty((0, 0), np.float32)
    rows_of: dict[int, list[npt.NDArray[np.int64]]] = {}
    vectors_of: dict[int, list[Embeddings]] = {}
    for rows, vectors in source.embeddings():
        wanted = is_kept[rows] & (row_code[rows] >= 0)
        rows, vectors = rows[wanted], vectors[wanted]
        vectors = unit_vectors(vectors)
        sums = sums if sums.size else np.zeros((count, vectors.shape[1]), np.float32)
        codes = row_code[rows]
        for code in np.unique(codes).tolist():
            mine = np.flatnonzero(codes == code)
            sums[code] += vectors[mine].sum(axis=0)
            chosen = mine[(seen[code] + np.arange(len(mine))) % steps[code] == 0]
            seen[code] += len(mine)
            rows_of.setdefault(code, []).append(rows[chosen])
            vectors_of.setdefault(code, []).append(vectors[chosen])
    samples = {code: (np.concatenate(rows_of[code]), np.concatenate(vectors_of[code])) for code in rows_of}
    return unit_vectors(sums), samples


def second_voice(vectors: Embeddings) -> dict[str, float] | None:
    """Detect two voices under one name: two groups of clips that are much less alike than the clips of a group.

    The groups come from spherical 2-means, started from the two most different clips.
    """
    if len(vectors) < MIN_CLIPS:
        return None
    cosines = vectors @ vectors.T
    first, second = np.unravel_index(int(cosines.argmin()), cosines.shape)
    part = cosines[second] > cosines[first]
    for _ in range(MAX_ITERATIONS):
        if not MIN_PART_SHARE <= part.mean() <= 1 - MIN_PART_SHARE:
            return None
        means = unit_vectors(np.stack([vectors[part == n].mean(axis=0) for n in (False, True)]))
        moved = vectors @ means[1] > vectors @ means[0]
        if np.array_equal(moved, part):
            break
        part = moved
    parts = [vectors[~part], vectors[part]]
    across, within = mean_cosine(*parts), min(mean_cosine(one) for one in parts)
    if not across < DIFFERENT_VOICE_RATIO * within:
        return None
    share = min(float(part.mean()), 1 - float(part.mean()))
    return {"share": round(share, 3), "cosine": round(across, 3), "own": round(within, 3)}


def mean_cosine(vectors: Embeddings, others: Embeddings | None = None) -> float:
    """Return the mean cosine of two different clips of one set, or of one clip of each; NaN without a pair."""
    total = vectors.sum(axis=0, dtype=np.float64)
    if others is not None:
        return float(total @ others.sum(axis=0, dtype=np.float64) / (len(vectors) * len(others)))
    pairs = len(vectors) * (len(vectors) - 1)
    return float((total @ total - len(vectors)) / pairs) if pairs else math.nan


def _twins(names: Sequence[str], vectors: Sequence[Embeddings]) -> list[dict[str, Any]]:
    """Return pairs of speakers whose clips are nearly as alike as the clips of one of them."""
    twins = []
    own = [mean_cosine(one) for one in vectors]
    for a, first in enumerate(names):
        for b in range(a + 1, len(names)):
            across, within = mean_cosine(vectors[a], vectors[b]), min(own[a], own[b])
            if across >= SAME_VOICE_RATIO * within:
                twins.append({"speakers": [first, names[b]], "cosine": round(across, 3), "own": round(within, 3)})
    return sorted(twins, key=lambda twin: -float(twin["cosine"]))


def _voice_map(
    samples: dict[int, tuple[npt.NDArray[np.int64], Embeddings]], names: Sequence[str], shown: Sequence[int], ids: Any
) -> dict[str, Any]:
    """Place clips on the first two principal components of their embeddings."""
    each = max(1, MAP_POINTS // max(1, len(shown)))
    rows, labels, parts = [], [], []
    for code in shown:
        members, vectors = samples[code]
        step = max(1, -(-len(members) // each))
        rows += members[::step].tolist()
        labels += [names[code]] * len(members[::step])
        parts.append(vectors[::step])
    if len(rows) < 3:
        return {"points": [], "explained": 0.0}
    centered = np.concatenate(parts)
    centered = centered - centered.mean(axis=0)
    _, singular, directions = np.linalg.svd(centered, full_matrices=False)
    places = centered @ directions[:2].T
    places = places / (np.abs(places).max() or 1)
    points = [
        {"id": ids[row].as_py(), "speaker": label, "x": round(float(x), 3), "y": round(float(y), 3)}
        for row, label, (x, y) in zip(rows, labels, places, strict=True)
    ]
    explained = float((singular[:2] ** 2).sum() / max((singular**2).sum(), 1e-12))
    return {"points": points, "explained": round(explained, 3)}
