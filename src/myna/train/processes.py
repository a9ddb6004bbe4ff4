"""One process or many: who starts them, and how they stay of one mind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from myna.config import Recipe
from myna.errors import ConfigError, TrainingError
from myna.train.precision import Precision

if TYPE_CHECKING:
    from myna.train.student import Student

TRACKER_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


def start(recipe: Recipe, precision: Precision, device: torch.device, folder: Path) -> Accelerator:
    """Join the other processes, if torchrun, accelerate or Slurm started any."""
    # Old launchers write -1 for "not distributed", which is what leaving it out means.
    if os.environ.get("LOCAL_RANK") == "-1":
        del os.environ["LOCAL_RANK"]
    # Accelerate remembers the precision of an earlier training in this process, which is not ours.
    AcceleratorState._reset_state()
    trackers = list(recipe.train.trackers)
    try:
        accelerator = Accelerator(
            mixed_precision=precision.mixed_precision,
            cpu=device.type == "cpu",
            log_with=trackers or None,
            project_dir=folder,
        )
    except ValueError as error:
        packages = " ".join(TRACKER_PACKAGES[name] for name in trackers)
        raise ConfigError(f"`train.trackers`: {error}", hint=f"pip install {packages}") from None
    if trackers:
        accelerator.init_trackers(recipe.name)
    return accelerator


def check_same_weights(student: Student) -> None:
    """All ranks must hold the same weights; a wrapped module that was bypassed shows here."""
    if student.accelerator.num_processes == 1:
        return
    sums = torch.stack([parameter.detach().double().sum() for parameter in student.trainables.values()])
    everybody = student.accelerator.gather(sums[None].to(student.accelerator.device))
    strays = (everybody != everybody[0]).any(dim=1).nonzero().flatten().tolist()
    if strays:
        raise TrainingError(
            f"the weights of rank {strays[0]} have parted from rank 0's", hint="report this: gradients were not shared"
        )
