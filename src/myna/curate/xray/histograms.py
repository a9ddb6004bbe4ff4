"""Histograms of measures in hours, and what each threshold costs: binned so that a page can move the threshold.

A threshold lies on an edge of two bins, so hours on either side of any edge are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from myna.curate.decision import MIN_LOOP_WORDS, TYPICAL_WORD_CHARACTERS, decide
from myna.curate.settings import CurateSettings
from myna.curate.xray.source import XraySource
from myna.data.corrections import apply_hand_decisions

BINS = 60
"""About how many bins there are between the ends of what is common."""
OUTLIER_SHARE = 0.005
"""Of the values at either end that share one open bin."""

Side = Literal["min", "max", "range"]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MeasureInfo:
    """A measure of the table, and the setting that drops clips by it."""

    column: str
    title: str
    unit: str
    setting: str = ""
    """Of `keep`; empty for a measure that drops nothing."""
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
    MeasureInfo("characters_per_second", "Pace", "characters a second", "characters_per_second", "range"),
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
"""Whether a measure decides of clips whose background is not clean, or of those whose is."""
OFF = {"min": -math.inf, "max": math.inf, "range": (-math.inf, math.inf)}
"""A limit that drops nothing."""


def measure_histograms(source: XraySource) -> list[dict[str, Any]]:
    """A histogram for each measure that was made, over all clips: milliseconds a bin, and of those the milliseconds
    that are kept, and that nothing but this measure's threshold could drop."""
    table = source.table
    is_clip = table["kind"].to_numpy(zero_copy_only=False) == "clip"
    table = table.filter(pa.array(is_clip))
    lengths = (table["end_ms"].to_numpy() - table["start_ms"].to_numpy()).astype(np.int64)
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
        limits = _limits(info, source.settings)
        is_outside = ~_is_within(values, limits, info.side) & known
        can_win = bool(info.setting) and source.is_curated and bool((is_outside & ~kept).any())
        passes = _kept_without(source, is_clip, info) if can_win else kept
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
    """Titles of the measures that no clip has."""
    return [info.title for info in MEASURE_INFOS if not np.isfinite(_values(table, info.column)).any()]


def histogram(
    values: FloatArray,
    lengths: npt.NDArray[np.int64],
    kept: npt.NDArray[np.bool_],
    passes: npt.NDArray[np.bool_],
    limits: Sequence[float],
    side: Side,
) -> dict[str, Any]:
    """Edges, and milliseconds of each bin. The first and the last bin are open: there is one more bin than edges.

    A value on an edge is above it for a lower limit and below it for an upper one, as the decision has it.
    """
    edges = bin_edges(values, limits)
    # Of a range the lower limit keeps what equals it, and so does the upper one.
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
    """Round numbers from the first of the limits on, both ways, over what is common; every limit is one of them."""
    low, high = np.quantile(values, [OUTLIER_SHARE, 1 - OUTLIER_SHARE])
    low, high = min(low, *limits, high), max(high, *limits, low)
    anchor = limits[0] if limits else 0.0
    rough = (high - low) / BINS or max(abs(high), 1.0) / BINS
    size = 10.0 ** math.floor(math.log10(rough))
    width = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.floor((low - anchor) / width + 1e-9), math.ceil((high - anchor) / width - 1e-9)
    edges = {round(anchor + number * width, 10) for number in range(first, max(last, first + 1) + 1)}
    return np.array(sorted(edges.union(limits)))


def _is_within(values: FloatArray, limits: Sequence[float], side: Side) -> npt.NDArray[np.bool_]:
    low = limits[0] if limits and side != "max" else -math.inf
    high = limits[-1] if limits and side != "min" else math.inf
    return np.asarray((values >= low) & (values <= high))


def _limits(info: MeasureInfo, settings: CurateSettings) -> list[float]:
    if not info.setting:
        return []
    value = getattr(settings.keep, info.setting)
    return [float(one) for one in (value if isinstance(value, tuple) else (value,))]


def _values(table: pa.Table, column: str) -> FloatArray:
    def measure(name: str) -> FloatArray:
        return np.asarray(table[name].to_numpy(zero_copy_only=False), np.float64)

    if column == "seconds":
        return np.asarray((measure("end_ms") - measure("start_ms")) / 1000)
    if column == "lowest_similarity":
        return np.asarray(
            np.fmin(
                np.fmin(measure("start_speaker_similarity"), measure("end_speaker_similarity")),
                measure("speaker_similarity"),
            )
        )
    if column == "clean_dnsmos_ovrl":
        return measure("dnsmos_ovrl")
    if column == "unique_word_share":  # a short text may repeat a word
        characters = measure("characters_per_second") * _values(table, "seconds")
        is_long = characters >= MIN_LOOP_WORDS * TYPICAL_WORD_CHARACTERS
        return np.asarray(np.where(is_long, measure(column), math.nan))
    return measure(column)


def _is_kept(table: pa.Table) -> npt.NDArray[np.bool_]:
    return np.asarray(table["status"].to_numpy(zero_copy_only=False) == "kept", np.bool_)


def _kept_without(source: XraySource, is_clip: npt.NDArray[np.bool_], info: MeasureInfo) -> npt.NDArray[np.bool_]:
    """Clips that would be kept if this threshold dropped nothing."""
    keep = source.settings.keep.model_copy(update={info.setting: OFF[info.side]})
    decided = decide(source.table, source.settings.model_copy(update={"keep": keep}))
    return _is_kept(apply_hand_decisions(decided, source.corrections))[is_clip]
