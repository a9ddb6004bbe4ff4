"""The summary of demos over seeds."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

import evaluate_demo
from myna.data.manifest import read_manifest


def score(
    seed: int, before: float, after: float, wrong_before: float = 0.1, wrong_after: float = 0.1
) -> dict[str, Any]:
    return {
        "seed": seed,
        "systems": {
            "real": {"similarity": {"mean": 0.9}, "wer": {"mean": 0.01}},
            "before": {"similarity": {"mean": before}, "wer": {"mean": wrong_before}},
            "after": {"similarity": {"mean": after}, "wer": {"mean": wrong_after}},
        },
        "ended_by_itself": {"before": 10, "after": 10},
        "seconds": {"train": 100.0, "listen": 20.0},
        "missing": {},
    }


def test_the_gain_is_the_mean_over_seeds() -> None:
    table = evaluate_demo.summarise([score(0, 0.7, 0.72), score(1, 0.7, 0.76)])
    assert table["similarity_gain"] == pytest.approx(0.04)
    assert table["passed"] is True
    assert [row["seed"] for row in table["seeds"]] == [0, 1] and table["seeds"][0]["seconds"] == 120.0


@pytest.mark.parametrize("scores", [[score(0, 0.7, 0.72)], [score(0, 0.7, 0.8, 0.1, 0.2)]])
def test_too_little_gain_or_more_word_errors_do_not_pass(scores: list[dict[str, Any]]) -> None:
    assert evaluate_demo.summarise(scores)["passed"] is False


def test_without_metrics_nothing_is_concluded() -> None:
    unscored = score(1, 0.7, 0.8)
    unscored["systems"] = {name: {"similarity": {"mean": None}, "wer": {"mean": None}} for name in unscored["systems"]}
    table = evaluate_demo.summarise([score(0, 0.7, 0.8), unscored | {"missing": {"similarity": "no encoder"}}])
    assert table["passed"] is None and table["similarity_gain"] is None
    assert table["missing"] == [{"similarity": "no encoder"}]


def test_every_seed_is_a_demo_that_is_not_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def pretend(command: list[str], check: bool) -> None:
        assert check
        ran.append(command)
        folder = Path(command[command.index("--out") + 1])
        folder.mkdir()
        (folder / "scores.json").write_text(json.dumps(score(0, 0.7, 0.8)))

    monkeypatch.setattr(subprocess, "run", pretend)
    argv = ["evaluate_demo.py", "--out", str(tmp_path), "--seeds", "0", "1", "--set", "train.steps=2"]
    monkeypatch.setattr(sys, "argv", [*argv, "--asr", "base"])
    evaluate_demo.main()
    evaluate_demo.main()
    assert len(ran) == 2
    assert ran[1][1:] == [
        *("-m", "myna", "demo", "--out", str(tmp_path / "seed-1"), "--seed", "1", "--model", "fledgling"),
        *("--set", "train.steps=2", "--asr", "base"),
    ]
    table = json.loads((tmp_path / "evaluation.json").read_text())
    assert [row["seed"] for row in table["seeds"]] == [0, 1]


def test_three_minutes_of_a_real_voice_become_a_corpus_for_the_demo(tmp_path: Path) -> None:
    """Recordings that are too short, say too little or say the same are left out."""
    rng = np.random.default_rng(0)

    def row(number: int, seconds: float, text: str) -> dict[str, Any]:
        file = io.BytesIO()
        soundfile.write(file, 0.1 * rng.standard_normal(round(seconds * 24_000)), 24_000, format="FLAC")
        audio = {"bytes": file.getvalue(), "path": f"{number}.flac"}
        return {"id": f"voice-{number}", "speaker": "voice", "text": text, "audio": audio}

    rows = [row(number, 6.0, f"this is line number {number}") for number in range(50)]
    rows += [
        row(50, 1.0, "this is far too short"),
        row(51, 3.0, "few words"),
        row(52, 3.0, "this is line number 1"),
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "voice.parquet")
    learned = evaluate_demo.write_real_voice(tmp_path / "voice.parquet", None, tmp_path / "voice")  # type: ignore[arg-type]
    lines = read_manifest(tmp_path / "voice" / "manifest.jsonl")
    held_out = [line for line in lines if line.extras.get("held_out")]
    assert len(held_out) == evaluate_demo.HELD_OUT_CLIPS and 180 <= learned < 186
    assert len({line.text for line in lines}) == len(lines) and all(line.audio.is_file() for line in lines)
    assert not {"voice-50", "voice-51"} & {line.id for line in lines}
    table = evaluate_demo.summarise([score(0, 0.7, 0.74)], evaluate_demo.MIN_REAL_SIMILARITY_GAIN)
    assert table["passed"] is False and table["min_similarity_gain"] == 0.05
