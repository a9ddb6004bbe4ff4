"""Preflight checks before the first training step.

Every check is a small function that either passes or raises an error with its cause and what to type. They run on every
rank, on its own targets, and leave nothing behind: a run with them is bit for bit the run without them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from myna.data.loader import Loader, Shard
from myna.models.base import Batch, RenderedSequence
from myna.train.memory_plan import MemoryPlan, format_bytes
from myna.train.preflight.backward import check_largest_batch_fits, check_trainable_parameters
from myna.train.preflight.context import CheckContext, on_all_ranks, preserve_training_state
from myna.train.preflight.data import check_evaluation_unseen, check_references_differ, write_samples
from myna.train.preflight.labels import check_labels_present, check_no_leakage
from myna.train.preflight.loss import (
    InitialLoss,
    check_better_than_chance,
    check_label_alignment,
    check_loss_finite,
    check_not_solved,
    check_stop_labels,
    measure_initial_loss,
)
from myna.train.trainer import Trainer

CHEAP_CHECKS = (
    write_samples,
    check_evaluation_unseen,
    check_references_differ,
    check_trainable_parameters,
    check_labels_present,
)


def run_preflight(
    trainer: Trainer,
    loader: Loader[RenderedSequence, Batch],
    evaluation: Loader[RenderedSequence, Batch] | None,
    log: Callable[[str], None],
    *,
    memory: MemoryPlan,
    folder: Path,
    resumed: bool = False,
) -> None:
    """All checks, cheapest first. `memory` was planned for the largest micro-batch of this rank."""
    start, accelerator = time.perf_counter(), trainer.accelerator
    # Sharded ranks must run the model together: they all look at the same samples.
    shard = Shard() if trainer.sharded else Shard(accelerator.process_index, accelerator.num_processes)
    context = CheckContext(trainer, loader, evaluation, memory, folder, log, shard)
    with preserve_training_state(trainer):
        for check in CHEAP_CHECKS:
            on_all_ranks(trainer, partial(check, context))
        loss = InitialLoss.over_ranks(on_all_ranks(trainer, partial(measure_initial_loss, context)))
        log(loss.message)
        loss_checks = [check_loss_finite, check_stop_labels]
        loss_checks += [] if resumed else [check_not_solved]
        loss_checks += (
            [check_better_than_chance, check_label_alignment] if trainer.recipe.model.check_pretrained else []
        )
        for loss_check in loss_checks:
            loss_check(loss, context)
        if not trainer.recipe.model.check_pretrained:
            log("model.check_pretrained is false: chance and the alignment of the labels are not checked")
        on_all_ranks(trainer, partial(check_no_leakage, context))
        # Sharded ranks run the model together: none can wait for another that has run out of memory.
        fits = partial(check_largest_batch_fits, context)
        peak = fits() if trainer.sharded else max(on_all_ranks(trainer, fits))
    where = "" if accelerator.device.type == "cuda" else ", by the whole process"
    planned, measured = format_bytes(memory.total), format_bytes(peak)
    log(f"memory: {planned} planned, {measured} measured in two steps of the longest pass{where}")
    log(f"preflight passed in {time.perf_counter() - start:.1f} s")
