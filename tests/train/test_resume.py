"""A run that is killed and resumed equals the run that never stopped, bit for bit."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from myna.core.config import Recipe
from myna.core.errors import TrainingError
from myna.core.run_folder import Run, checkpoint_folder, checkpoint_steps
from tests.train.resume_helper import (
    TrainingForks,
    contents,
    count_rows,
    kill,
    metrics,
    recipe_for,
    wait_for_rows,
)

KILLS = 20


@pytest.fixture(scope="module")
def forks(workspace: Path) -> Iterator[TrainingForks]:
    with TrainingForks(workspace, workspace / "forks.log") as forks:
        yield forks


def dump(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json")


def everything(workspace: Path, **train: Any) -> Recipe:
    """Accumulation, dropout, a running mean, evaluations, and rows that are packed anew in every epoch."""
    return recipe_for(
        workspace,
        data={"evaluation": str(workspace / "evaluation")},
        adapt={"dropout": 0.2, "train_modules": ["audio_head"]},
        train={"batch_size": 4, "micro_batch_size": 2, "ema_decay": 0.9, "evaluate_every": 5, "save_every": 2} | train,
    )


def assert_equal_runs(one: Path, other: Path) -> None:
    assert metrics(one) == metrics(other)
    runs = [Run.open(folder) for folder in (one, other)]
    results = [contents(run.result) for run in runs]
    assert results[0] == results[1] and results[0], "the same bytes"
    steps = [checkpoint_steps(run) for run in runs]
    assert steps[0][-1] == steps[1][-1]
    states = [checkpoint_folder(run, steps[0][-1]) / "state.safetensors" for run in runs]
    assert states[0].read_bytes() == states[1].read_bytes(), "weights, moments, means and random states"
    for folder in (one, other):
        assert not {*folder.glob(".*"), *folder.glob("checkpoints/.*")}, "nothing half-done is left"


@pytest.mark.slow
def test_killed_at_twenty_random_moments(workspace: Path, forks: TrainingForks, tmp_path: Path) -> None:
    recipe, dice = everything(workspace, steps=60), random.Random(20)
    assert forks.train(tmp_path / "whole", recipe=dump(recipe)) == 0

    folder = tmp_path / "killed"
    pid = forks.start(folder, recipe=dump(recipe))
    for number in range(KILLS):
        # Every fifth while it starts, the others somewhere in a step, an evaluation or a save.
        rows = 0 if number % 5 == 4 else count_rows(folder) + dice.randint(1, 3)
        wait_for_rows(folder, rows)
        kill(pid, signal.SIGKILL, dice)
        assert forks.wait() == -signal.SIGKILL, f"it was finished before kill {number}"
        pid = forks.start(folder, settings=[f"data.workers={dice.choice((0, 1, 3))}"])
    assert forks.wait() == 0
    assert_equal_runs(tmp_path / "whole", folder)


MOMENTS = [("fsync", 1), ("fsync", 5), ("fsync", 8), ("rename", 1), ("rename", 2), ("rename", 3), ("rmtree", 1)]
FULL = {"mode": "full", "freeze": ["text_ffn"]}


@pytest.mark.parametrize("adapt", [pytest.param({"dora": True}, marks=pytest.mark.slow), FULL], ids=["dora", "full"])
def test_killed_within_a_save(workspace: Path, forks: TrainingForks, tmp_path: Path, adapt: dict[str, Any]) -> None:
    recipe = recipe_for(
        workspace,
        data={"pack": False},
        adapt=adapt | ({"rank": 16, "alpha": 32} if adapt is FULL else {}),
        train={"steps": None, "epochs": 5, "save_every": 2, "keep_checkpoints": 1, "weight_decay": 0.1},
    )
    assert forks.train(tmp_path / "whole", recipe=dump(recipe)) == 0

    folder = tmp_path / "killed"
    assert forks.train(folder, recipe=dump(recipe), deadly=("fsync", 2)) == -signal.SIGKILL
    assert checkpoint_steps(Run.open(folder)) == [], "a first checkpoint without its name is none"
    for moment in MOMENTS:
        assert forks.train(folder, deadly=moment) == -signal.SIGKILL, moment
    assert forks.train(folder) == 0
    assert_equal_runs(tmp_path / "whole", folder)


def test_a_finished_run_says_so_and_stays_as_it_is(workspace: Path, forks: TrainingForks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert forks.train(folder, recipe=dump(recipe_for(workspace, train={"steps": 2}))) == 0
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert forks.train(folder) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


# What may be set anew


def test_how_may_change_but_not_what(workspace: Path, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe_for(workspace))
    changed = Run.open(
        run.folder, ["data.workers=7", "train.device=cpu", "train.trackers=[]", "train.micro_batch_size=2"]
    )
    assert (changed.recipe.data.workers, changed.recipe.train.micro_batch_size) == (7, 2)
    assert Run.open(run.folder).recipe == run.recipe, "the run remembers how it was started"
    for setting in (
        "train.learning_rate=1",
        "adapt.rank=8",
        "data.packing_window=9",
        "train.seed=1",
        "train.ema_decay=0.5",
    ):
        with pytest.raises(TrainingError, match=f"another {setting.split('=')[0]}: it would learn something else"):
            Run.open(run.folder, [setting])
    assert Run.open(run.folder, ["train.seed=0"]).recipe == run.recipe, "what is the same is no change"
