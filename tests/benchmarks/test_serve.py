"""The load test of a server: what it writes, and one run against our own HTTP process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from benchmarks.load_client import FIGURES, LoadResult, ResponseTrace
from benchmarks.serve import RequestBodies, demo_reference, demo_sentences, drawing, merge_facts, parse, rate_row

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve.py"


def summary(seed: int, latency: float, stall: float = 0.0) -> dict[str, Any]:
    loud = b"\x00\x40" * 2400
    traces = [
        ResponseTrace(0.0, 0.0, [(latency, loud), (latency + 0.1 + stall, loud)], latency + stall + 0.2, status=200)
        for _ in range(4)
    ]
    costs = {"processor_ms_per_request": {"client": 1.0}}
    return {"seed": seed, **LoadResult(traces, window=2.0).summary(), **costs}


def test_a_rate_is_the_median_over_seeds_and_clean_only_if_all_are() -> None:
    row = rate_row(10.0, [summary(0, 0.05), summary(1, 0.07), summary(2, 0.2)], "the same")
    assert row["first_audible"]["p95"]["median"] == pytest.approx(0.07)
    assert row["first_audible"]["p95"]["range"] == pytest.approx([0.05, 0.2])
    assert row["clean"] and row["client_kept_up"] and len(row["seeds"]) == 3 and set(FIGURES) < row.keys()
    assert row["audio_s_per_s"] == pytest.approx(4 * 0.2 / 2)
    assert not rate_row(10.0, [summary(0, 0.05), summary(1, 0.05, stall=0.01)], "the same")["clean"]


def command(date: str, seeds: list[dict[str, Any]], trials: list[dict[str, Any]]) -> dict[str, Any]:
    streams = {"most_listeners": 0, "trials": trials} if trials else None
    return {"date": date, "machine": {"gpu": date}, "rows": [rate_row(1.0, seeds, "the same")], "streams": streams}


def trial(listeners: int, seed: int, *, clean: bool) -> dict[str, Any]:
    return {"listeners": listeners, "seed": seed, "clean": clean}


def test_commands_are_merged_by_seed_and_the_last_counts() -> None:
    first = command("2026-01-01", [summary(0, 0.05), summary(1, 0.2)], [trial(4, 0, clean=True)])
    second = command("2026-01-02", [summary(1, 0.07), summary(2, 0.09)], [trial(8, 0, clean=True)])
    [row] = merge_facts([first, second])["rows"]
    assert [seed["seed"] for seed in row["seeds"]] == [0, 1, 2]
    assert row["first_audible"]["p95"]["median"] == pytest.approx(0.07)
    assert row["first_audible"]["p95"]["range"] == pytest.approx([0.05, 0.09])
    third = command("2026-01-03", [summary(3, 0.06)], [trial(2, 1, clean=False), trial(1, 1, clean=True)])
    merged = merge_facts([merge_facts([first, second]), third])
    assert [machine["gpu"] for machine in merged["machines"]] == ["2026-01-01", "2026-01-02", "2026-01-03"]
    assert merged["date"] == "2026-01-03" and len(merged["rows"][0]["seeds"]) == 4


def test_merged_listeners_are_fewer_than_any_that_had_an_underrun() -> None:
    trials = [trial(4, 0, clean=True), trial(8, 0, clean=True), trial(8, 1, clean=False), trial(16, 0, clean=True)]
    merged = merge_facts([command("2026-01-01", [summary(0, 0.05)], [one]) for one in trials])
    assert merged["streams"]["most_listeners"] == 4 and merged["streams"]["trials"] == trials


def test_the_plot_stands_alone() -> None:
    rows = [rate_row(rate, [summary(0, rate / 100)], "the same") for rate in (1.0, 10.0, 20.0)]
    text = drawing(rows)
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg") and text.count("<circle") == 9
    assert "p95" in text and "requests a second" in text and "http" not in text.replace("http://www.w3.org", "")


def test_sentences_and_the_voice_are_the_demos() -> None:
    bodies, again = RequestBodies({"model": "m"}, 3), RequestBodies({"model": "m"}, 3)
    texts = [bodies.next()["input"] for _ in range(50)]
    assert texts == [again.next()["input"] for _ in range(50)]
    assert set(texts) <= {sentence.text for sentence in demo_sentences()}
    assert demo_reference()["ref_audio"].startswith("data:audio/ogg;base64,T2dnUw") and demo_reference()["ref_text"]
    timed = RequestBodies({"model": "m"}, 3, sentences=4, timed=True).next()
    assert timed["input"].count(". ") >= 3 and 4 < timed["max_seconds"] < 40


def test_words_behind_two_dashes_are_the_servers() -> None:
    asked = parse(["--model", "fledgling", "--out", "x", "--rates", "1", "2", "--", "--streams", "64"])
    assert asked.serve_options == ["--streams", "64"] and asked.rates == [1.0, 2.0] and not asked.streams
    asked = parse(["--instant", "--out", "x"])
    assert (asked.serve_options, asked.synthetic) == ([], "instant")
    with pytest.raises(SystemExit):
        parse(["--out", "x"])


@pytest.mark.slow
def test_random_weights_are_served_and_measured(tmp_path: Path) -> None:
    words = ["--tiny", "--rates", "2", "--max-rate-seconds", "2", "--seeds", "0", "--warm-up", "1", "--reference"]
    subprocess.run([sys.executable, SCRIPT, *words, "--out", tmp_path], check=True, capture_output=True)
    facts = json.loads((tmp_path / "serve.json").read_text(encoding="utf-8"))
    [seed] = facts["rows"][0]["seeds"]
    assert (facts["server"], seed["requests"], seed["whole"]) == ("tiny", 4, 4) and seed["first_audible"]["p95"] > 0


@pytest.mark.slow
def test_our_http_process_is_measured_alone(tmp_path: Path) -> None:
    words = ["--instant", "--rates", "20", "--requests", "12", "--seeds", "0", "1", "--warm-up", "2", "--reference"]
    words += ["--streams", "--first-streams", "2", "--max-streams", "4", "--trial-seconds", "2"]
    subprocess.run([sys.executable, SCRIPT, *words, "--out", tmp_path], check=True, capture_output=True)
    facts = json.loads((tmp_path / "serve-http.json").read_text(encoding="utf-8"))
    [row] = facts["rows"]
    assert row["e2e"]["p50"]["median"] > 0 and facts["streams"]["trials"][0]["listeners"] == 2
    assert {"client", "http", "engine"} == row["processor_ms_per_request"].keys()
    assert all(seed["whole"] == 12 for seed in row["seeds"]) and row["reference"] == "the same"
    assert "ref_audio" not in (tmp_path / "serve-http.json").read_text(encoding="utf-8")
    ElementTree.parse(tmp_path / "serve-http.svg")
