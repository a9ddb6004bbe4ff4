"""Run folders: made once, never overwritten, and enough to train or speak again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import myna
from myna.core.config import Recipe, load_recipe, parse_recipe
from myna.core.errors import ConfigError, TrainingError
from myna.core.run_folder import Run, lock_run
from myna.train import launch


@pytest.fixture
def recipe() -> Recipe:
    tree = {
        "name": "giọng-nói",
        "model": {"source": "models/tiny"},
        "data": {"train": "data/marta", "scene": "Phòng yên tĩnh.", "seconds": [0.5, 12]},
        "adapt": {"rank": 4, "train_modules": ["audio_head"]},
        "loss": {"codebook_weights": [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5]},
        "train": {"steps": 3},
    }
    return parse_recipe(tree, where="test")


def rows(run: Run) -> list[dict[str, object]]:
    return [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]


def test_it_opens_with_the_recipe_it_was_made_with(tmp_path: Path, recipe: Recipe) -> None:
    made = Run.create(tmp_path / "runs" / "marta", recipe)
    opened = Run.open(tmp_path / "runs" / "marta")
    assert opened.recipe == made.recipe == recipe
    assert load_recipe(made.folder / "config.yaml") == recipe, "it is a recipe like any other"
    text = (made.folder / "config.yaml").read_text(encoding="utf-8")
    assert "giọng-nói" in text and "learning_rate" in text, "readable, and with every default"


def test_it_names_what_will_lie_in_it(tmp_path: Path, recipe: Recipe) -> None:
    run = Run.create(tmp_path / "run", recipe)
    assert [path.name for path in (run.adapter, run.model, run.metrics)] == ["adapter", "model", "metrics.jsonl"]
    assert all(path.parent == run.folder and not path.exists() for path in (run.adapter, run.model, run.metrics))


def test_an_empty_folder_may_become_a_run(tmp_path: Path, recipe: Recipe) -> None:
    (tmp_path / "run").mkdir()
    assert Run.create(tmp_path / "run", recipe).folder == tmp_path / "run"


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, recipe: Recipe) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TrainingError, match="already holds a run") as caught:
        Run.create(tmp_path, recipe)
    assert "--out" in caught.value.hint and f"myna train --resume {tmp_path}" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_place_that_cannot_be_written_is_an_error_with_a_hint(tmp_path: Path, recipe: Recipe) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match=r"cannot write to .*file/run") as caught:
        Run.create(tmp_path / "file" / "run", recipe)
    assert "--out" in caught.value.hint


@pytest.mark.parametrize("place", ["nowhere", "empty", "file"])
def test_what_is_no_run_is_not_opened(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match=f"{place} is not a run"):
        Run.open(tmp_path / place)


def test_a_damaged_recipe_is_named(tmp_path: Path, recipe: Recipe) -> None:
    run = Run.create(tmp_path / "run", recipe)
    (run.folder / "config.yaml").write_text("model: {")
    with pytest.raises(ConfigError, match=r"config\.yaml is not readable"):
        Run.open(run.folder)


def test_what_is_recorded_is_added(tmp_path: Path, recipe: Recipe) -> None:
    run = Run.create(tmp_path / "run", recipe)
    written: list[dict[str, object]] = [
        {"step": 1, "loss": 4.25, "accuracy": None},
        {"step": 1, "evaluation": {"loss": 5.5}},
    ]
    for row in written:
        run.log_metrics(row)
    Run.open(run.folder).log_metrics({"step": 2})
    assert rows(run) == [*written, {"step": 2}]
    run.log("một")
    Run.open(run.folder).log("hai")
    assert (run.folder / "log.txt").read_text(encoding="utf-8") == "một\nhai\n"


# Going on


def test_a_run_counted_in_steps_can_go_on_counted_in_epochs(tmp_path: Path, recipe: Recipe) -> None:
    folder = Run.create(tmp_path / "run", recipe).folder
    longer = Run.open(folder, ["train.epochs=2"])
    assert (longer.recipe.train.steps, longer.recipe.train.epochs) == (None, 2.0)
    longer.save_length()
    assert Run.open(folder).recipe == longer.recipe


def test_later_steps_are_forgotten(tmp_path: Path, recipe: Recipe) -> None:
    run = Run.create(tmp_path / "run", recipe)
    for step in range(1, 6):
        run.log_metrics({"step": step})
        if step % 2 == 0:
            run.log_metrics({"step": step, "evaluation": {}})
    run.truncate_metrics(4)
    assert [row["step"] for row in rows(run)] == [1, 2, 2, 3, 4, 4]
    run.truncate_metrics(2)
    assert rows(run)[-1] == {"step": 2, "evaluation": {}}
    run.truncate_metrics(0)
    assert rows(run) == []
    assert not [path for path in run.folder.iterdir() if path.name.startswith(".")]


def test_a_last_line_that_a_kill_has_cut_is_forgotten(tmp_path: Path, recipe: Recipe) -> None:
    run = Run.create(tmp_path / "run", recipe)
    run.log_metrics({"step": 1})
    with run.metrics.open("a") as file:
        file.write('{"step": 2, "lo')
    run.truncate_metrics(5)
    run.log_metrics({"step": 2})
    assert [row["step"] for row in rows(run)] == [1, 2]


def test_a_run_without_metrics_has_nothing_to_forget(tmp_path: Path, recipe: Recipe) -> None:
    run = Run.create(tmp_path / "run", recipe)
    run.truncate_metrics(3)
    assert not run.metrics.exists()


def test_how_a_run_learns_may_change_but_not_what(tmp_path: Path, recipe: Recipe) -> None:
    run = Run.create(tmp_path / "run", recipe)
    changed = Run.open(run.folder, ["train.device=cpu", "train.keep_checkpoints=5"])
    assert (changed.recipe.train.device, changed.recipe.train.keep_checkpoints) == ("cpu", 5)
    assert Run.open(run.folder).recipe == recipe, "nothing is written"
    with pytest.raises(TrainingError, match=r"cannot go on with another adapt\.rank and train\.seed"):
        Run.open(run.folder, ["train.seed=1", "adapt.rank=8", "train.device=cpu"])


@pytest.mark.parametrize(("mode", "name"), [("comprehensive", "adapter"), ("full", "model")])
def test_a_run_is_finished_once_its_result_is_there(tmp_path: Path, recipe: Recipe, mode: str, name: str) -> None:
    changes = {"mode": mode, "train_modules": ()}
    run = Run.create(tmp_path / "run", recipe.model_copy(update={"adapt": recipe.adapt.model_copy(update=changes)}))
    assert run.result == run.folder / name and not run.is_finished
    run.result.mkdir()
    assert Run.open(run.folder).is_finished


# The lock


def test_one_holder_at_a_time_and_nothing_left_but_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with lock_run(folder, new=True):
        with pytest.raises(TrainingError, match=f"by process {os.getpid()} on ") as caught, lock_run(folder, new=False):
            pass
        assert "--out" not in caught.value.hint
        with pytest.raises(TrainingError) as caught, lock_run(folder, new=True):
            pass
        assert "--out" in caught.value.hint
    with lock_run(folder, new=True):
        pass
    assert [path.name for path in folder.iterdir()] == [".lock"], "whoever comes next finds it free"


def test_a_killed_holder_is_not_named_by_the_next(tmp_path: Path) -> None:
    """The file it wrote stays and is ignored: only the lock decides."""
    (tmp_path / ".lock").touch()
    (tmp_path / ".lock.json").write_text('{"host": "gone", "pid": 1, "since": "2026-01-01 00:00:00"}')
    with lock_run(tmp_path, new=True):
        assert json.loads((tmp_path / ".lock.json").read_text())["pid"] == os.getpid()


def test_what_is_no_run_gets_no_lock(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TrainingError, match="already holds a run"), lock_run(tmp_path, new=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(TrainingError, match=r"notes\.txt is a file"), lock_run(tmp_path / "notes.txt", new=True):
        pass
    with pytest.raises(TrainingError, match="cannot write to"), lock_run(tmp_path / "notes.txt" / "run", new=True):
        pass


def test_only_rank_0_holds_it(tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []
    monkeypatch.setattr(launch, "run_training", lambda *_, **__: held.append((tmp_path / "run" / ".lock").exists()))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        myna.train(recipe, out=tmp_path / "run")
    assert held == [False, True]


# Numbers that are none


def test_metrics_are_json_whatever_the_numbers_are(tmp_path: Path, recipe: Recipe) -> None:
    run = Run.create(tmp_path / "run", recipe)
    run.log_metrics(
        {"step": 1, "loss": float("nan"), "evaluation": {"loss": float("inf"), "all": [1.5, -float("inf")]}}
    )
    assert rows(run) == [{"step": 1, "loss": None, "evaluation": {"loss": None, "all": [1.5, None]}}]
    with run.metrics.open("a") as file:
        file.write('{"step": 2, "gradient_norm": Infinity}\n\0\0\0')
    assert run.read_metrics()[1:] == [{"step": 2, "gradient_norm": None}], "older runs, and up to what is torn"
    run.truncate_metrics(9)
    assert len(run.metrics.read_text().splitlines()) == 2
