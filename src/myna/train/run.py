"""Run folder: everything a training writes.

config.yaml      the resolved recipe, enough to train or synthesize again
metrics.jsonl    one line per optimizer step and per evaluation
log.txt          messages
adapter/         the LoRA, a plain PEFT folder (or model/ after full training); it appears when the run is finished
checkpoints/     the state to resume from, see checkpoint.py
speech_eval/     samples and scores of the speech evaluations, where the recipe has them
best/            the checkpoint with the best speech, itself a run to synthesize with
.lock            held by the process that trains; .lock.json says which
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

from myna.core.config import Recipe, dump_recipe, load_recipe
from myna.core.errors import TrainingError
from myna.core.io import LOCK_FILE, acquire_lock, is_unused, save_text
from myna.core.run_folder import RECIPE_FILE, RunFolder, finite_or_none

LENGTH_SETTINGS = ("train.steps", "train.epochs", "train.early_stopping_patience", "speech_eval.patience")
"""Settings for the length of a training. Changed on resume, they stay changed, since config.yaml keeps them."""
CHANGEABLE_ON_RESUME = (
    *LENGTH_SETTINGS,
    "name",
    "model.check_pretrained",
    # Checked by their content.
    "data.train",
    "data.evaluation",
    "data.workers",
    "train.device",
    "train.micro_batch_size",
    "train.gradient_checkpointing",
    "train.compile",
    "train.fused_lora",
    "train.save_every",
    "train.keep_checkpoints",
    "train.trackers",
    # Checked by their content, wherever they lie.
    "speech_eval.asr",
    "speech_eval.speaker_encoder",
    "speech_eval.batch_size",
)
"""Settings that may change on resume: they do not change what a run learns, apart from its length."""

LOCK_HOLDER_FILE = ".lock.json"
CONTINUED_FILE = ".continued"
"""File that exists while a finished run is trained further, when its saved weights are still those of fewer steps."""
FILES_BEFORE_FIRST_STEP = ("config.yaml", "log.txt", "preflight.txt", LOCK_FILE, LOCK_HOLDER_FILE)
"""Files of a failed start, which a new start may overwrite."""


class Run(RunFolder):
    """Folder of a training and its recipe, as the training writes it."""

    @classmethod
    def create(cls, folder: Path, recipe: Recipe) -> Self:
        _check_unused(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_text(folder / RECIPE_FILE, dump_recipe(recipe))
        except OSError as error:
            raise TrainingError(f"cannot write to {folder}: {error}", hint="choose another folder with --out") from None
        return cls(folder, recipe)

    @classmethod
    def open(cls, folder: Path, settings: list[str] | None = None) -> Self:
        """Open an existing run; `settings` on top of its recipe may not change what it learns."""
        run = super().open(folder)
        changed_run = cls(folder, load_recipe(folder / RECIPE_FILE, settings))
        changed = changed_settings(run.recipe, changed_run.recipe)
        if changed:
            raise TrainingError(
                f"{folder} cannot go on with another {' and '.join(changed)}: it would learn something else",
                hint=f"drop it, or train on in a run of its own: --set adapt.init={folder}. What may change: "
                f"{', '.join(sorted(CHANGEABLE_ON_RESUME))}",
            )
        return changed_run

    @property
    def is_finished(self) -> bool:
        """Whether the result exists, from as many steps as are planned now."""
        return self.result.is_dir() and not (self.folder / CONTINUED_FILE).exists() and not self.is_replanned

    @property
    def is_replanned(self) -> bool:
        """Whether the recipe has another length than the run's config.yaml."""
        config = self.folder / "config.yaml"
        return config.is_file() and _length(load_recipe(config)) != _length(self.recipe)

    def save_length(self) -> None:
        """Save a new length of training in config.yaml, for the next time the run is resumed."""
        if not self.is_replanned:
            return
        config = self.folder / "config.yaml"
        with _training_errors(self.folder):
            if self.result.is_dir():
                # First, since a kill may come before the next line: the old result is then published again.
                (self.folder / CONTINUED_FILE).touch()
            overrides = [f"{key}={json.dumps(value)}" for key, value in _length(self.recipe).items()]
            save_text(config, dump_recipe(load_recipe(config, overrides)))

    def log(self, text: str) -> None:
        self._append(self.folder / "log.txt", text)

    def log_metrics(self, row: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl. Numbers that are not finite become null, since JSON cannot hold them."""
        self._append(self.metrics, json.dumps(finite_or_none(row), allow_nan=False))

    def truncate_metrics(self, step: int) -> None:
        """Drop metrics of later steps and incomplete lines: the run resumes after `step`."""
        if not self.metrics.exists():
            return
        kept = takewhile(lambda line: line[1] is not None and line[1]["step"] <= step, self.metric_lines())
        with _training_errors(self.folder):
            save_text(self.metrics, "".join(line for line, _ in kept))

    def _append(self, path: Path, line: str) -> None:
        with _training_errors(self.folder), path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


@contextmanager
def lock_run(folder: Path, *, new: bool) -> Iterator[None]:
    """Lock a run folder for writing. The operating system releases the lock when the process ends, however it ends.

    `new` makes the folder; one that holds something other than a run is not touched.
    """
    if new and not (folder / LOCK_FILE).exists():
        _check_unused(folder)
        # A run has a lock before it has a recipe: a config.yaml alone is not a run's.
        if folder.is_dir() and [entry.name for entry in folder.iterdir()] == ["config.yaml"]:
            raise TrainingError(
                f"{folder} holds a config.yaml that is no run's",
                hint="choose another folder with --out, or move that file away",
            )
    holder = folder / LOCK_HOLDER_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = acquire_lock(folder / LOCK_FILE, lambda: _held_error(folder, new=new))
    except OSError as error:
        hint = "choose another folder with --out" if new else "make it writable, or resume a copy of it"
        raise TrainingError(f"cannot write to {folder}: {error.strerror or error}", hint=hint) from None
    with lock:
        since = datetime.now().isoformat(" ", "seconds")
        with _training_errors(folder):
            save_text(holder, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}))
        try:
            yield
        finally:
            holder.unlink(missing_ok=True)


def _held_error(folder: Path, *, new: bool) -> TrainingError:
    try:
        holder = json.loads((folder / LOCK_HOLDER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it is just being taken or released
        return TrainingError(f"{folder} is being trained by another process", hint="wait until it has ended")
    host, pid = holder["host"], holder["pid"]
    where = "" if host == socket.gethostname() else f" on {host}"
    elsewhere = ", or choose another folder with --out" if new else ""
    return TrainingError(
        f"{folder} is being trained already, by process {pid} on {host} since {holder['since']}",
        hint=f"wait until it has ended, or have it save and stop: kill {pid}{where}{elsewhere}",
    )


def _check_unused(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise TrainingError(f"{folder} is a file", hint="choose another folder with --out")
    if folder.exists() and not is_unused(folder, FILES_BEFORE_FIRST_STEP):
        raise TrainingError(
            f"{folder} already holds a run", hint="choose another folder with --out, or move the old one away"
        )


def _length(recipe: Recipe) -> dict[str, Any]:
    settings = _flatten(recipe.model_dump(mode="json"))
    return {key: settings[key] for key in LENGTH_SETTINGS}


def changed_settings(before: Recipe, now: Recipe) -> list[str]:
    """Return the keys that differ between two recipes and must not change on resume."""
    old, new = _flatten(before.model_dump(mode="json")), _flatten(now.model_dump(mode="json"))
    changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key) and key not in CHANGEABLE_ON_RESUME]
    # The ASR model may move, but not be added or removed: the base model can only be evaluated at the beginning.
    return changed + ["speech_eval.asr"] * (before.evaluates_speech != now.evaluates_speech)


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


@contextmanager
def _training_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"cannot write to {folder}: {error.strerror or error}",
            hint=f"make room there, then go on from the last checkpoint: myna train --resume {folder}",
        ) from error
