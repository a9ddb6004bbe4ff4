"""X-ray: exact sums, exact costs of thresholds, and a page that shows hostile text as text."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import myna
from myna.audio.files import probe, read_audio
from myna.core.errors import DataError
from myna.curate.decision import decide
from myna.curate.second_pass import write_segments
from myna.curate.settings import load_curate_settings
from myna.curate.xray import Xray, run_xray
from myna.curate.xray.measures import bin_edges, histogram, mean_cosine, second_voice
from myna.curate.xray.numbers import clock, hours_by_reason, text_diff, text_summary, tokenizer_coverage
from myna.curate.xray.source import open_xray_source
from myna.data.corrections import ClipDrop, append_correction
from myna.data.manifest import read_manifest
from myna.data.segments import DROP_REASONS
from myna.models.files import byte_tokenizer
from tests.command_line import run_command
from tests.curate.curated_folder import ARABIC, HOSTILE, RECORDINGS, write_curated_folder
from tests.data.segment_rows import segment, segments_table
from tests.report.html_reader import Reader


@pytest.fixture(scope="module")
def curated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Xray]:
    folder = tmp_path_factory.mktemp("xray") / "my tapes"
    write_curated_folder(folder)
    return folder, run_xray(folder, model="fledgling")


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**7), st.sampled_from(["", *DROP_REASONS])), max_size=12))
def test_hours_add_up_to_the_millisecond(lengths: list[tuple[int, str]]) -> None:
    rows, start = [], 0
    for number, (length, reason) in enumerate(lengths):
        status = "dropped" if reason else "kept"
        rows.append(segment(str(number), "tape", start, start + length, status=status, reason=reason))
        start += length
    hours = hours_by_reason(segments_table(rows))
    assert hours["total_ms"] == start == sum(part["ms"] for part in hours["parts"])
    assert sum(part["segments"] for part in hours["parts"]) == len(rows) and not hours["untiled"]


def test_a_damaged_table_is_told() -> None:
    rows = [segment("a", "tape", 0, 5), segment("b", "tape", 7, 9)]
    assert hours_by_reason(segments_table(rows))["untiled"] == ["tape"]


def test_every_edge_of_a_histogram_tells_what_the_decision_would_keep(curated: tuple[Path, Xray]) -> None:
    """Compare what the page computes when a slider is moved with the real decision at that setting."""
    folder, xray = curated
    source = open_xray_source(folder)
    lengths = source.table["end_ms"].to_numpy() - source.table["start_ms"].to_numpy()
    tried = 0
    for measure in xray.numbers["measures"]:
        if measure["setting"]:
            for at in sorted({0, measure["edges"].index(measure["limits"][0]), len(measure["edges"]) // 2}):
                kept, value = kept_at(measure, at)
                try:
                    changed = load_curate_settings(folder, [f"{measure['setting']}={value}"])
                except myna.MynaError:
                    continue  # the edge is outside the range of the setting
                status = decide(source.table, changed)["status"].to_numpy(zero_copy_only=False)
                assert kept == lengths[status == "kept"].sum(), (measure["setting"], value)
                tried += 1
    assert tried > 25


def kept_at(measure: dict[str, Any], at: int) -> tuple[int, Any]:
    """Compute the kept hours as xray.js does."""
    low = 0 if measure["side"] == "max" else at + 1
    high = len(measure["pass_ms"]) if measure["side"] == "min" else at + 1
    value: Any = measure["edges"][at]
    if measure["side"] == "range":
        last = measure["edges"].index(measure["limits"][1])
        high, value = last + 1, [value, measure["limits"][1]]
    return measure["missing_kept_ms"] + sum(measure["pass_ms"][low:high]), value


@settings(deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=30),
    st.lists(st.floats(-100, 100, width=16), max_size=2, unique=True).map(sorted),
)
def test_limits_lie_on_edges_and_nothing_is_lost(values: list[float], limits: list[float]) -> None:
    numbers = np.array(values, np.float64)
    edges = bin_edges(numbers, limits)
    assert set(limits) <= set(edges.tolist()) and (np.diff(edges) > 0).all() and len(edges) < 200
    every = np.ones(len(numbers), np.bool_)
    for side in ("min", "max"):
        binned = histogram(numbers, np.full(len(numbers), 7), every, every, limits, side)
        assert sum(binned["ms"]) == sum(binned["now_ms"]) == 7 * len(numbers)
        for limit in limits[:1]:
            at = binned["edges"].index(limit)
            passing = binned["pass_ms"][at + 1 :] if side == "min" else binned["pass_ms"][: at + 1]
            expected = (numbers >= limit) if side == "min" else (numbers <= limit)
            assert sum(passing) == 7 * expected.sum()


def test_the_numbers_are_those_of_the_table(curated: tuple[Path, Xray]) -> None:
    folder, xray = curated
    stored = json.loads((folder / "xray" / "xray.json").read_text(encoding="utf-8"))
    assert stored == json.loads(json.dumps(xray.numbers))
    assert stored["notes"] == [] and stored["models"] == ["whisper-base 1"]
    hours = stored["hours"]
    parts = {part["reason"]: part for part in hours["parts"]}
    assert parts["unreadable"]["ms"] == 1234 and parts["duplicate"]["segments"] == 1
    assert parts["overlap"]["segments"] > 1
    assert sum(row["ms"] for row in stored["recordings"]["shown"]) == hours["total_ms"]
    assert stored["settings"]["keep"]["max_cer"] == 0.1
    assert stored["splits"]["subsets"]["train"] > stored["splits"]["subsets"]["held_out_texts"] > 0
    assert stored["text"]["coverage"]["lost"] == [], "bytes can spell anything"
    assert [twin["speakers"] for twin in stored["speakers"]["twins"]] in ([["clara", "anna"]], [["anna", "clara"]])
    second = {one["speaker"]: one["second_voice"] for one in stored["speakers"]["speakers"]}
    assert second["ben"]["share"] > 0.2 and second["anna"] is None and second["clara"] is None
    assert any("ben may be two people" in sentence for sentence in xray.verdict)


def test_pieces_are_what_the_table_says(curated: tuple[Path, Xray]) -> None:
    """The copies hold the samples of the part at that place."""
    folder, _ = curated
    table = open_xray_source(folder).table.to_pylist()
    by_name = {row["id"]: row for row in table}
    copies = list((folder / "xray" / "clips").iterdir())
    assert len(copies) > 20
    for copy in copies[:6]:
        [row] = [row for id, row in by_name.items() if copy.stem.startswith(id.replace(" ", "_"))]
        seconds = (row["end_ms"] - row["start_ms"]) / 1000
        assert probe(copy).seconds == pytest.approx(seconds, abs=1e-3)
        start = row["audio_start_ms"] / 1000
        expected = read_audio(folder / row["audio"], span=(start, start + seconds))
        assert np.abs(read_audio(copy) - expected).max() < 1e-3


def test_hostile_text_is_shown_and_not_run(curated: tuple[Path, Xray]) -> None:
    html = curated[1].page.read_text(encoding="utf-8")
    assert HOSTILE not in html and html.count("<script") == 2
    reader = Reader(html)
    assert HOSTILE in reader.text and ARABIC.split()[0] in reader.text
    assert 'dir="auto"' in html and "default-src &#39;none&#39;" in html
    assert not re.search(r"https?://", html)


def test_the_page_tells_what_to_type(curated: tuple[Path, Xray]) -> None:
    folder, xray = curated
    text = Reader(xray.page.read_text(encoding="utf-8")).text
    assert f"myna curate --out '{folder}'" in text
    assert f"myna correct '{folder}' --speaker" in text
    total = xray.numbers["hours"]["total_ms"]
    assert clock(total) in text and xray.verdict[0] in text


@pytest.mark.parametrize("length", [0, 1234])
def test_a_folder_that_keeps_nothing_has_a_page_that_says_so(tmp_path: Path, length: int) -> None:
    broken = segment("a", "broken.m4a", 0, length, "gap", audio="", part="", status="dropped", reason="unreadable")
    write_segments(tmp_path, segments_table([broken]))
    xray = run_xray(tmp_path)
    assert xray.numbers["hours"]["total_ms"] == length and "0 clips of 0 speakers" in xray.verdict[0]
    assert "unreadable" in Reader(xray.page.read_text(encoding="utf-8")).text


def test_what_came_after_the_table_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "tapes"
    table = write_curated_folder(folder)
    kept = next(row["id"] for row in table.to_pylist() if row["status"] == "kept")
    append_correction(folder, ClipDrop(clip=kept))
    assert any("corrections were made after" in note for note in run_xray(folder).numbers["notes"])
    with pytest.raises(DataError, match="has corrections that its clips do not have yet") as error:
        myna.import_dataset(folder, tmp_path / "out", format="myna")
    assert f"myna curate --out {folder}" in error.value.hint


def test_a_folder_that_was_not_curated_shows_what_it_knows(tmp_path: Path) -> None:
    """Levels and pace are measured, and missing measures are named."""
    myna.import_dataset(RECORDINGS, tmp_path / "imported")
    xray = myna.xray(tmp_path / "imported")
    clips = read_manifest(tmp_path / "imported" / "manifest.jsonl")
    [kept] = xray.numbers["hours"]["parts"]
    assert kept["reason"] == "kept" and kept["segments"] == len(clips)
    assert kept["ms"] == sum(round(1000 * probe(clip.audio).seconds) for clip in clips)
    measured = {measure["measure"] for measure in xray.numbers["measures"]}
    assert {"snr_db", "bandwidth_hz", "clipped_share", "characters_per_second", "seconds", "peak_dbfs"} <= measured
    assert "Disagreement of both transcriptions" in xray.numbers["missing_measures"]
    text = Reader(xray.page.read_text(encoding="utf-8")).text
    assert "prepared and not curated" in text and "Voices were not embedded" in text
    with pytest.raises(DataError, match="holds neither"):
        myna.xray(tmp_path)


def test_corrections_reach_what_is_prepared(tmp_path: Path) -> None:
    """Use the commands that the page shows, on a folder that was not curated."""
    folder = tmp_path / "imported"
    myna.import_dataset(RECORDINGS, folder)
    clips = read_manifest(folder / "manifest.jsonl")
    first, second, third = (clip.id for clip in clips[:3])
    for words in ([first, "--text", TYPED], [second, "--drop"], [third, "--start", "0.25", "--end", "1.5"]):
        assert run_command(["correct", str(folder), *words]).exit_code == 0
    wrong = (["--drop"], [first], [first, "--drop", "--restore"], ["nobody", "--drop"], ["--speaker", "nobody=me"])
    for words in (*wrong, [first, "--start", "2", "--end", "1"]):
        with pytest.raises(myna.MynaError):
            run_command(["correct", str(folder), *words])
    report = myna.import_dataset(folder, tmp_path / "again")
    assert any("3 corrections of" in note for note in report.notes)
    after = {clip.id: clip for clip in read_manifest(tmp_path / "again" / "manifest.jsonl")}
    assert after[first].text == TYPED and second not in after
    span = after[third].span
    assert span is not None and (span.start, span.end) == (0.25, 1.5) and len(after) == len(clips) - 1


def test_the_command_prints_the_verdict_or_json(curated: tuple[Path, Xray]) -> None:
    folder, xray = curated
    plain = run_command(["xray", str(folder), "--model", "fledgling"])
    assert xray.verdict[0] in plain.stdout and "report.html" in plain.stdout.replace("\n", "")
    printed = run_command(["xray", str(folder), "--json"])
    assert json.loads(printed.stdout)["hours"] == json.loads(json.dumps(xray.numbers["hours"]))


TYPED = 'something else: it\'s "so"'
WORDS = st.lists(st.sampled_from(["one", "two", "Two!", "thrée", "ба", "٣"]), max_size=8).map(" ".join)


@given(WORDS, WORDS)
def test_a_diff_holds_both_texts(first: str, second: str) -> None:
    pieces = text_diff(first, second, "en")
    assert " ".join(filter(None, (piece.equal or piece.first for piece in pieces))) == first
    assert len(" ".join(piece.equal or piece.second for piece in pieces).split()) == len(second.split())
    assert all(not piece.first and not piece.second for piece in text_diff(first, first, "en"))


def test_texts_are_counted_by_characters_and_graphemes() -> None:
    texts = ["Anna hat 3 Äpfel", "Anna hat 3 Äpfel!", "e\u0323\u0302 e\u0323\u0302"]
    summary = text_summary(texts, ["Anna hat drei Äpfel"] * 2 + texts[2:])
    assert summary["digit_texts"] == 2 and summary["digit_texts_spoken"] == 0 and summary["repeated_texts"] == 1
    assert summary["graphemes"]["combined"] == ["e\u0323\u0302"] and summary["coverage"] is None
    assert summary["repeated"] == [{"text": "Anna hat 3 Äpfel!", "clips": 2}]


class LatinTokenizer:
    """Tokenizer that knows small Latin letters only."""

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(letter) for letter in text.lower() if letter.isascii()]

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(map(chr, ids))


def test_characters_that_a_tokenizer_loses() -> None:
    texts = ["Bc", "cكă"]
    coverage = tokenizer_coverage(Counter("".join(texts)), texts, LatinTokenizer())
    assert coverage["lost"] == ["ă", "ك"] and not coverage["split"]
    assert coverage["tokens_per_character"] == 3 / 5
    assert text_summary(texts, texts, LatinTokenizer())["coverage"]["lost_clips"] == 1


def test_characters_that_a_tokenizer_spells_in_bytes() -> None:
    texts = ["Xin chào, ế"]
    tokenizer = byte_tokenizer(["<s>"], begin="<s>", end="<s>", pad="<s>")
    coverage = tokenizer_coverage(Counter(texts[0]), texts, tokenizer)
    assert (
        coverage["split"] == {"à": 2, "ế": 3}
        and coverage["split_share"] == pytest.approx(2 / 11)
        and not coverage["lost"]
    )
    assert coverage["tokens_per_character"] == pytest.approx(14 / 11)


def test_two_voices_under_one_name_are_found_and_one_is_not() -> None:
    random = np.random.default_rng(0)

    def clips(*people: int) -> pa.Array:
        vectors = np.repeat(np.eye(192)[list(people)], 30, axis=0) + 0.05 * random.normal(size=(30 * len(people), 192))
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)

    assert second_voice(clips(0)) is None and second_voice(clips(0)[:4]) is None
    found = second_voice(clips(0, 1))
    assert found is not None and found["share"] == 0.5 and found["cosine"] < 0.1 < 0.5 < found["own"]
    one = clips(3)
    pairs = [float(a @ b) for n, a in enumerate(one) for b in one[n + 1 :]]
    assert mean_cosine(one) == pytest.approx(np.mean(pairs), abs=1e-5)
