"""Decision of a curation: which clips are kept and why others are not, from the table and the thresholds alone."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from myna.curate.settings import CurateSettings
from myna.data.segments import DROP_REASONS, DropReason, codes_of, lengths_ms, set_columns, values_of
from myna.text.normalization import base_language

MIN_MUSIC_GAP_SHARE = 0.5
"""Share of music from which a gap counts as music instead of no speech."""
MIN_LOOP_WORDS = 10
"""Number of words below which a text may repeat a word."""
MIN_PACE_CLIPS = 20
"""Minimum clips of a speaker from which the usual pace is known."""
TYPICAL_WORD_CHARACTERS = 6
SYLLABIC_LANGUAGES, LETTERS_OF_A_CHARACTER = ("zh", "yue", "ja"), 2.6
"""Languages whose characters are syllables or more, and the letters of an alphabet that take as long to say: the usual
rates are 5 and 13 characters a second."""

THRESHOLDS: dict[DropReason, str] = {
    "music": "max_music_share",
    "overlap": "max_overlap_share",
    "clipped": "max_clipped_share",
    "narrow band": "min_bandwidth_hz",
    "noisy": "min_snr_db",
    "low quality": "min_dnsmos_ovrl",
    "doubtful text": "max_cer",
}
"""Main setting of `keep` behind a reason, by the reason. A message names it to people who want to keep more."""

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]


def decide(table: pa.Table, settings: CurateSettings) -> pa.Table:
    """Set `status` and `reason` of every row. Of several reasons the first in `DROP_REASONS` is given."""
    holds = _reasons(table, settings)
    reason = np.full(len(table), "", object)
    for name in reversed(DROP_REASONS):
        if name in holds:
            reason[holds[name]] = name
    if not settings.keep.duplicates:
        # Keep the first acceptable one of the clips that repeat one another.
        original, ids = _strings(table, "duplicate_of"), _strings(table, "id")
        copies = np.flatnonzero(original != "")
        originals = set(original[copies])
        kept = {id for id, why in zip(ids, reason, strict=True) if id in originals and not why} if originals else set()
        for row in copies:
            if not reason[row] and original[row] not in kept:
                kept.add(original[row])
            else:
                reason[row] = "duplicate"
    listened = _strings(table, "part") != ""
    reason[~listened] = _strings(table, "reason")[~listened]
    return set_columns(table, {"status": np.where(reason == "", "kept", "dropped"), "reason": reason})


def _reasons(table: pa.Table, settings: CurateSettings) -> dict[DropReason, BoolArray]:
    """Return for each reason the rows that it applies to. A missing measure (NaN) drops nothing."""
    keep, cut = settings.keep, settings.cut
    clip = _strings(table, "kind") == "clip"

    def measure(name: str) -> FloatArray:
        return np.asarray(values_of(table, name), np.float64)

    starts, ends, seconds = values_of(table, "start_ms"), values_of(table, "end_ms"), lengths_ms(table) / 1000
    text = _strings(table, "text")
    codes = codes_of(table, "recording")
    recording_ends = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
    np.maximum.at(recording_ends, codes, ends)
    at_start, at_end = starts == 0, ends == recording_ends[codes]
    gap_ms = 1000 * cut.min_gap
    low_pace, high_pace = keep.characters_per_second
    pace = letter_pace(table)
    loop = measure("unique_word_share") < keep.min_unique_word_share
    long_text = pace * seconds >= MIN_LOOP_WORDS * TYPICAL_WORD_CHARACTERS
    is_clean = measure("dnsmos_bak") >= keep.clean_dnsmos_bak
    min_quality = np.where(is_clean, keep.min_clean_dnsmos_ovrl, keep.min_dnsmos_ovrl)
    similarity = np.fmin(measure("start_speaker_similarity"), measure("end_speaker_similarity"))
    holds: dict[DropReason, BoolArray] = {
        "no speech": ~clip,
        "music": np.where(
            clip, measure("music_share") > keep.max_music_share, measure("music_share") > MIN_MUSIC_GAP_SHARE
        ),
        "too short": clip & (seconds < keep.seconds[0]),
        "no silent cut": clip
        & (
            (seconds > cut.hard_seconds[1])
            | (~at_start & (measure("start_gap_ms") < gap_ms))
            | (~at_end & (measure("end_gap_ms") < gap_ms))
        ),
        "too long": clip & (seconds > keep.seconds[1]),
        "overlap": clip & (measure("overlap_share") > keep.max_overlap_share),
        "mixed speakers": clip & (similarity < keep.min_speaker_similarity),
        "other speaker": clip & (_strings(table, "speaker") == ""),
        "clipped": clip & (measure("clipped_share") > keep.max_clipped_share),
        "narrow band": clip & (measure("bandwidth_hz") < keep.min_bandwidth_hz),
        "noisy": clip
        & (((measure("snr_db") < keep.min_snr_db) & ~is_clean) | (measure("gap_snr_db") < keep.min_gap_snr_db)),
        "low quality": clip & (measure("dnsmos_ovrl") < min_quality),
        "wrong language": clip & _wrong_language(table, settings),
        "doubtful text": clip
        & (
            (text == "")
            | (measure("cer") > keep.max_cer)
            | (measure("edge_cer") > keep.max_edge_cer)
            | (measure("avg_log_prob") < keep.min_avg_log_prob)
            | (measure("compression_ratio") > keep.max_compression_ratio)
            | (loop & long_text)
        ),
        "pace": clip & ((pace < low_pace) | (pace > high_pace) | _implausible_pace(table, pace, settings)),
    }
    holds["other speaker"] |= clip & (measure("speaker_similarity") < keep.min_speaker_similarity)
    # A gap of music is not silence; a clip of music has its own reason before the length.
    holds["no speech"] &= ~holds["music"]
    return holds


def letter_pace(table: pa.Table) -> FloatArray:
    """Return the pace of clips in letters a second, so that one range holds for all scripts."""
    is_syllabic = np.isin([base_language(name) for name in _strings(table, "language")], SYLLABIC_LANGUAGES)
    return np.asarray(values_of(table, "characters_per_second") * np.where(is_syllabic, LETTERS_OF_A_CHARACTER, 1.0))


def _strings(table: pa.Table, name: str) -> npt.NDArray[np.object_]:
    return np.asarray(pc.fill_null(table[name], "").to_numpy(zero_copy_only=False), object)


def _wrong_language(table: pa.Table, settings: CurateSettings) -> BoolArray:
    """Find clips whose language is uncertain, or neither a wanted one nor, by default, that of most of the speech."""
    names = np.array([base_language(name) for name in _strings(table, "language")], object)
    wanted = {base_language(name) for name in settings.keep.languages}
    if not wanted and (names != "").any():
        lengths = lengths_ms(table)
        present = sorted(set(names[names != ""]))
        wanted = {max(present, key=lambda name: int(lengths[names == name].sum()))}
    unsure = np.asarray(values_of(table, "language_probability") < settings.keep.min_language_probability)
    return np.asarray((names != "") & (~np.isin(names, list(wanted)) | unsure), np.bool_)


def _implausible_pace(table: pa.Table, pace: FloatArray, settings: CurateSettings) -> BoolArray:
    """Find paces far outside the quartiles of the speaker's other clips."""
    far = np.zeros(len(table), np.bool_)
    if settings.keep.pace_iqr is None:
        return far
    codes = codes_of(table, "speaker")
    order = np.argsort(codes, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
        known = rows[np.isfinite(pace[rows])]
        if len(known) >= MIN_PACE_CLIPS:
            low, high = np.percentile(pace[known], [25, 75])
            reach = settings.keep.pace_iqr * (high - low)
            far[known] = (pace[known] < low - reach) | (pace[known] > high + reach)
    return far
