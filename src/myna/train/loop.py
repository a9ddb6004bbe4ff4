"""The loop, read from top to bottom.

Everything is planned in optimizer steps. A step is the same rows however they are shared out: losses are summed, and
divided once by the targets counted over all passes and processes.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils import gather_object

from myna.config import Recipe
from myna.data.dataset import PreparedDataset
from myna.data.loader import Loader, Shard, start_workers
from myna.errors import DataError, TrainingError
from myna.models import open_family
from myna.models.base import Batch, Family, RenderedSequence
from myna.models.quantized import check_quantization
from myna.train.callbacks import EvaluationCallback, SpeechScores, run_callback
from myna.train.checkpoint import Checkpoints, Progress
from myna.train.distributed import ProcessInfo, check_same_weights, shutdown, start
from myna.train.loss import stage_weights, stream_weights
from myna.train.memory_plan import check_room, longest_pass, peak, plan
from myna.train.precision import decide
from myna.train.preflight import preflight
from myna.train.run import Run
from myna.train.schedule import learning_rate
from myna.train.trackers import show
from myna.train.trainer import Trainer

HELD_BACK_BY_PYTHON = ("cuda",)
"""Devices that one thread of Python has to keep busy. Where they learn, batches come from processes; elsewhere threads
will do, which take no seconds to start and no memory."""
BEFORE_ALL = -1
"""A step before the untuned model's evaluation, which is step 0."""


class Watcher(Protocol):
    """Whoever looks on: the command line draws, a test collects."""

    def say(self, text: str) -> None: ...

    def planned(self, steps: int, done: int) -> None: ...

    def stepped(self, row: dict[str, Any]) -> None: ...


def train(
    recipe: Recipe,
    run: Run,
    watcher: Watcher,
    audience: EvaluationCallback | None = None,
    *,
    resume: bool = False,
    dry_run: bool = False,
) -> None:
    """Everything `myna train` does after the recipe is read. A dry run ends before the first step.

    With `speech_eval.asr`, rank 0 is given an audience, and the others none.
    """
    with ExitStack() as at_the_end:
        _train(recipe, run, watcher, audience, at_the_end, resume=resume, dry_run=dry_run)


def _train(
    recipe: Recipe,
    run: Run,
    watcher: Watcher,
    audience: EvaluationCallback | None,
    at_the_end: ExitStack,
    *,
    resume: bool,
    dry_run: bool,
) -> None:
    settings = recipe.train
    if resume and run.is_finished:
        watcher.say(f"{run.folder} is finished: its result is {run.result}")
        return
    assert (audience is not None) == (recipe.evaluates_speech and ProcessInfo.find().leads), (
        "who listens is decided above"
    )

    # Where, and in which numbers.
    device = ProcessInfo.find().device(settings.device)
    precision = decide(settings.precision, device)
    check_quantization(recipe.model.quantization, device)
    accelerator = start(recipe, precision, device, run.folder)
    say = _speaker(run, watcher, loud=accelerator.is_main_process)
    share = Shard(accelerator.process_index, accelerator.num_processes)
    if settings.batch_size % (share.world * settings.micro_batch_size):
        raise TrainingError(
            f"{settings.batch_size} rows a step cannot be shared by {share.world} processes of "
            f"{settings.micro_batch_size} rows a pass",
            hint=f"--set train.batch_size={share.world * settings.micro_batch_size}, or a multiple of it",
        )
    say(f"device {accelerator.device} x {share.world}, precision {precision}")

    # What is learned from.
    family = open_family(recipe.model.source, revision=recipe.model.revision, codec=recipe.model.codec)
    pin = device.type == "cuda"
    loader = make_loader(recipe, family, recipe.data.train, pin=pin)
    evaluation = make_loader(recipe, family, recipe.data.evaluation, pin=pin) if recipe.data.evaluation else None
    _say_data(loader, say)
    if evaluation is not None:
        if evaluation.corpus.prepared.codec_revision != loader.corpus.prepared.codec_revision:
            raise DataError(
                f"{recipe.data.evaluation} was encoded with another codec than {recipe.data.train}",
                hint=f"myna prepare SOURCE --out {recipe.data.evaluation} --model {recipe.model.source}",
            )
        say(f"evaluation: {len(evaluation.pairing.targets)} targets from {recipe.data.evaluation}")
    if device.type in HELD_BACK_BY_PYTHON and recipe.data.workers and not dry_run:
        # Now, so that they are ready when the model is.
        loaders = [loader] if evaluation is None else [loader, evaluation]
        at_the_end.callback(start_workers(loaders, recipe.data.workers).close)

    # What it will take.
    memory = plan(family, recipe, precision, accelerator.device, longest_pass(loader, recipe, share), share.world)
    # Ranks that hold parts of one model come to each layer together, so all recompute what the fullest of them must.
    memory = replace(memory, recomputed=max(gather_object([memory.recomputed])))
    for line in memory.table().splitlines():
        say(line)
    check_room(memory)

    # Who learns.
    student = Trainer.make(recipe, family, precision, accelerator, say, memory.recomputed)

    checkpoints = Checkpoints(student, run, loader, evaluation)
    progress = checkpoints.restore() if resume else Progress(step=0)

    # The plan.
    rows_in_epoch = loader.rows_in_first_epoch()
    steps = settings.steps or math.ceil((settings.epochs or 1) * rows_in_epoch / settings.batch_size)
    evaluate_every = settings.evaluate_every or max(1, steps // 10)
    save_every = settings.save_every or evaluate_every
    listen_every = (recipe.speech_eval.every or evaluate_every) if recipe.evaluates_speech else None
    final_weights = stream_weights(family.streams, recipe.loss)
    say(
        f"{steps} optimizer steps of {settings.batch_size} rows; an epoch is {rows_in_epoch} rows, "
        f"{rows_in_epoch / settings.batch_size:.1f} steps"
    )
    if audience is not None:
        for line in audience.introduce():
            say(line)
        audience.recall(progress.step)
    if resume:
        say(f"going on after step {progress.step}")
    if accelerator.is_main_process:
        run.forget_after(progress.step or BEFORE_ALL)
    watcher.planned(steps, progress.step)
    stream = loader.steps(settings.batch_size, settings.micro_batch_size, share, start=progress.step)
    stopping, enough = False, _is_enough(recipe, progress)

    # Is this what we mean to train?
    preflight(student, loader, evaluation, recipe, say, memory=memory, folder=run.folder, resumed=resume)
    if dry_run:
        say(f"dry run: everything is ready for {steps} steps, and nothing was trained")
        shutdown(student)
        return

    # The base first, so that every later evaluation can be told as a difference from it.
    if evaluation is not None and progress.base_loss is None:
        heard = student.judge(evaluation.once(settings.micro_batch_size, share), final_weights)
        _tell(student, run, watcher, {"step": 0, "evaluation": heard})
        progress = replace(progress, base_loss=heard["loss"])
    if listen_every is not None and not progress.heard_base:
        _tell_heard(student, run, watcher, 0, run_callback(student, audience, 0))
        progress = replace(progress, heard_base=True)

    # Step by step.
    with _asked_to_stop() as stop, closing(stream):
        for step in range(progress.step + 1, steps + 1):
            if stopping or enough:
                break
            began = time.perf_counter()
            passes = next(stream)
            weights = stage_weights(family.streams, recipe, step, steps)
            rate = learning_rate(settings, step, steps)
            tally, norm = student.learn(passes, weights, rate)
            progress = replace(progress, step=step)
            row = {"step": step, "epoch": step * settings.batch_size / rows_in_epoch}
            row |= tally.row(family.streams, weights) | {"gradient_norm": norm, "learning_rate": rate}
            _tell(student, run, watcher, row | {"speed": _speed(passes, time.perf_counter() - began, student)})

            stopping = student.reduce(torch.tensor([float(stop.is_asked)])).item() > 0
            if evaluation is not None and (step % evaluate_every == 0 or step == steps):
                check_same_weights(student)
                heard = student.judge(evaluation.once(settings.micro_batch_size, share), final_weights)
                heard["against_base"] = heard["loss"] - (progress.base_loss or 0.0)
                _tell(student, run, watcher, {"step": step, "evaluation": heard})
                if listen_every is None:
                    progress = _rank(progress, heard["loss"])
            if listen_every is not None and (step % listen_every == 0 or step == steps):
                check_same_weights(student)
                by_ear = run_callback(student, audience, step)
                _tell_heard(student, run, watcher, step, by_ear)
                progress = _rank_heard(progress, by_ear)
            enough = _is_enough(recipe, progress)
            if enough:
                say(f"no better evaluation since step {progress.best_step}: stopping early")
            if step % save_every == 0 or step == progress.best_step or step == steps or stopping or enough:
                check_same_weights(student)
                checkpoints.save(progress)

    # What is left.
    if stopping and progress.step < steps and not enough:
        say(f"stopped after step {progress.step} as asked; go on with: myna train --resume {run.folder}")
    else:
        say(f"saved {checkpoints.publish(progress)}")
        if listen_every is None:
            _say_gain(progress, say)
        for line in audience.conclude() if audience is not None else ():
            say(line)
    shutdown(student)


def make_loader(recipe: Recipe, family: Family, folder: Path, *, pin: bool = False) -> Loader[RenderedSequence, Batch]:
    """What a prepared folder gives to learn from. `pin` for batches that go to a CUDA card."""
    corpus = PreparedDataset.open(folder)
    prepared = corpus.prepared
    if not family.accepts(prepared.codebooks, prepared.codebook_size, prepared.frame_rate):
        raise DataError(
            f"{folder} was prepared with another kind of codec than {family.source} speaks",
            hint=f"myna prepare SOURCE --out {folder} --model {family.source}",
        )
    loader = Loader(
        corpus,
        recipe.data,
        # Not a function of our own, which could not be sent to another process.
        render=partial(
            family.render, supervise_text=recipe.needs_text_head, supervise_references=recipe.loss.supervise_references
        ),
        collate=family.collate,
        ruler=family,
        seed=recipe.train.seed,
        finish=(lambda batch: batch.pin()) if pin else None,
    )
    loader.check_lengths()
    return loader


def _is_enough(recipe: Recipe, progress: Progress) -> bool:
    """Whether early stopping has seen, or heard, enough evaluations that were no better."""
    patience = recipe.speech_eval.patience if recipe.evaluates_speech else recipe.train.early_stopping_patience
    return patience is not None and progress.evaluations_since_best >= patience


def _rank(progress: Progress, loss: float) -> Progress:
    if progress.best_loss is None or loss < progress.best_loss:
        return replace(progress, best_step=progress.step, best_loss=loss, evaluations_since_best=0)
    return replace(progress, evaluations_since_best=progress.evaluations_since_best + 1)


def _rank_heard(progress: Progress, heard: SpeechScores) -> Progress:
    """By ear there may be no best one yet, and until then nobody loses patience: a model that is trained from nothing
    does not find its ends at first. Nor does anybody while it goes up, however slowly."""
    if heard.is_best:
        return replace(progress, best_step=progress.step, evaluations_since_best=0)
    if progress.best_step is None:
        return progress
    if heard.goes_up:
        return replace(progress, evaluations_since_best=0)
    return replace(progress, evaluations_since_best=progress.evaluations_since_best + 1)


def _say_gain(progress: Progress, say: Callable[[str], None]) -> None:
    """Whether the training was worth it, as far as a loss can tell."""
    if progress.base_loss is None or progress.best_loss is None:
        return
    if progress.best_loss >= progress.base_loss:
        say(
            f"no evaluation was better than the untuned model's {progress.base_loss:.4f}; the best was "
            f"{progress.best_loss:.4f} at step {progress.best_step}. The data may not fit the model, or the rate is off"
        )
    else:
        say(
            f"evaluation loss {progress.best_loss:.4f} at step {progress.best_step}, "
            f"{progress.base_loss - progress.best_loss:.4f} below the untuned model's"
        )


def _say_data(loader: Loader[RenderedSequence, Batch], say: Callable[[str], None]) -> None:
    pairing, corpus = loader.pairing, loader.corpus
    say(f"{len(pairing.targets)} targets, {pairing.hours:.2f} h, {pairing.speakers} speakers from {corpus.folder}")
    for note in corpus.notes:
        say(note)
    if loader.settings.reference != "none" and pairing.unpaired.without_reference:
        names = pairing.unpaired.without_reference
        say(f"{len(names)} of them have no reference and are learned without ({names[0].id} first)")
    if pairing.unpaired.outside_seconds:
        names = pairing.unpaired.outside_seconds
        say(f"{len(names)} targets lie outside data.seconds and are left out ({names[0].id} first)")


def _speaker(run: Run, watcher: Watcher, *, loud: bool) -> Callable[[str], None]:
    def say(text: str) -> None:
        if loud:
            run.log(text)
            watcher.say(text)

    return say


def _tell(student: Trainer, run: Run, watcher: Watcher, row: dict[str, Any]) -> None:
    """One row to the run, the trackers and whoever watches."""
    if not student.accelerator.is_main_process:
        return
    run.record(row)
    watcher.stepped(row)
    kind = next((kind for kind in ("evaluation", "speech_eval") if kind in row), None)
    prefix, numbers = (f"{kind}/", row[kind]) if kind is not None else ("", row | row["speed"])
    student.accelerator.log(
        {prefix + key: value for key, value in numbers.items() if isinstance(value, int | float)}, step=row["step"]
    )


def _tell_heard(student: Trainer, run: Run, watcher: Watcher, step: int, heard: SpeechScores) -> None:
    _tell(student, run, watcher, {"step": step, "speech_eval": heard.row})
    show(student.accelerator, heard.samples, step)


def _speed(passes: list[Batch], seconds: float, student: Trainer) -> dict[str, float]:
    """What the clock and the memory say: the only part of a row that is not the same every time."""
    world = student.accelerator.num_processes
    return {
        "seconds": seconds,
        "tokens_per_second": world * sum(batch.tokens for batch in passes) / seconds,
        "audio_per_second": world * sum(batch.target_seconds for batch in passes) / seconds,
        "memory_gib": peak(student.accelerator.device) / 2**30,
    }


class _Stop:
    is_asked = False


@contextmanager
def _asked_to_stop() -> Iterator[_Stop]:
    """SIGINT and SIGTERM ask for a stop at the end of the step; a second SIGINT does not wait."""
    stop = _Stop()

    def ask(number: int, _: Any) -> None:
        if stop.is_asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.is_asked = True

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:
        # Not in the main thread: whoever runs us there has signals of their own.
        yield stop
        return
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
