"""What the rows share, made once: the house, its model, and a run that has learned its lines by heart."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from myna.models import open_family, save_tiny
from myna.models.base import Family
from myna.speak.engine import Engine
from myna.train.run import Run
from myna.workflow import open_engine, prepare

from .house import OTHER_BIRDS, OTHER_LINES, Notes, learn, load, make_recipe, overfit, record, recordings, sequences_of

Learn = Callable[..., tuple[Run, Notes]]


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
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, `recordings` and `others`, and the latter two as `prepared` and `evaluation`."""
    folder = tmp_path_factory.mktemp("house")
    save_tiny(folder / "model")
    recordings(folder / "recordings")
    record(folder / "others", OTHER_BIRDS, OTHER_LINES)
    for source, out in (("recordings", "prepared"), ("others", "evaluation")):
        prepare(str(folder / source), folder / out, model=str(folder / "model"), device="cpu")
    return folder


@pytest.fixture(scope="session")
def family(house: Path) -> Family:
    return open_family(str(house / "model"))


@pytest.fixture(scope="session")
def model(family: Family) -> Any:
    """The untrained model, for looking at; whoever changes one loads their own."""
    return load(family, text_head=True)


@pytest.fixture(scope="session")
def schooled(house: Path, family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base that has heard birds before: it predicts them far better than chance, and far from by heart."""
    folder = tmp_path_factory.mktemp("schooled") / "model"
    schooled, sequences = load(family), sequences_of(family, make_recipe(house))
    assert 0.5 < overfit(family, schooled, family.collate(sequences), steps=10)[-1] < 2
    family.save_model(schooled, folder)
    shutil.copytree(house / "model" / "codec", folder / "codec")
    return folder


@pytest.fixture
def teach(house: Path, tmp_path: Path) -> Learn:
    """Train in the house with some settings changed, each time into a folder of its own."""
    numbers = count()

    def run_once(**changes: dict[str, Any]) -> tuple[Run, Notes]:
        return learn(make_recipe(house, **changes), tmp_path / f"run{next(numbers)}")

    return run_once


@pytest.fixture(scope="session")
def taught(house: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that knows its lines by heart."""
    recipe = make_recipe(
        house,
        adapt={"rank": 16, "alpha": 32, "train_modules": ["audio_head", "audio_embedding"]},
        train={"steps": 120, "learning_rate": 1e-2, "warmup": 5, "schedule": "cosine", "micro_batch_size": 2},
    )
    return learn(recipe, tmp_path_factory.mktemp("taught") / "run")[0]


@pytest.fixture(scope="session")
def engine(taught: Run) -> Engine:
    return open_engine(run=taught.folder, model=None, codec=None, device="cpu")
