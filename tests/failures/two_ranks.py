"""Two CPU processes that train together, correctly and otherwise.

    torchrun --nproc-per-node 2 -m tests.failures.two_ranks WORKSPACE OUT

trains once bypassing the DDP wrapper, once with a disk that is full for rank 0 alone, and once
correctly. Each rank writes its results to OUT/SCENARIO.RANK.json.
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

from myna.core.errors import MynaError
from myna.core.run_folder import Run
from myna.train import checkpoint
from myna.train.loop import run_training
from myna.train.trainer import Trainer
from tests.failures.tiny_setup import RecordingCallback, make_recipe

SCHEDULE = {
    "steps": 4,
    "batch_size": 4,
    "learning_rate": 2e-3,
    "warmup": 1,
    "schedule": "linear",
    "evaluate_every": 2,
}
Patch = pytest.MonkeyPatch


def correct(_: Patch) -> None: ...


def bypassed(patch: Patch) -> None:
    """Call the module inside the DDP wrapper."""
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


def attempt(workspace: Path, out: Path, scenario: Callable[[Patch], None]) -> None:
    recipe = make_recipe(workspace, data={"evaluation": str(workspace / "evaluation")}, train=SCHEDULE)
    name, rank, callback, error = scenario.__name__, os.environ["RANK"], RecordingCallback(), ""
    run = Run.create(out / name, recipe) if rank == "0" else Run(out / name, recipe)
    with pytest.MonkeyPatch.context() as patch:
        scenario(patch)
        try:
            run_training(recipe, run, callback)
        except MynaError as met:
            error = str(met)
    result = {"error": error, "messages": callback.messages, "rows": callback.rows}
    (out / f"{name}.{rank}.json").write_text(json.dumps(result), encoding="utf-8")


def main(workspace: str, out: str) -> None:
    torch.set_num_threads(1)
    for scenario in (bypassed, full_disk, correct):
        attempt(Path(workspace), Path(out), scenario)


if __name__ == "__main__":
    main(*sys.argv[1:])
