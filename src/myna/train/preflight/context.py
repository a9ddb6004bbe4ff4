"""Shared state of the preflight checks, and how ranks run them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from accelerate.utils import gather_object

from myna.core.config import Recipe
from myna.core.errors import MynaError, TrainingError
from myna.data.dataset import Utterances
from myna.data.loader import Loader, Shard
from myna.models.base import Batch, RenderedSequence
from myna.train.callbacks import preserve_rng_state
from myna.train.loss import LossAccumulator
from myna.train.memory_plan import MemoryPlan, evenly_spaced
from myna.train.trainer import Trainer

MEASURED_SAMPLES = 32
"""Samples per rank whose labels and loss are checked."""

T = TypeVar("T")


@dataclass
class CheckContext:
    """What the checks look at."""

    trainer: Trainer
    loader: Loader[RenderedSequence, Batch]
    evaluation: Loader[RenderedSequence, Batch] | None
    memory: MemoryPlan
    folder: Path | None
    log: Callable[[str], None]
    shard: Shard

    @property
    def recipe(self) -> Recipe:
        return self.trainer.recipe

    @property
    def targets(self) -> Utterances:
        """This rank's targets, or all where there are fewer targets than ranks."""
        targets = self.loader.reference_sampler.targets
        return targets[self.shard.rank :: self.shard.world_size] or targets

    @cached_property
    def samples(self) -> list[RenderedSequence]:
        return [self.loader.sequence(target, 0) for target in evenly_spaced(self.targets, MEASURED_SAMPLES)]

    def render_hint(self, id: str) -> str:
        data, model = self.recipe.data.train, self.recipe.model.source
        return f"look at what is learned: myna render {data} --model {model} --id {id}"

    @torch.no_grad()
    def forward(self, batch: Batch, losses: LossAccumulator) -> None:
        """Add the loss of a batch as in training, without dropout."""
        accelerator = self.trainer.accelerator
        objective = accelerator.unwrap_model(self.trainer.objective).eval()
        with accelerator.autocast():
            losses.add(objective(batch.to(accelerator.device)))
        if self.trainer.sharded:
            objective.reshard()


def on_all_ranks(trainer: Trainer, check: Callable[[], T]) -> list[T]:
    """Results of a check on every rank: an error of one stops all of them with the same message.

    This is the only place where ranks wait for one another, apart from the layers of a sharded model.
    """
    outcome: tuple[T | None, MynaError | None]
    try:
        outcome = check(), None
    except MynaError as error:
        if trainer.accelerator.num_processes == 1:
            raise
        outcome = None, error
    outcomes = gather_object([outcome])
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise TrainingError(f"rank {rank}: {failure.what}", hint=failure.hint) from outcome[1]
    return [result for result, _ in outcomes]


@contextmanager
def preserve_training_state(trainer: Trainer) -> Iterator[None]:
    """Restore random states, module modes and gradients after the block."""
    device = trainer.accelerator.device
    modes = [(module, module.training) for module in trainer.objective.modules()]
    gradients = {name: parameter.grad for name, parameter in trainer.trainable_parameters.items()}
    with preserve_rng_state(device):
        try:
            for parameter in trainer.trainable_parameters.values():
                parameter.grad = None
            yield
        finally:
            for name, parameter in trainer.trainable_parameters.items():
                parameter.grad = gradients[name]
            for module, training in modes:
                module.training = training
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
