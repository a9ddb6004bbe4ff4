"""Signs of life of a training: lines in its log and for its observer, and a page in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from myna.core.run_folder import Run
from myna.train import run_report
from myna.train.loop import run_training
from myna.train.run_report import RunReport
from tests.train.resume_helper import Notes, recipe_for


def learn(workspace: Path, folder: Path, **train: Any) -> list[str]:
    """Train a few steps; return the log, which the observer was given too."""
    recipe = recipe_for(workspace, data={"evaluation": str(workspace / "evaluation")}, train=train)
    notes = Notes()
    run_training(recipe, Run.create(folder, recipe), notes)
    lines = (folder / "log.txt").read_text(encoding="utf-8").splitlines()
    assert lines == [line for message in notes.said for line in message.splitlines()]
    return lines


def test_steps_and_evaluations_are_told_while_it_trains(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_report, "LINE_SECONDS", 0.0)
    lines = learn(workspace, tmp_path / "run", steps=4, evaluate_every=2)
    told = [line for line in lines if line.startswith("step 3 of 4: loss ")]
    assert len(told) == 1
    for part in ("gradient norm", "learning rate 0.00", "tokens/s", " left"):
        assert part in told[0]
    assert any(line.startswith("step 2: evaluation loss ") and "against the start" in line for line in lines)


def test_lines_about_steps_come_once_a_minute(workspace: Path, tmp_path: Path) -> None:
    lines = learn(workspace, tmp_path / "run", steps=4, evaluate_every=2)
    assert not [line for line in lines if line.startswith("step ") and " of 4: " in line]
    assert len([line for line in lines if "evaluation loss" in line and line.startswith("step ")]) == 3


def test_a_page_has_the_loss_curve_before_and_after_a_resume(workspace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    learn(workspace, folder, steps=4, evaluate_every=2)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "4 of 4" in page and "<svg" in page and "evaluation loss" in page
    assert "location.reload" not in page, "only while it trains"
    run = Run.open(folder)
    report = RunReport(run, steps=8, done=4)
    assert report.add({"step": 5, "loss": float("nan"), "gradient_norm": 1.0, "learning_rate": 0.1}) is None
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "5 of 8" in page and "location.reload" in page and "nan" not in page.split("<script")[0]


def test_what_a_step_holds_is_told(workspace: Path, tmp_path: Path) -> None:
    lines = learn(workspace, tmp_path / "one", steps=2, batch_size=2, warmup=50)
    [plan] = [line for line in lines if "optimizer steps of 2 rows" in line]
    assert "an epoch is 6 utterances" in plan and "rows, about" in plan
    assert "train.warmup is longer than the run: it is shortened to 1 of 2 steps" in lines
    short = learn(workspace, tmp_path / "two", steps=2, batch_size=2, warmup=0.03)
    assert not [line for line in short if "longer than the run" in line]
    assert not [line for line in lines if "WARNING" in line]
    lines = learn(workspace, tmp_path / "many", steps=1, batch_size=64)
    assert [line for line in lines if line.startswith("WARNING: a step holds") and "--set train.batch_size=" in line]


def test_scores_of_speech_are_told(workspace: Path, tmp_path: Path) -> None:
    recipe = recipe_for(workspace)
    report = RunReport(Run.create(tmp_path / "run", recipe), steps=4, done=0)
    scores = {"score": 0.5, "gain": 0.1, "wer": 0.25, "looped": 2, "similarity": None}
    assert report.add({"step": 2, "speech_eval": scores}) == (
        "step 2: score 0.500, +0.100 over the untuned model, 25.0% word errors (2 items looped)"
    )
    assert "Score of the speech" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
