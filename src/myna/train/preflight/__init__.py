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
from myna.train.preflight import backward, data, loss
from myna.train.preflight.context import CheckContext, on_all_ranks, preserve_training_state
from myna.train.trainer import Trainer


def run_preflight(
    trainer: Trainer,
    loader: Loader[RenderedSequence, Batch],
    evaluation: Loader[RenderedSequence, Batch] | None,
    log: Callable[[str], None],
    *,
    memory: MemoryPlan,
    folder: Path | None,
    trained: bool = False,
) -> None:
    """All checks, cheapest first. `memory` was planned for the largest micro-batch of this rank. Samples are written
    to the `folder`, if there is one. A model that is `trained` may have learned the data already."""
    start, accelerator = time.perf_counter(), trainer.accelerator
    # Sharded ranks must run the model together: they all look at the same samples.
    shard = Shard() if trainer.sharded else Shard(accelerator.process_index, accelerator.num_processes)
    context = CheckContext(trainer, loader, evaluation, memory, folder, log, shard)
    with preserve_training_state(trainer):
        for check in (
            data.write_samples,
            data.check_evaluation_unseen,
            data.check_references_differ,
            backward.check_trainable_parameters,
            data.check_labels_present,
        ):
            on_all_ranks(trainer, partial(check, context))
        initial = loss.InitialLoss.over_ranks(on_all_ranks(trainer, partial(loss.measure_initial_loss, context)))
        log(initial.message)
        loss.check_loss_finite(initial, context)
        loss.check_stop_labels(initial, context)
        if not trained:
            loss.check_not_solved(initial, context)
        if trainer.recipe.model.check_pretrained:
            loss.check_better_than_chance(initial, context)
            loss.check_label_alignment(initial, context)
        else:
            log("model.check_pretrained is false: chance and the alignment of the labels are not checked")
        on_all_ranks(trainer, partial(data.check_no_leakage, context))
        # Sharded ranks run the model together: none can wait for another that has run out of memory.
        fits = partial(backward.check_largest_batch_fits, context)
        peak = fits() if trainer.sharded else max(on_all_ranks(trainer, fits))
    where = "" if accelerator.device.type == "cuda" else ", by the whole process"
    planned, measured = format_bytes(memory.total), format_bytes(peak)
    log(f"memory: {planned} planned, {measured} measured in two steps of the longest pass{where}")
    log(f"preflight passed in {time.perf_counter() - start:.1f} s")
