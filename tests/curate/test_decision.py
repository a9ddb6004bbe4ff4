"""Decisions: one reason per row, by thresholds alone; a missing measure drops nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myna.curate.decision import decide
from myna.curate.settings import CurateSettings, load_curate_settings
from myna.data.segments import DROP_REASONS, MEASURES
from tests.data.segment_rows import segment, segments_table

GOOD: dict[str, Any] = {
    "speaker": "anna",
    "text": "A good clip of speech.",
    "language": "en",
    "language_probability": 0.99,
    "avg_log_prob": -0.2,
    "compression_ratio": 1.2,
    "cer": 0.0,
    "edge_cer": 0.0,
    "characters_per_second": 14.0,
    "unique_word_share": 1.0,
    "overlap_share": 0.0,
    "music_share": 0.0,
    "snr_db": 30.0,
    "gap_snr_db": 45.0,
    "bandwidth_hz": 11_000.0,
    "clipped_share": 0.0,
    "dnsmos_ovrl": 3.5,
    "speaker_similarity": 0.8,
    "start_speaker_similarity": 0.7,
    "end_speaker_similarity": 0.7,
    "start_gap_ms": 300.0,
    "end_gap_ms": 300.0,
}
FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("music", {"music_share": 0.3}),
    ("overlap", {"overlap_share": 0.05}),
    ("mixed speakers", {"end_speaker_similarity": 0.1}),
    ("other speaker", {"speaker": ""}),
    ("other speaker", {"speaker_similarity": 0.1}),
    ("clipped", {"clipped_share": 0.01}),
    ("narrow band", {"bandwidth_hz": 3800.0}),
    ("noisy", {"snr_db": 6.0}),
    ("noisy", {"gap_snr_db": 14.0, "dnsmos_bak": 4.0}),
    ("low quality", {"dnsmos_ovrl": 2.2}),
    ("wrong language", {"language_probability": 0.4}),
    ("doubtful text", {"text": ""}),
    ("doubtful text", {"cer": 0.3}),
    ("doubtful text", {"edge_cer": 0.5}),
    ("doubtful text", {"avg_log_prob": -1.4}),
    ("doubtful text", {"compression_ratio": 3.0}),
    ("pace", {"characters_per_second": 40.0}),
    ("pace", {"characters_per_second": 1.0}),
    ("no silent cut", {"end_gap_ms": 60.0}),
]


def decided(rows: list[dict[str, Any]], *settings: str) -> list[tuple[str, str]]:
    table = decide(segments_table(rows), load_curate_settings(None, settings))
    return list(zip(table["status"].to_pylist(), table["reason"].to_pylist(), strict=True))


def clip(id: str, start: int, end: int, **values: Any) -> dict[str, Any]:
    return segment(id, "tape.wav", start, end, **(GOOD | values))


@pytest.mark.parametrize(("reason", "fault"), FAULTS)
def test_each_fault_has_its_reason(reason: str, fault: dict[str, Any]) -> None:
    rows = [clip("a", 1000, 6000, **fault), clip("b", 6000, 11_000), segment("c", "tape.wav", 11_000, 12_000, "gap")]
    assert decided(rows) == [("dropped", reason), ("kept", ""), ("dropped", "no speech")]


def test_a_clean_background_is_believed_before_the_noise_measure() -> None:
    rows = [clip("a", 1000, 6000, snr_db=6.0, dnsmos_bak=bak) for bak in (3.9, 2.1)]
    assert [reason for _, reason in decided(rows)] == ["", "noisy"]
    assert [reason for _, reason in decided(rows, "keep.clean_dnsmos_bak=5")] == ["noisy", "noisy"]


def test_a_clean_background_needs_less_predicted_quality() -> None:
    rows = [
        clip("a", 1000, 6000, dnsmos_ovrl=ovrl, dnsmos_bak=bak) for ovrl, bak in ((2.7, 3.6), (2.7, 3.4), (2.4, 4.0))
    ]
    assert [reason for _, reason in decided(rows)] == ["", "low quality", "low quality"]
    assert [reason for _, reason in decided(rows, "keep.min_clean_dnsmos_ovrl=3")] == ["low quality"] * 3


def test_lengths_and_the_ends_of_a_recording() -> None:
    """A recording that begins or ends in speech has no silence there, and that is no bad cut."""
    rows = [clip("a", 0, 500), clip("b", 500, 25_000), clip("c", 25_000, 30_000, end_gap_ms=0.0)]
    assert [reason for _, reason in decided(rows)] == ["too short", "no silent cut", ""]
    assert decided([clip("a", 0, 5000, start_gap_ms=0.0, end_gap_ms=10.0)]) == [("kept", "")]
    assert decided([clip("a", 0, 9000)], "keep.seconds=[1, 8]") == [("dropped", "too long")]


def test_a_gap_of_music_is_music() -> None:
    assert decided([segment("a", "tape.wav", 0, 9000, "gap", music_share=0.9)]) == [("dropped", "music")]


def test_of_copies_the_first_good_one_stays() -> None:
    rows = [
        clip("a", 0, 5000, snr_db=5.0),
        clip("b", 5000, 10_000, duplicate_of="a"),
        clip("c", 10_000, 15_000, duplicate_of="a"),
    ]
    assert [reason for _, reason in decided(rows)] == ["noisy", "", "duplicate"]
    rows[0]["snr_db"] = 30.0
    assert [reason for _, reason in decided(rows)] == ["", "duplicate", "duplicate"]
    assert [reason for _, reason in decided(rows, "keep.duplicates=true")] == ["", "", ""]


def test_rows_that_were_not_listened_to_keep_their_reason() -> None:
    row = segment("a", "broken.m4a", 0, 0, "gap", part="", reason="unreadable")
    assert decided([row]) == [("dropped", "unreadable")]


def test_the_language_of_most_speech_is_kept_unless_others_are_named() -> None:
    rows = [clip("a", 0, 9000), clip("b", 9000, 12_000, language="vi")]
    assert [reason for _, reason in decided(rows)] == ["", "wrong language"]
    assert [reason for _, reason in decided(rows, "keep.languages=[en, vi]")] == ["", ""]


@settings(deadline=None)
@given(
    st.lists(st.fixed_dictionaries({}, optional={name: st.floats(-1, 1) | st.just(float("nan")) for name in MEASURES}))
)
def test_every_row_is_kept_or_has_one_known_reason(measures: list[dict[str, float]]) -> None:
    rows = [clip(str(n), 5000 * n, 5000 * (n + 1), **values) for n, values in enumerate(measures)]
    for status, reason in decided(rows):
        assert (status, reason) == ("kept", "") or (status == "dropped" and reason in DROP_REASONS)


def test_missing_measures_drop_nothing() -> None:
    rows = [clip("a", 1000, 6000) | dict.fromkeys(MEASURES, float("nan"))]
    assert decided(rows) == [("kept", "")]
    assert decide(segments_table([]), CurateSettings()).num_rows == 0


@pytest.mark.parametrize(("language", "slow", "fast"), [("zh", 1.7, 9.5), ("ja", 1.7, 9.5), ("en", 4.1, 24.0)])
def test_slow_and_fast_readers_are_kept_in_each_script(language: str, slow: float, fast: float) -> None:
    """Calm Chinese and Japanese has fewer than four characters a second, and was dropped for its pace."""
    for pace, reason in ((slow, ""), (fast, ""), (0.9 * slow, "pace"), (1.1 * fast, "pace")):
        row = segment("a", "r", 0, 5000) | GOOD | {"language": language, "characters_per_second": pace}
        assert decide(segments_table([row]), CurateSettings())["reason"].to_pylist() == [reason], pace
