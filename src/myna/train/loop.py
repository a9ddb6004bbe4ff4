"""Training loop, to be read from top to bottom.

Everything is planned in optimizer steps. A step is the same rows however they are split into micro-batches and ranks:
losses are summed, and divided once by the targets counted over all of them.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from myna.core.config import Recipe
from myna.core.errors import DataError, TrainingError
from myna.core.run_folder import Run, checkpoint_steps, finite_or_none
from myna.data.dataset import PreparedDataset
from myna.data.loader import Loader, Shard, start_workers
from myna.models import open_family
from myna.models.base import Batch, Family, RenderedSequence
from myna.models.quantized import check_quantization
from myna.train.callbacks import EvaluationCallback, SpeechScores, log_samples, run_callback
from myna.train.checkpoint import CheckpointManager, TrainingProgress
from myna.train.distributed import ProcessInfo, init_accelerator, shutdown_warning
from myna.train.loss import SAFE_LEARNING_RATE, stage_weights, term_weights
from myna.train.memory_plan import check_weights_fit, largest_batch, peak_memory, plan_memory
from myna.train.optimizer import learning_rate, warmup_steps
from myna.train.precision import choose_precision
from myna.train.preflight import run_preflight
from myna.train.run_report import RunReport
from myna.train.trainer import Trainer, start_from_adapter

WORKER_PROCESS_DEVICES = ("cuda",)
"""Devices whose batches are built by worker processes, since training keeps the main Python thread busy."""
BEFORE_BASE_EVALUATION = -1
"""Step number before the base model's evaluation, which is step 0."""


class TrainingObserver(Protocol):
    def on_message(self, text: str) -> None: ...

    def on_start(self, steps: int, done: int) -> None: ...

    def on_metrics(self, row: dict[str, Any]) -> None: ...


@dataclass(slots=True)
class _Logger:
    """Messages and metrics of rank 0, for the run folder, the trackers and the observer."""

    run: Run
    observer: TrainingObserver
    accelerator: Accelerator
    writes: bool = True
    """Whether anything is written; a dry run writes nothing."""
    report: RunReport | None = None
    """Lines and page about the steps, once they begin."""

    def message(self, text: str) -> None:
        if self.accelerator.is_main_process:
            if self.writes:
                self.run.log(text)
            self.observer.on_message(text)

    def metrics(self, row: dict[str, Any]) -> None:
        if not self.accelerator.is_main_process:
            return
        self.run.log_metrics(row)
        self.observer.on_metrics(row)
        if self.report is not None and (line := self.report.add(row)) is not None:
            self.message(line)
        kind = next((kind for kind in ("evaluation", "speech_eval") if kind in row), None)
        prefix, values = (f"{kind}/", row[kind]) if kind is not None else ("", row | row["speed"])
        self.accelerator.log(
            {prefix + key: value for key, value in values.items() if isinstance(value, int | float)}, step=row["step"]
        )

    def speech_scores(self, step: int, scores: SpeechScores) -> None:
        if scores.row:  # samples have no scores
            self.metrics({"step": step, "speech_eval": scores.row})
        log_samples(self.accelerator, scores.samples, step)


def run_training(
    recipe: Recipe,
    run: Run,
    observer: TrainingObserver,
    callback: EvaluationCallback | None = None,
    *,
    resume: bool = False,
    dry_run: bool = False,
    describe: Callable[[Path], None] | None = None,
) -> None:
    """Train into the run folder. A dry run ends before the first step, and writes nothing.

    With `speech_eval`, rank 0 needs a callback, and the others none. `describe` adds a model card to the result
    before it gets its final name.
    """
    with ExitStack() as resources:
        settings, process = recipe.train, ProcessInfo.from_environment()
        if resume and run.is_finished:
            observer.on_message(f"{run.folder} is finished: its result is {run.result}")
            return
        speaks = recipe.evaluates_speech or recipe.speaks_samples
        assert (callback is not None) == (speaks and process.is_main), "rank 0 has the callback"

        # Device and precision.
        device = process.device(settings.device)
        precision = choose_precision(settings.precision, device)
        check_quantization(recipe.model.quantization, device)
        accelerator = init_accelerator(recipe, precision, device, run.folder, track=not dry_run)
        logger = _Logger(run, observer, accelerator, writes=not dry_run)
        log = logger.message
        shard = Shard(accelerator.process_index, accelerator.num_processes)
        if settings.batch_size % (shard.world_size * settings.micro_batch_size):
            raise TrainingError(
                f"{settings.batch_size} rows a step cannot be shared by {shard.world_size} processes of "
                f"{settings.micro_batch_size} rows a micro-batch",
                hint=f"--set train.batch_size={shard.world_size * settings.micro_batch_size}, or a multiple of it",
            )
        log(f"device {accelerator.device} x {shard.world_size}, precision {precision}")
        if warning := shutdown_warning():
            log(warning)

        # Data.
        family = open_family(recipe.model.source, revision=recipe.model.revision, codec=recipe.model.codec)
        pin = device.type == "cuda"
        loader = make_loader(recipe, family, recipe.data.train, pin=pin)
        evaluation = make_loader(recipe, family, recipe.data.evaluation, pin=pin) if recipe.data.evaluation else None
        _log_data(loader, log)
        if evaluation is not None:
            if evaluation.dataset.info.codec_revision != loader.dataset.info.codec_revision:
                raise DataError(
                    f"{recipe.data.evaluation} was encoded with another codec than {recipe.data.train}",
                    hint=f"myna prepare SOURCE --out {recipe.data.evaluation} --model {recipe.model.source}",
                )
            log(f"evaluation: {len(evaluation.reference_sampler.targets)} targets from {recipe.data.evaluation}")
        if device.type in WORKER_PROCESS_DEVICES and recipe.data.workers and not dry_run:
            # Started now, so that they are ready when the model is.
            loaders = [loader] if evaluation is None else [loader, evaluation]
            resources.callback(start_workers(loaders, recipe.data.workers).close)

        # Memory plan.
        largest = largest_batch(loader, recipe, shard)
        memory = plan_memory(family, recipe, precision, accelerator.device, largest, shard.world_size)
        # Sharded ranks run each layer together, so all recompute what the fullest of them must.
        memory = replace(memory, recomputed=max(gather_object([memory.recomputed])))
        for line in memory.table().splitlines():
            log(line)
        check_weights_fit(memory)

        # Model, optimizer and checkpoints.
        trainer = Trainer.from_recipe(recipe, family, precision, accelerator, log, memory.recomputed)
        checkpoints = CheckpointManager(trainer, run, loader, evaluation)
        progress = checkpoints.restore() if resume else TrainingProgress(step=0)
        if recipe.adapt.init is not None and progress.step == 0:
            start_from_adapter(trainer, checkpoints.inputs, log)

        # Schedule.
        rows_in_epoch = loader.rows_in_first_epoch()
        steps = settings.steps or math.ceil((settings.epochs or 1) * rows_in_epoch / settings.batch_size)
        evaluate_every = settings.evaluate_every or max(1, steps // 10)
        save_every = settings.save_every or evaluate_every
        speech_every = recipe.speech_eval.every or (evaluate_every if recipe.evaluates_speech else save_every)
        final_weights = term_weights(family.loss_terms, recipe.loss)
        steps_in_epoch, utterances = rows_in_epoch / settings.batch_size, len(loader.reference_sampler.targets)
        log(
            f"{steps} optimizer steps of {settings.batch_size} rows, about {utterances / steps_in_epoch:.0f} "
            f"utterances; an epoch is {utterances} utterances, {rows_in_epoch} rows, {steps_in_epoch:.1f} steps"
        )
        if steps_in_epoch < 1:
            log(
                f"WARNING: a step holds {1 / steps_in_epoch:.1f} epochs, so that few steps see the data often: "
                f"--set train.batch_size={max(1, rows_in_epoch // 8)}, or a lower data.row_tokens"
            )
        if int(settings.warmup) > steps:
            warmup = warmup_steps(settings, steps)
            log(f"train.warmup is longer than the run: it is shortened to {warmup} of {steps} steps")
        if callback is not None:
            for line in callback.describe():
                log(line)
            callback.restore(progress.step)
        stopping, early_stop = False, _is_early_stop(recipe, progress)
        if resume:
            log(f"going on after step {progress.step}")
        _check_length(recipe, run, progress, steps, is_early_stop=early_stop)
        if accelerator.is_main_process and not dry_run:
            run.truncate_metrics(progress.step or BEFORE_BASE_EVALUATION)
        observer.on_start(steps, progress.step)
        stream = loader.steps(settings.batch_size, settings.micro_batch_size, shard, start=progress.step)

        # Preflight checks.
        run_preflight(
            trainer,
            loader,
            evaluation,
            log,
            memory=memory,
            folder=None if dry_run else run.folder,
            trained=resume or recipe.adapt.init is not None,
        )
        if dry_run:
            log(f"dry run: everything is ready for {steps} steps, and nothing was trained or written")
            trainer.shutdown()
            return
        if accelerator.is_main_process:
            if resume:
                run.save_length()
            logger.report = RunReport(run, steps, progress.step)

        # The base model, so that later evaluations can be compared with it.
        if evaluation is not None and progress.base_loss is None and progress.step == 0:
            losses = trainer.evaluate(evaluation.evaluation_batches(settings.micro_batch_size, shard), final_weights)
            logger.metrics({"step": 0, "evaluation": losses})
            progress = replace(progress, base_loss=finite_or_none(losses["loss"]))
        if speaks and not progress.base_speech_evaluated:
            logger.speech_scores(0, run_callback(trainer, callback, 0))
            progress = replace(progress, base_speech_evaluated=True)

        # Optimizer steps.
        with _stop_on_signal() as stop, closing(stream):
            for step in range(progress.step + 1, steps + 1):
                if stopping or early_stop:
                    break
                start = time.perf_counter()
                batches = next(stream)
                weights = stage_weights(family.loss_terms, recipe, step, steps)
                rate = learning_rate(settings, step, steps)
                try:
                    step_losses, norm = trainer.train_step(batches, weights, rate)
                except TrainingError as error:
                    raise TrainingError(f"step {step}: {error.what}", hint=error.hint) from error
                trainer.divergence.update(step, step_losses, norm, family.chance, weights)
                progress = replace(progress, step=step)
                row: dict[str, Any] = {"step": step, "epoch": step * settings.batch_size / rows_in_epoch}
                row |= step_losses.metrics(family.loss_terms, weights) | {"gradient_norm": norm, "learning_rate": rate}
                logger.metrics(row | {"speed": _speed(batches, time.perf_counter() - start, accelerator)})
                if not math.isfinite(norm):
                    log(
                        f"step {step} was skipped: its gradient overflows in {precision.name}; the loss scale is halved"
                    )
                _check_learning(trainer, run, progress)

                stopping = trainer.reduce(torch.tensor([float(stop.requested)])).item() > 0
                if evaluation is not None and (step % evaluate_every == 0 or step == steps):
                    trainer.check_same_weights()
                    held_out = evaluation.evaluation_batches(settings.micro_batch_size, shard)
                    losses = trainer.evaluate(held_out, final_weights)
                    if progress.base_loss is not None:
                        losses["against_base"] = losses["loss"] - progress.base_loss
                    logger.metrics({"step": step, "evaluation": losses})
                    if not math.isfinite(losses["loss"]):
                        log(f"the evaluation loss of step {step} is not a number: it cannot be the best")
                    if not recipe.evaluates_speech:
                        progress = _update_progress(progress, losses["loss"])
                if speaks and (step % speech_every == 0 or step == steps):
                    trainer.check_same_weights()
                    scores = run_callback(trainer, callback, step)
                    logger.speech_scores(step, scores)
                    if recipe.evaluates_speech:
                        progress = _update_speech_progress(progress, scores)
                early_stop = _is_early_stop(recipe, progress)
                if early_stop:
                    log(f"no better evaluation since step {progress.best_step}: stopping early")
                if step % save_every == 0 or step == progress.best_step or step == steps or stopping or early_stop:
                    trainer.check_same_weights()
                    checkpoints.save(progress)

        # Result.
        _check_learning(trainer, run, progress, is_last=progress.step == steps and not early_stop)
        if stopping and progress.step < steps and not early_stop:
            log(f"stopped after step {progress.step} as asked; go on with: myna train --resume {run.folder}")
        else:
            log(f"saved {checkpoints.publish(progress, describe)}")
            if not recipe.evaluates_speech:
                _log_gain(progress, "the untuned model" if recipe.adapt.init is None else recipe.adapt.init, log)
            for line in callback.summarize() if callback is not None else ():
                log(line)
        if logger.report is not None:
            logger.report.write()
        trainer.shutdown()


def make_loader(recipe: Recipe, family: Family, folder: Path, *, pin: bool = False) -> Loader[RenderedSequence, Batch]:
    """Packed-row data loader of a prepared folder; `pin` for batches that go to a GPU."""
    corpus = PreparedDataset.open(folder)
    prepared = corpus.info
    if not family.accepts_codes(prepared.codebooks, prepared.codebook_size, prepared.frame_rate):
        raise DataError(
            f"{folder} was prepared with another kind of codec than {family.source} speaks",
            hint=f"myna prepare SOURCE --out {folder} --model {family.source}",
        )
    loader = Loader(
        corpus,
        recipe.data,
        # A local function could not be pickled for worker processes.
        render=partial(
            family.render, supervise_text=recipe.needs_text_head, supervise_references=recipe.loss.supervise_references
        ),
        collate=family.collate,
        length_estimator=family,
        seed=recipe.train.seed,
        finish=(lambda batch: batch.pin_memory()) if pin else None,
    )
    loader.check_lengths()
    return loader


def render_targets(recipe: Recipe, *, id: str | None = None, count: int = 1) -> list[RenderedSequence]:
    """Render targets of the recipe's training data as the model sees them: the first `count`, or the one named `id`."""
    data = recipe.data.train
    loader = make_loader(recipe, open_family(recipe.model.source), data)
    targets = loader.reference_sampler.targets
    if id is not None:
        targets = targets.with_id(id)
        if not targets:
            raise DataError(f"{data} has no target {id}", hint="the ids are in its manifest.jsonl")
    return [loader.sequence(target, epoch=0) for target in targets[:count]]


def _is_early_stop(recipe: Recipe, progress: TrainingProgress) -> bool:
    """Whether enough evaluations in a row were no better than the best."""
    patience = recipe.speech_eval.patience if recipe.evaluates_speech else recipe.train.early_stopping_patience
    return patience is not None and progress.evaluations_since_best >= patience


def _check_length(recipe: Recipe, run: Run, progress: TrainingProgress, steps: int, *, is_early_stop: bool) -> None:
    """Check a resumed run's length: it may change, but not to steps already passed, nor beyond its patience."""
    if progress.step > steps:
        raise TrainingError(
            f"{run.folder} is at step {progress.step} already, and {steps} are asked for",
            hint=f"--set train.steps={progress.step} or more, or go on from an earlier step in a run of its own: "
            f"--set adapt.init={run.folder}/checkpoints/step-NUMBER",
        )
    if progress.step and is_early_stop and progress.step < steps and run.is_replanned:
        key = "speech_eval.patience" if recipe.evaluates_speech else "train.early_stopping_patience"
        raise TrainingError(
            f"{run.folder} has stopped early: no evaluation was better since step {progress.best_step}",
            hint=f"have more patience: --set {key}={2 * progress.evaluations_since_best}, or null for no end but the "
            "number of steps",
        )


def _check_learning(trainer: Trainer, run: Run, progress: TrainingProgress, *, is_last: bool = False) -> None:
    """Stop a run that no longer learns; at its end, only if its result is not an earlier and better checkpoint."""
    publishes_best = progress.best_step is not None and trainer.recipe.publishes_best
    if (problem := trainer.divergence.diagnose(is_last=is_last and not publishes_best)) is None:
        return
    kept = ", ".join(map(str, checkpoint_steps(run)))
    rate = min(trainer.recipe.train.learning_rate / 10, SAFE_LEARNING_RATE)
    raise TrainingError(
        f"step {progress.step}: the run has diverged and learns nothing any more: {problem}",
        hint=f"start a run of its own with a lower rate, such as --set train.learning_rate={rate:g}"
        + (f". The checkpoints of step {kept} are kept in {run.folder / 'checkpoints'}" if kept else ""),
    )


def _update_progress(progress: TrainingProgress, loss: float) -> TrainingProgress:
    before = finite_or_none(progress.best_loss)
    if math.isfinite(loss) and (before is None or loss < before):
        return replace(progress, best_step=progress.step, best_loss=loss, evaluations_since_best=0)
    return replace(progress, evaluations_since_best=progress.evaluations_since_best + 1)


def _update_speech_progress(progress: TrainingProgress, scores: SpeechScores) -> TrainingProgress:
    """Update the best speech evaluation. While there is none, patience does not run out: a model trained from scratch
    does not end its sentences at first. Nor does it run out while the score still rises."""
    if scores.is_best:
        return replace(progress, best_step=progress.step, evaluations_since_best=0)
    if progress.best_step is None:
        return progress
    return replace(progress, evaluations_since_best=0 if scores.is_highest else progress.evaluations_since_best + 1)


def _log_gain(progress: TrainingProgress, start: str, log: Callable[[str], None]) -> None:
    """Log whether the best evaluation loss is below that of the model the training started from."""
    if progress.base_loss is None or progress.best_loss is None:
        return
    if progress.best_loss >= progress.base_loss:
        log(
            f"no evaluation was better than {start}'s {progress.base_loss:.4f}; the best was "
            f"{progress.best_loss:.4f} at step {progress.best_step}. The data may not fit the model, or the rate is off"
        )
    else:
        log(
            f"evaluation loss {progress.best_loss:.4f} at step {progress.best_step}, "
            f"{progress.base_loss - progress.best_loss:.4f} below {start}'s"
        )


def _log_data(loader: Loader[RenderedSequence, Batch], log: Callable[[str], None]) -> None:
    pairing, corpus = loader.reference_sampler, loader.dataset
    log(f"{len(pairing.targets)} targets, {pairing.hours:.2f} h, {pairing.speakers} speakers from {corpus.folder}")
    for note in corpus.notes:
        log(note)
    if loader.settings.reference != "none" and (names := pairing.without_reference):
        log(f"{len(names)} of them have no reference and are learned without ({names[0].id} first)")
    if names := pairing.outside_seconds:
        log(f"{len(names)} targets lie outside data.seconds and are left out ({names[0].id} first)")


def _speed(batches: list[Batch], seconds: float, accelerator: Accelerator) -> dict[str, float]:
    """Throughput and memory: the only part of a metrics row that differs between identical runs."""
    world_size = accelerator.num_processes
    return {
        "seconds": seconds,
        "tokens_per_second": world_size * sum(batch.tokens for batch in batches) / seconds,
        "audio_per_second": world_size * sum(batch.target_seconds for batch in batches) / seconds,
        "memory_gib": peak_memory(accelerator.device) / 2**30,
    }


@contextmanager
def _stop_on_signal() -> Iterator[SimpleNamespace]:
    """Stop at the end of the step on SIGINT or SIGTERM; a second SIGINT interrupts at once."""
    stop = SimpleNamespace(requested=False)

    def request(number: int, _: Any) -> None:
        if stop.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.requested = True

    before: dict[int, Any] = {}
    with suppress(ValueError):  # not in the main thread, where signals belong to the caller
        before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
