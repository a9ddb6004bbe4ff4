"""Session fixtures: a workspace with a tiny model and data, and an overfitted run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from myna import prepare
from myna.core.run_folder import Run
from myna.models import open_family, save_tiny_model
from myna.models.base import Family
from myna.models.ref import ModelRef
from myna.speak.engine import Engine
from myna.speak.loading import load_engine

from .tiny_setup import (
    OTHER_LINES,
    OTHER_SPEAKERS,
    RecordingCallback,
    load,
    make_recipe,
    overfit,
    record,
    recordings,
    sequences_of,
    train_run,
)

TrainWith = Callable[..., tuple[Run, RecordingCallback]]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Matrices this small lose more to waiting threads than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's variables, whatever started the tests."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, `recordings` and `others`, and the latter two as `prepared` and `evaluation`."""
    folder = tmp_path_factory.mktemp("workspace")
    save_tiny_model(folder / "model")
    recordings(folder / "recordings")
    record(folder / "others", OTHER_SPEAKERS, OTHER_LINES)
    for source, out in (("recordings", "prepared"), ("others", "evaluation")):
        prepare(str(folder / source), folder / out, model=str(folder / "model"), device="cpu")
    return folder


@pytest.fixture(scope="session")
def family(workspace: Path) -> Family:
    return open_family(str(workspace / "model"))


@pytest.fixture(scope="session")
def model(family: Family) -> Any:
    """The untrained model; tests that change it load their own."""
    return load(family, text_head=True)


@pytest.fixture(scope="session")
def pretrained_base(workspace: Path, family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base trained for some steps: far better than chance, and far from overfitted."""
    folder = tmp_path_factory.mktemp("pretrained_base") / "model"
    pretrained_base, sequences = load(family), sequences_of(family, make_recipe(workspace))
    assert 0.5 < overfit(family, pretrained_base, family.collate(sequences), steps=10)[-1] < 2
    family.save_model(pretrained_base, folder)
    shutil.copytree(workspace / "model" / "codec", folder / "codec")
    return folder


@pytest.fixture
def train_with(workspace: Path, tmp_path: Path) -> TrainWith:
    """Train in the workspace with some settings changed, each time into a folder of its own."""
    numbers = count()

    def run_once(**changes: dict[str, Any]) -> tuple[Run, RecordingCallback]:
        return train_run(make_recipe(workspace, **changes), tmp_path / f"run{next(numbers)}")

    return run_once


@pytest.fixture(scope="session")
def overfitted(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that has overfitted its sentences."""
    recipe = make_recipe(
        workspace,
        adapt={"rank": 16, "alpha": 32, "train_modules": ["audio_head", "audio_embedding"]},
        train={"steps": 120, "learning_rate": 1e-2, "warmup": 5, "schedule": "cosine", "micro_batch_size": 2},
    )
    return train_run(recipe, tmp_path_factory.mktemp("overfitted") / "run")[0]


@pytest.fixture(scope="session")
def engine(overfitted: Run) -> Engine:
    return load_engine(ModelRef.find_trained(overfitted.folder), device="cpu")
