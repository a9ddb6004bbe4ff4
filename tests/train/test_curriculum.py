"""Stages: a first part of the run has other loss weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from myna.core.run_folder import Run
from myna.train import loop
from myna.train.loop import run_training
from tests.train.resume_helper import Notes, recipe_for

CODES = [f"code{k}" for k in range(8)]


def rows(workspace: Path, folder: Path, stages: list[dict[str, float]], **loss: float) -> list[dict[str, Any]]:
    how = {"steps": 12, "learning_rate": 1e-2, "schedule": "constant", "stages": stages}
    recipe, notes = recipe_for(workspace, adapt={"train_modules": ["audio_head"]}, loss=loss, train=how), Notes()
    run_training(recipe, Run.create(folder, recipe), notes)
    return notes.rows


def audio(row: dict[str, Any]) -> float:
    return float(sum(row[code] for code in CODES)) / 8


def test_text_first_and_then_all(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "run_preflight", lambda *_, **__: None)
    stages = [{"until": 0.5, "text_weight": 1.0, "audio_weight": 0.0}]
    taught = rows(workspace, tmp_path / "run", stages, text_weight=0.5, audio_weight=2.0)
    for row in taught[:6]:
        assert row["loss"] == pytest.approx(row["text"], abs=1e-6)
    for row in taught[6:]:
        assert row["loss"] == pytest.approx(0.5 * row["text"] + 2 * audio(row), abs=1e-6)
    assert taught[6]["text"] < taught[0]["text"] - 0.1, "the text is learned"
    assert abs(audio(taught[6]) - audio(taught[0])) < 0.05, "and nothing else"
    assert audio(taught[-1]) < audio(taught[6]) - 0.05, "then the audio is"


@pytest.mark.parametrize("ends", [(0.25, 8 / 12), (3, 8)], ids=["shares", "steps"])
def test_stages_end_at_a_share_or_at_a_step_and_the_text_head_is_there_from_the_first(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: tuple[float, float]
) -> None:
    """The recipe's own loss has no text; the stage needs the head."""
    monkeypatch.setattr(loop, "run_preflight", lambda *_, **__: None)
    first, second = ends
    stages = [{"until": first, "text_weight": 1.0, "audio_weight": 0.0}, {"until": second, "text_weight": 1.0}]
    taught = rows(workspace, tmp_path / "run", stages)
    for row in taught:
        text, sound = (1, 0) if row["step"] <= 3 else (1, 1) if row["step"] <= 8 else (0, 1)
        assert row["loss"] == pytest.approx(text * row["text"] + sound * audio(row), abs=1e-6), row["step"]
