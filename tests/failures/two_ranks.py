"""Two processes without a card that train together, honestly and otherwise.

    torchrun --nproc-per-node 2 -m tests.failures.two_ranks HOUSE OUT

trains once around the wrapper that shares gradients, once with a disk that is full for rank 0 alone, and once as it
should be, after which the processes part. Each rank leaves what it met in OUT/SCENARIO.RANK.json.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from myna.errors import MynaError
from myna.train import checkpoint
from myna.train.loop import train
from myna.train.run import Run
from myna.train.trainer import Trainer
from tests.failures.house import Notes, make_recipe

SCHEDULE = {
    "steps": 4,
    "batch_size": 4,
    "learning_rate": 2e-3,
    "warmup": 1,
    "schedule": "linear",
    "evaluate_every": 2,
}
Patch = pytest.MonkeyPatch


def honest(_: Patch) -> None: ...


def bypassed(patch: Patch) -> None:
    """The module inside the wrapper is called, as one does who needs its attributes."""
    whole = Trainer.backward

    def around(self: Trainer, *given: Any) -> None:
        wrapped = self.objective
        self.objective = self.accelerator.unwrap_model(wrapped)
        self.objective.no_sync = wrapped.no_sync
        try:
            whole(self, *given)
        finally:
            self.objective = wrapped

    patch.setattr(Trainer, "backward", around)


def full_disk(patch: Patch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if os.environ["RANK"] == "0":
        patch.setattr(checkpoint, "save_file", refuse)


def attempt(house: Path, out: Path, scenario: Callable[[Patch], None]) -> None:
    recipe = make_recipe(house, data={"evaluation": str(house / "evaluation")}, train=SCHEDULE)
    name, rank, notes, error = scenario.__name__, os.environ["RANK"], Notes(), ""
    run = Run.create(out / name, recipe) if rank == "0" else Run(out / name, recipe)
    with pytest.MonkeyPatch.context() as patch:
        scenario(patch)
        try:
            train(recipe, run, notes)
        except MynaError as met:
            error = str(met)
    told = {"error": error, "said": notes.said, "rows": notes.rows}
    (out / f"{name}.{rank}.json").write_text(json.dumps(told), encoding="utf-8")


def main(house: str, out: str) -> None:
    torch.set_num_threads(1)
    for scenario in (bypassed, full_disk, honest):
        attempt(Path(house), Path(out), scenario)


if __name__ == "__main__":
    main(*sys.argv[1:])
