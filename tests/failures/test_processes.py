"""Training in one process or several: ranks, devices and steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from myna.checks.doctor import check_processes
from myna.core.errors import ConfigError, TrainingError
from myna.data.loader import Shard
from myna.train import loop
from myna.train.distributed import ProcessInfo
from myna.train.optimizer import learning_rate

from .conftest import TrainWith
from .tiny_setup import make_recipe, train_run
from .two_ranks import SCHEDULE

Patch = pytest.MonkeyPatch
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def two_ranks_out(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the results of two processes; see `two_ranks`."""
    out = tmp_path_factory.mktemp("together")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command = [sys.executable, *launcher, "-m", "tests.failures.two_ranks", str(workspace), str(out)]
    bare = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=bare | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def results_of(two_ranks_out: Path, scenario: str) -> list[dict[str, Any]]:
    """Results of each rank."""
    return [json.loads((two_ranks_out / f"{scenario}.{rank}.json").read_text()) for rank in range(2)]


# Device cuda:-1


def test_a_local_rank_of_minus_one_is_a_single_process(train_with: TrainWith, monkeypatch: Patch) -> None:
    for name in ("LOCAL_RANK", "RANK"):
        monkeypatch.setenv(name, "-1")
    assert ProcessInfo.from_environment() == ProcessInfo(rank=0, local_rank=0, world_size=1)
    _, callback = train_with(train={"steps": 1})
    assert any(line.startswith("device cpu x 1") for line in callback.messages)
    assert os.environ["LOCAL_RANK"] == "-1", "the environment is left as it was"
    monkeypatch.delenv("RANK")
    (check,) = check_processes()
    assert check.status == "passed" and "LOCAL_RANK=-1 means a single process" in check.message


@pytest.mark.parametrize(
    ("said", "index"),
    [
        ({"LOCAL_RANK": "-1"}, 0),
        ({"LOCAL_RANK": "-1", "WORLD_SIZE": "-1", "RANK": "-1"}, 0),
        ({"LOCAL_RANK": "3", "WORLD_SIZE": "8", "RANK": "11"}, 3),
        ({"LOCAL_RANK": "-1", "WORLD_SIZE": "8", "RANK": "5"}, 5),
    ],
)
def test_a_device_has_the_number_of_its_process(monkeypatch: Patch, said: dict[str, str], index: int) -> None:
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for asked in ("auto", "cuda"):
        assert ProcessInfo.from_environment().device(asked) == torch.device("cuda", index)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: index)
    with pytest.raises(ConfigError, match=f"wants card {index}, and there are {index}"):
        ProcessInfo(local_rank=index).device("cuda")


def test_a_process_without_a_rank_is_refused(monkeypatch: Patch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "-1")
    with pytest.raises(TrainingError, match="RANK does not say which"):
        ProcessInfo.from_environment()


# Diverging ranks


def test_ranks_that_do_not_share_gradients_are_found_by_their_weights(two_ranks_out: Path) -> None:
    for result in results_of(two_ranks_out, "bypassed"):
        assert "the weights of rank 1 have parted from rank 0's" in result["error"]
    assert not (two_ranks_out / "bypassed" / "adapter").exists()


def test_ranks_that_share_gradients_train_like_one_process(
    two_ranks_out: Path, workspace: Path, tmp_path: Path
) -> None:
    leader, other = results_of(two_ranks_out, "correct")
    assert leader["error"] == other["error"] == ""
    assert other["rows"] == [], "only one process writes and speaks"
    recipe = make_recipe(workspace, data={"evaluation": str(workspace / "evaluation")}, train=SCHEDULE)
    _, alone = train_run(recipe, tmp_path / "alone")
    steps = [row for row in leader["rows"] if "evaluation" not in row]
    for one, two in zip(alone.steps, steps, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert two["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-3)


# A rank that cannot save


def test_ranks_do_not_wait_for_one_that_cannot_save(two_ranks_out: Path) -> None:
    leader, other = results_of(two_ranks_out, "full_disk")
    assert "the checkpoint of step 2 could not be written" in leader["error"]
    assert "No space left on device" in leader["error"] and "--resume" in leader["error"]
    assert other["error"] == leader["error"]
    assert list((two_ranks_out / "full_disk" / "checkpoints").iterdir()) == [], "nothing that looks like a checkpoint"


# Miscounted steps


def test_the_learning_rate_knows_neither_passes_nor_processes(
    two_ranks_out: Path, workspace: Path, tmp_path: Path
) -> None:
    rates = {
        "two processes": [
            row["learning_rate"] for row in results_of(two_ranks_out, "correct")[0]["rows"] if "loss" in row
        ]
    }
    for rows in (4, 1):
        recipe = make_recipe(workspace, train=SCHEDULE | {"micro_batch_size": rows})
        _, callback = train_run(recipe, tmp_path / str(rows))
        assert callback.planned_steps == 4, "optimizer steps"
        rates[f"{4 // rows} micro-batches"] = [row["learning_rate"] for row in callback.steps]
    assert rates["1 micro-batches"] == [learning_rate(recipe.train, step, 4) for step in (1, 2, 3, 4)]
    assert rates["4 micro-batches"] == rates["1 micro-batches"] == rates["two processes"]
    assert rates["1 micro-batches"][0] == 2e-3 > 2.5 * rates["1 micro-batches"][-1], "and it has come down in the end"


def test_epochs_become_optimizer_steps(workspace: Path, tmp_path: Path) -> None:
    """Six rows, two a step: three steps an epoch, however many micro-batches a step has."""
    for rows in (2, 1):
        changes = {"steps": None, "epochs": 2, "batch_size": 2, "micro_batch_size": rows, "schedule": "linear"}
        recipe = make_recipe(workspace, data={"pack": False}, train=changes)
        _, callback = train_run(recipe, tmp_path / str(rows))
        assert callback.planned_steps == len(callback.steps) == 6
        assert callback.steps[-1]["epoch"] == 2.0
        assert callback.steps[0]["learning_rate"] == 2e-3 > 5 * callback.steps[-1]["learning_rate"]


def test_rows_that_cannot_be_shared_out_are_refused(monkeypatch: Patch, train_with: TrainWith) -> None:
    monkeypatch.setattr(loop, "Shard", lambda *_: Shard(rank=0, world_size=2))
    with pytest.raises(
        TrainingError, match="3 rows a step cannot be shared by 2 processes of 1 rows a micro-batch"
    ) as caught:
        train_with(train={"batch_size": 3})
    assert "train.batch_size=2" in caught.value.hint
