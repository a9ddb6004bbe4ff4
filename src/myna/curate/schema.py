"""Columns of a curation table (`segments.parquet`): one row per segment, every raw measure beside the decision.

Per recording the segments tile it: every millisecond is in exactly one row. Rows are sorted by recording and start.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import pyarrow as pa

SegmentKind = Literal["clip", "gap"]
"""`clip`: speech that may become an utterance. `gap`: everything between clips."""
TextSource = Literal["recognised", "script", "corrected", ""]
SegmentStatus = Literal["kept", "dropped"]
DropReason = Literal[
    "unreadable",
    "duplicate",
    "no speech",
    "music",
    "too short",
    "no silent cut",
    "too long",
    "overlap",
    "mixed speakers",
    "other speaker",
    "clipped",
    "narrow band",
    "noisy",
    "low quality",
    "wrong language",
    "doubtful text",
    "pace",
    "dropped by hand",
]
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)
MEASURES = (
    "language_probability",
    "avg_log_prob",
    "compression_ratio",
    "cer",
    "edge_cer",
    "characters_per_second",
    "unique_word_share",
    "overlap_share",
    "music_share",
    "snr_db",
    "gap_snr_db",
    "bandwidth_hz",
    "clipped_share",
    "dnsmos_ovrl",
    "dnsmos_bak",
    "dnsmos_sig",
    "loudness_lufs",
    "peak_dbfs",
    "speaker_similarity",
    "start_speaker_similarity",
    "end_speaker_similarity",
    "start_gap_ms",
    "end_gap_ms",
)
"""Columns of numbers that decisions are made by; NaN where a measure could not be made."""
SCHEMA = pa.schema(
    [
        ("id", pa.string()),  # of recording hash, start and end: the same segment has the same id in every run
        ("recording", pa.string()),  # path relative to the source folder, with / between names
        ("recording_hash", pa.string()),  # SHA-256 of the decoded 16-bit PCM; empty where nothing could be decoded
        ("part", pa.string()),  # id of the part that it was found in; empty for what was never listened to
        ("start_ms", pa.int64()),
        ("end_ms", pa.int64()),
        ("kind", pa.string()),
        ("audio", pa.string()),  # FLAC within the folder that holds the segment: a part's
        ("audio_start_ms", pa.int64()),  # where the segment begins in it
        ("clip", pa.string()),  # FLAC of the kept clip, loudness adjusted; empty unless kept
        ("speaker", pa.string()),  # after linking over all recordings
        ("local_speaker", pa.string()),  # within the part
        ("text", pa.string()),
        ("text_source", pa.string()),
        ("normalised_text", pa.string()),  # as it is read aloud: numbers and abbreviations in words
        ("check_text", pa.string()),  # second transcription, of the clip alone
        ("language", pa.string()),
        *((name, pa.float32()) for name in MEASURES),
        ("gain_db", pa.float32()),  # applied to the kept clip; one for each speaker and recording
        ("embedding", pa.list_(pa.float32())),
        ("fingerprint", pa.binary()),
        ("duplicate_of", pa.string()),  # id of the segment, or the recording, that it repeats; else empty
        ("split", pa.string()),  # of kept clips: a subset of data/split.py
        ("status", pa.string()),
        ("reason", pa.string()),  # why it was dropped; empty where kept
    ]
)
TABLE_FILE = "segments.parquet"
SETTINGS_FILE = "curate.yaml"
"""Beside the table: the settings it was decided with."""


def empty_row() -> dict[str, Any]:
    """A row with nothing in it: empty strings and lists, NaN for measures."""
    empty: dict[str, Any] = {}
    for column in SCHEMA:
        if pa.types.is_string(column.type):
            empty[column.name] = ""
        elif pa.types.is_floating(column.type):
            empty[column.name] = math.nan
        else:
            empty[column.name] = b"" if pa.types.is_binary(column.type) else [] if pa.types.is_list(column.type) else 0
    return empty
