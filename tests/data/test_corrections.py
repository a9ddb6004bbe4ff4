"""Corrections: the log survives kills and parallel writers, and each correction changes only its clip, once."""

from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myna.core.errors import DataError
from myna.data.corrections import (
    CORRECTIONS_FILE,
    ClipDrop,
    ClipRestore,
    Correction,
    EdgeMove,
    SpeakerCorrection,
    SpeakerMerge,
    TextCorrection,
    TornLine,
    append_correction,
    apply_corrections,
    apply_hand_decisions,
    check_correction,
    correct_utterances,
    list_speaker_clips,
    load_corrections,
)
from myna.data.manifest import Span, Utterance
from myna.data.segments import RECOGNITION_MEASURES
from myna.text.normalization import normalise_text
from tests.data.segment_rows import segment, segments_table

SPEAKERS = ("anna", "ben", "clara")
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(normalise_text)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    rows = []
    for recording in range(draw(st.integers(1, 3))):
        start = 0
        for number in range(draw(st.integers(1, 8))):
            end = start + draw(st.integers(1, 40))
            kind = draw(st.sampled_from(["clip", "clip", "gap"]))
            speaker = draw(st.sampled_from(SPEAKERS)) if kind == "clip" else ""
            text = f"clip {number}" if kind == "clip" else ""
            rows.append(segment(f"{recording}-{number}", f"r{recording}", start, end, kind, speaker=speaker, text=text))
            rows[-1]["cer"] = 0.5
            start = end
    return segments_table(rows)


@st.composite
def logs(draw: st.DrawFn, table: pa.Table) -> list[Correction]:
    """Corrections that the command accepts: each is checked against the table at that time."""
    clips = [row["id"] for row in table.to_pylist()]
    log: list[Correction] = []
    for _ in range(draw(st.integers(0, 8))):
        clip = draw(st.sampled_from(clips))
        time = st.none() | st.integers(0, 200)
        choices: list[Correction] = [
            TextCorrection(clip=clip, text=draw(NAMES)),
            ClipDrop(clip=clip),
            ClipRestore(clip=clip),
            SpeakerCorrection(clip=clip, speaker=draw(st.sampled_from(SPEAKERS))),
            SpeakerMerge(speaker=draw(st.sampled_from(SPEAKERS)), into=draw(st.sampled_from(SPEAKERS))),
            EdgeMove(clip=clip, start_ms=draw(time), end_ms=draw(time)),
        ]
        one = draw(st.sampled_from(choices))
        try:
            corrected = apply_hand_decisions(apply_corrections(table, log), log)
            check_correction(corrected, log, one)
        except DataError:
            continue
        log.append(list_speaker_clips(corrected, log, one) if draw(st.booleans()) else one)
    return log


def spans(table: pa.Table) -> dict[str, list[tuple[int, int]]]:
    by_recording: dict[str, list[tuple[int, int]]] = {}
    for row in table.select(["recording", "start_ms", "end_ms"]).to_pylist():
        by_recording.setdefault(row["recording"], []).append((row["start_ms"], row["end_ms"]))
    return by_recording


@settings(deadline=None)
@given(st.data())
def test_corrected_tables_tile_and_stay(data: st.DataObject) -> None:
    """Each millisecond is in one row, ids are unique, nothing else changes, and applying twice equals once."""
    table = data.draw(tables())
    log = data.draw(logs(table))
    corrected = apply_hand_decisions(apply_corrections(table, log, pytest.fail), log)
    ends = {recording: pieces[-1][1] for recording, pieces in spans(table).items()}
    for recording, pieces in spans(corrected).items():
        assert [start for start, _ in pieces] == [0, *(end for _, end in pieces[:-1])] and pieces[-1][1] == ends[
            recording
        ]
        assert all(start < end for start, end in pieces)
    rows = {row["id"]: row for row in corrected.to_pylist()}
    assert len(rows) == len(corrected)
    assert all(row["audio_start_ms"] == row["start_ms"] for row in rows.values())
    named = {getattr(one, "clip", "") for one in log}
    merged = any(isinstance(one, SpeakerMerge) for one in log)
    for row in table.to_pylist():
        if row["kind"] == "clip" and row["id"] not in named and not merged:
            assert json.dumps(rows[row["id"]], default=str) == json.dumps(row, default=str)
    texts = {one.clip: one.text for one in log if isinstance(one, TextCorrection)}
    for clip, text in texts.items():
        assert rows[clip]["text"] == text == normalise_text(text)
        assert all(math.isnan(rows[clip][name]) for name in RECOGNITION_MEASURES)
    again = apply_hand_decisions(apply_corrections(corrected, log), log)
    assert json.dumps(again.to_pylist(), default=str) == json.dumps(corrected.to_pylist(), default=str)


@settings(deadline=None)
@given(st.lists(NAMES, max_size=4), st.data())
def test_a_torn_last_line_costs_only_itself(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("log")
    log: list[Correction] = [TextCorrection(clip="a", text=text) for text in texts]
    for one in log:
        append_correction(folder, one)
    whole = (folder / CORRECTIONS_FILE).read_bytes() if log else b""
    line = ClipDrop(clip="b").model_dump_json().encode()
    torn = line[: data.draw(st.integers(0, len(line)))]
    (folder / CORRECTIONS_FILE).write_bytes(whole + torn)
    told: list[str] = []
    loaded = load_corrections(folder, told.append)
    assert loaded == (log if torn != line else [*log, ClipDrop(clip="b", time=loaded[-1].time)])
    assert len(told) == (0 < len(torn) < len(line))
    last = ClipRestore(clip="c")
    append_correction(folder, last)
    after = load_corrections(folder, pytest.fail)
    assert [one for one in after if not isinstance(one, TornLine)] == [*loaded, last]
    assert [one.content.encode() for one in after if isinstance(one, TornLine)] == ([torn] if told else [])


def test_a_line_that_is_no_correction_is_named(tmp_path: Path) -> None:
    append_correction(tmp_path, ClipDrop(clip="a"))
    with (tmp_path / CORRECTIONS_FILE).open("a") as file:
        file.write('{"action": "shout", "clip": "a"}\n')
    append_correction(tmp_path, ClipDrop(clip="b"))
    with pytest.raises(DataError, match=r"corrections\.jsonl:2 is no correction"):
        load_corrections(tmp_path)


def _append_many(folder: Path, name: str) -> None:
    for number in range(20):
        append_correction(folder, TextCorrection(clip=f"{name}-{number}", text="word " * 50))


def test_processes_write_one_after_another(tmp_path: Path) -> None:
    processes = [multiprocessing.Process(target=_append_many, args=(tmp_path, name)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    clips = [getattr(one, "clip", "") for one in load_corrections(tmp_path, pytest.fail)]
    assert sorted(clips) == sorted(f"{name}-{number}" for name in "abc" for number in range(20))


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    append_correction(tmp_path, ClipDrop(clip="a"))
    before = (tmp_path / CORRECTIONS_FILE).read_bytes()
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        import signal

        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with pytest.raises(OSError):
            append_correction(tmp_path, ClipDrop(clip="b"))
    finally:
        signal.signal(signal.SIGXFSZ, handler)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / CORRECTIONS_FILE).read_bytes() == before


def small_table() -> pa.Table:
    rows = [
        segment("a", "r", 0, 3000, speaker="anna", text="one", cer=0.4, normalised_text="one"),
        segment("b", "r", 3000, 5000, speaker="ben", text="two", status="dropped", reason="noisy"),
        segment("c", "r", 5000, 6000, "gap"),
        segment("d", "r", 6000, 9000, speaker="anna", text="", status="dropped", reason="doubtful text"),
    ]
    return segments_table(rows)


@pytest.mark.parametrize(
    ("correction", "words"),
    [
        (ClipDrop(clip="z"), "there is no clip z"),
        (ClipRestore(clip="c"), "c is a gap"),
        (ClipRestore(clip="d"), "d has no text"),
        (SpeakerMerge(speaker="zoe", into="anna"), "there is no speaker zoe"),
        (SpeakerMerge(speaker="anna", into="speaker-9"), "there is no speaker speaker-9"),
        (SpeakerCorrection(clip="a", speaker="speaker-9"), "there is no speaker speaker-9"),
        (SpeakerMerge(speaker="anna", into="anna"), "one speaker already"),
        (SpeakerMerge(speaker="anna", into="clara"), "clara was merged into anna"),
        (EdgeMove(clip="b", start_ms=2000), "b stays at 3000 to 5000 ms: it can lie between 3000 and 6000"),
        (EdgeMove(clip="b", end_ms=6001), "stays"),
        (EdgeMove(clip="b", start_ms=4000, end_ms=4000), "stays"),
    ],
)
def test_what_can_have_no_effect_is_refused(correction: Correction, words: str) -> None:
    with pytest.raises(DataError, match=words):
        check_correction(small_table(), [SpeakerMerge(speaker="clara", into="anna")], correction)


def numbered(*names: str) -> pa.Table:
    """Clips a to d of four lengths; another decision gives them other names."""
    rows = [
        segment(id, "r", 10_000 * place, 10_000 * place + 1000 * (place + 1), speaker=name, text="Words.")
        for place, (id, name) in enumerate(zip("abcd", names, strict=True))
    ]
    return segments_table(rows)


def test_corrections_of_speakers_stay_with_their_people_when_these_are_numbered_anew() -> None:
    before = numbered("speaker-1", "speaker-2", "speaker-3", "speaker-3")
    log: list[Correction] = []
    for correction in (
        SpeakerMerge(speaker="speaker-3", into="speaker-2"),
        SpeakerMerge(speaker="speaker-1", into="anna"),
        SpeakerCorrection(clip="d", speaker="anna"),
    ):
        corrected = apply_corrections(before, log)
        check_correction(corrected, log, correction)
        log.append(list_speaker_clips(corrected, log, correction))
    assert apply_corrections(before, log)["speaker"].to_pylist() == ["anna", "speaker-2", "speaker-2", "anna"]
    after = apply_corrections(numbered("speaker-3", "speaker-1", "speaker-2", "speaker-2"), log)
    assert after["speaker"].to_pylist() == ["anna", "speaker-1", "speaker-1", "anna"]
    assert apply_corrections(after, log)["speaker"].equals(after["speaker"])


def test_corrections_made_between_several_decisions_stay_with_their_people() -> None:
    """Four people; each decision numbers them in another order, and two are corrected after each."""
    decisions = [
        numbered("speaker-1", "speaker-2", "speaker-3", "speaker-4"),
        numbered("speaker-4", "speaker-3", "speaker-2", "speaker-1"),
        numbered("speaker-2", "speaker-1", "speaker-1", "speaker-3"),  # two of one voice, merged by hand before
        numbered("speaker-3", "speaker-4", "speaker-1", "speaker-2"),
    ]
    log: list[Correction] = []

    def correct(table: pa.Table, correction: Correction) -> None:
        corrected = apply_corrections(table, log)
        check_correction(corrected, log, correction)
        log.append(list_speaker_clips(corrected, log, correction))

    correct(decisions[0], SpeakerMerge(speaker="speaker-3", into="speaker-2"))  # c is b
    correct(decisions[1], SpeakerMerge(speaker="speaker-4", into="anna"))  # a is anna
    correct(decisions[2], SpeakerMerge(speaker="speaker-3", into="anna"))  # and so is d
    for table in decisions:
        a, b, c, d = apply_corrections(table, log)["speaker"].to_pylist()
        assert a == d == "anna" and b == c and b.startswith("speaker-")


def test_a_merge_whose_clips_are_gone_is_told_and_moves_nobody() -> None:
    table = numbered("speaker-1", "speaker-2", "speaker-1", "speaker-2")
    merge = SpeakerMerge(speaker="speaker-1", into="speaker-2", clips=("x", "y"), into_clips=("b",))
    told: list[str] = []
    assert apply_corrections(table, [merge], told.append)["speaker"].equals(table["speaker"])
    assert "there are no clips of speaker-1 any more" in told[0]


def test_a_corrected_text_is_normalised_in_its_language() -> None:
    table = segments_table([segment("a", "talk.wav", 0, 1000, language="en", text="Dr. Lynn")])
    corrected = apply_corrections(table, [TextCorrection(clip="a", text="Dr. Lind has 3.")]).to_pylist()
    assert [(row["text"], row["normalised_text"]) for row in corrected] == [
        ("Dr. Lind has 3.", "Doctor Lind has three.")
    ]


def test_a_clip_that_is_gone_is_told_and_left() -> None:
    told: list[str] = []
    left = apply_corrections(small_table(), [ClipDrop(clip="z")], told.append)
    assert str(left.to_pylist()) == str(small_table().to_pylist())
    assert "there is no clip z any more" in told[0]


def test_a_clip_that_shrinks_leaves_a_gap_that_can_be_heard() -> None:
    moved = apply_corrections(small_table(), [EdgeMove(clip="a", start_ms=500, end_ms=2500)]).to_pylist()
    assert [(row["id"], row["start_ms"], row["end_ms"], row["kind"]) for row in moved[:3]] == [
        ("a-before", 0, 500, "gap"),
        ("a", 500, 2500, "clip"),
        ("a-after", 2500, 3000, "gap"),
    ]
    assert moved[2]["audio"] == "parts/r.flac" and moved[2]["audio_start_ms"] == 2500
    assert moved[2]["text"] == "" and moved[2]["embedding"] == [] and moved[2]["cer"] != moved[2]["cer"]


def test_utterances_of_a_manifest_are_corrected_in_order() -> None:
    utterances = [Utterance(id, Path(f"{id}.wav"), "text", speaker) for id, speaker in (("a", "anna"), ("b", "ben"))]
    log: list[Correction] = [
        SpeakerCorrection(clip="a", speaker="ben"),
        SpeakerMerge(speaker="ben", into="clara"),
        TextCorrection(clip="a", text="  new\ntext "),
        ClipDrop(clip="a"),
        ClipRestore(clip="a"),
        EdgeMove(clip="a", end_ms=1500),
        ClipDrop(clip="b"),
    ]
    [one] = correct_utterances(utterances, log)
    assert one == Utterance("a", Path("a.wav"), "new text", "clara", span=Span(0.0, 1.5))
