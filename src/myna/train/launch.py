"""Start of a training: in this process, or in several processes of this machine whose failures are reported."""

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from myna.core.config import Recipe, dump_recipe
from myna.core.errors import ConfigError, MynaError, TrainingError
from myna.core.progress import ProgressCallback, silent
from myna.core.run_folder import Run, checkpoint_steps, lock_run
from myna.train.callbacks import EvaluationCallback
from myna.train.distributed import SHUTDOWN_TIMEOUT, SHUTDOWN_VARIABLE, ProcessInfo
from myna.train.loop import TrainingObserver, run_training

LAUNCHED_VARIABLE = "MYNA_LAUNCHED"
"""Environment variable of processes started by `launch`, which reports their failures."""
LOST_CONNECTION = "lost touch with the others"
"""Beginning of the message of a rank that stops because another one has stopped."""


def start_training(
    run: Run,
    observer: TrainingObserver | None = None,
    *,
    gpus: int = 1,
    resume: bool = False,
    settings: Sequence[str] = (),
    dry_run: bool = False,
    progress: ProgressCallback = silent,
    open_evaluation: Callable[[Recipe, Path, ProgressCallback], EvaluationCallback] | None = None,
    describe: Callable[[Run, Path], None] | None = None,
) -> Run:
    """Train a new run, or `resume` an existing one, in this process or in `gpus` processes of this machine.

    `settings` are the overrides that a resumed run was opened with. `open_evaluation` makes the callback of a recipe
    that evaluates speech; `describe` writes the model card into the folder of the trained weights.
    """
    if gpus > 1:
        _launch_run(run, gpus, resume=resume, settings=settings, dry_run=dry_run)
        return run
    recipe, process = run.recipe, ProcessInfo.from_environment()
    with report_failures(), ExitStack() as stack:
        evaluation = None
        is_needed = process.is_main and not (resume and run.is_finished)
        if (recipe.evaluates_speech or recipe.speaks_samples) and is_needed:
            assert open_evaluation is not None, "the recipe has speech spoken"
            evaluation = open_evaluation(recipe, run.folder, progress)
        if is_needed and not dry_run:
            # Rank 0 makes the folder and holds its lock; the others never write to it.
            stack.enter_context(lock_run(run.folder, new=not resume))
            if not resume:
                run = Run.create(run.folder, recipe)
        run_training(
            recipe,
            run,
            observer or ProgressObserver(progress),
            evaluation,
            resume=resume,
            dry_run=dry_run,
            describe=partial(describe, run) if describe is not None else None,
        )
    return run


class ProgressObserver:
    """Training observer that reports steps to a progress callback. Messages are in the run's log.txt."""

    def __init__(self, progress: ProgressCallback) -> None:
        self._progress, self._steps = progress, 0

    def on_message(self, text: str) -> None: ...

    def on_start(self, steps: int, done: int) -> None:
        self._steps = steps
        self._progress("training", done, steps)

    def on_metrics(self, row: dict[str, Any]) -> None:
        self._progress("training", row["step"], self._steps)


# Several processes


def _launch_run(run: Run, gpus: int, *, resume: bool, settings: Sequence[str], dry_run: bool) -> None:
    """Train in several processes. Raise an error if they were stopped before anything was saved."""
    before = checkpoint_steps(run)
    with tempfile.TemporaryDirectory(prefix="myna-") as folder:
        if resume:
            arguments = ["--resume", run.folder, *(f"--set={setting}" for setting in settings)]
        else:
            recipe = Path(folder, "recipe.yaml")
            recipe.write_text(dump_recipe(run.recipe), encoding="utf-8")
            arguments = [recipe, "--out", run.folder, *(["--dry-run"] if dry_run else [])]
        finished = launch(gpus, ["train", *arguments], run.recipe.train.device)
    if finished or run.is_finished or checkpoint_steps(run) != before:
        return
    begun = (run.folder / "config.yaml").is_file()
    raise TrainingError(
        "stopped as asked, before anything new was saved",
        hint=f"myna train --resume {run.folder}" if begun else "give the same command again",
    )


def launch(count: int, arguments: Sequence[object], device: str) -> bool:
    """Run `python -m myna ARGUMENTS` in several processes on this machine, and name the one that failed.

    Returns whether they finished: False after a SIGINT or SIGTERM.
    """
    _check_devices(count, device)
    variables = {
        LAUNCHED_VARIABLE: "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count))),
        SHUTDOWN_VARIABLE: str(int(SHUTDOWN_TIMEOUT.total_seconds())),
    }
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    logging.disable()  # our error says more than what the launcher logs of a failure
    try:
        with tempfile.TemporaryDirectory(prefix="myna-") as folder, patch_environment(**variables):
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=count,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="127.0.0.1:0",
                local_addr="127.0.0.1",
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            )
            try:
                launch_agent(config, sys.executable, ["-m", "myna", *map(str, arguments)])
            except SignalException:
                # The processes got the signal too. The launcher does not check whether they failed because of it.
                if failures := _recorded_failures(Path(folder)):
                    raise ChildFailedError("myna", failures) from None
                return False
    except ChildFailedError as error:
        raise _first_failure(error) from None
    finally:
        logging.disable(logging.NOTSET)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return True


def _check_devices(count: int, device: str) -> None:
    world_size = ProcessInfo.from_environment().world_size
    if world_size > 1:
        raise TrainingError(
            f"this is one of {world_size} processes already",
            hint="drop --gpus: it starts processes on a single machine",
        )
    if device not in ("cpu", "auto", "cuda"):
        raise ConfigError(
            f"`train.device: {device}` is one device, for {count} processes", hint="--set train.device=cuda"
        )
    gpus = torch.cuda.device_count()
    if device != "cpu" and count > gpus:
        hint = f"--gpus {gpus}" if gpus else "--set train.device=cpu, for processes without a GPU"
        raise ConfigError(f"{count} GPUs were asked for, there are {gpus} here", hint=hint)


def _first_failure(error: ChildFailedError) -> TrainingError:
    """Return the failure that came first, not that of a rank which only lost its connection."""
    rank, failure = min(
        error.failures.items(), key=lambda item: (LOST_CONNECTION in _failure_message(item[1]), item[1].timestamp)
    )
    message, _, hint = _failure_message(failure).partition("\n  → ")
    if hint:
        return TrainingError(f"rank {rank} stopped: {message.partition(': ')[2]}", hint=hint)
    if message:
        return TrainingError(f"rank {rank} stopped: {message}", hint="its traceback stands above")
    hint = "its last output stands above"
    if failure.exitcode == -signal.SIGKILL:
        hint = "the system kills what takes too much memory: lower train.micro_batch_size or data.row_tokens"
    return TrainingError(f"rank {rank} died (exit code {failure.exitcode})", hint=hint)


def _recorded_failures(folder: Path) -> dict[int, ProcessFailure]:
    """Return failures after a signal, by rank, without ranks that only lost their connection to one that ended
    first."""
    files = sorted((int(file.parent.name), file) for file in folder.rglob("error.json"))
    failures = {rank: ProcessFailure(rank, pid=0, exitcode=1, error_file=str(file)) for rank, file in files}
    return {rank: failure for rank, failure in failures.items() if LOST_CONNECTION not in _failure_message(failure)}


def _failure_message(failure: ProcessFailure) -> str:
    message: Any = failure.message
    return str(message["message"] if isinstance(message, dict) else "")


@contextmanager
def report_failures() -> Iterator[None]:
    """Report to the launcher why this process stops. The death of another rank appears as a broken connection."""
    try:
        yield
    except Exception as error:
        process = ProcessInfo.from_environment()
        if process.world_size == 1:
            raise
        lost = isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
        message = f"rank {process.rank} {LOST_CONNECTION}: {str(error).partition(chr(10))[0]}"
        reason = TrainingError(message, hint="the rank that went first says why") if lost else error
        get_error_handler().record_exception(reason)
        if isinstance(reason, MynaError) and LAUNCHED_VARIABLE in os.environ:
            raise SystemExit(1) from error
        if lost:
            raise reason from error
        raise
