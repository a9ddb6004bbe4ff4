"""Run folder: everything a training writes. Imports no torch.

config.yaml      the resolved recipe, enough to train or synthesize again
metrics.jsonl    one line per optimizer step and per evaluation
log.txt          messages
report.html      loss curve and time left, written anew while it trains
adapter/         the LoRA, a plain PEFT folder (or model/ after full training); it appears when the run is finished
checkpoints/     the state to resume from, see train/checkpoint.py
speech_eval/     samples and scores of the speech evaluations, where the recipe has them
best/            the checkpoint with the best speech, itself a run to synthesize with
.lock            held by the process that trains; .lock.json says which
"""

import json
import math
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

from myna.core.config import Recipe, dump_recipe, load_recipe
from myna.core.errors import TrainingError
from myna.core.io import LOCK_FILE, acquire_lock, is_unused, save_text

RECIPE_FILE = "config.yaml"
CHECKPOINTS_FOLDER = "checkpoints"
CHECKPOINT_METADATA_FILE = "state.json"
LENGTH_SETTINGS = ("train.steps", "train.epochs", "train.early_stopping_patience", "speech_eval.patience")
"""Settings for the length of a training. Changed on resume, they stay changed, since config.yaml keeps them."""
CHANGEABLE_ON_RESUME = (
    *LENGTH_SETTINGS,
    "name",
    "model.check_pretrained",
    "adapt.save_precision",
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


class RunFolder:
    """Folder of a run, of its `best/` or of one of its checkpoints, with the recipe. Accepted wherever a path is."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder, self.recipe = folder, recipe

    def __fspath__(self) -> str:
        return str(self.folder)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open a folder that has a recipe of its own."""
        recipe = folder / RECIPE_FILE
        if not recipe.is_file():
            raise TrainingError(
                f"{folder} is not a run: it has no {RECIPE_FILE}", hint="give the folder `myna train` made"
            )
        return cls(folder, load_recipe(recipe))

    @classmethod
    def find(cls, folder: Path) -> Self | None:
        """Open a run folder, its `best/`, or one of its checkpoints, which has the recipe of its run; None for anything
        else."""
        if (folder / RECIPE_FILE).is_file():
            return cls.open(folder)
        parent = folder.absolute().parent
        if parent.name == CHECKPOINTS_FOLDER and folder.is_dir():
            return cls(folder, cls.open(parent.parent).recipe)
        return None

    @property
    def best(self) -> Path:
        return self.folder / "best"

    @property
    def adapter(self) -> Path:
        return self.folder / "adapter"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def result(self) -> Path:
        """Folder of the trained weights, once the run is finished."""
        return self.model if self.recipe.adapt.mode == "full" else self.adapter

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def training_inputs(self) -> dict[str, Any]:
        """Return the fingerprints of what was trained on, from the newest checkpoint; empty without one. A checkpoint,
        and `best/`, have their own."""
        steps = checkpoint_steps(self)
        folder = checkpoint_folder(self, steps[-1]) if steps else self.folder
        if not (folder / CHECKPOINT_METADATA_FILE).is_file():
            return {}
        inputs: dict[str, Any] = read_checkpoint_metadata(folder)["inputs"]
        return inputs

    def read_metrics(self, notify: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
        """Read metrics.jsonl; values may be None. A last line cut short by a kill or a power failure is left out, and
        `notify` is called with a note about it; a damaged line before it is an error."""
        lines = list(self.metric_lines())
        damaged = [number for number, (_, values) in enumerate(lines, start=1) if values is None]
        if damaged and damaged[0] < len(lines):
            raise TrainingError(
                f"{self.metrics}:{damaged[0]} is no line of metrics: {lines[damaged[0] - 1][0][:40]!r}",
                hint="take that line out of the file",
            )
        if damaged:
            notify(f"{self.metrics}:{damaged[0]} is torn, as by a kill, and left out")
        return [values for _, values in lines if values is not None]

    def metric_lines(self) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """Yield each line of metrics.jsonl with its values; None for a damaged line."""
        if not self.metrics.is_file():
            return
        for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            try:
                values = json.loads(line) if line.endswith("\n") else None
            except ValueError:
                values = None
            # Older runs have numbers that are not finite.
            yield line, finite_or_none(values) if isinstance(values, dict) and "step" in values else None


def checkpoint_folder(run: RunFolder, step: int) -> Path:
    return run.folder / CHECKPOINTS_FOLDER / f"step-{step:06d}"


def checkpoint_steps(run: RunFolder) -> list[int]:
    """Return the steps of the checkpoints a run holds, oldest first."""
    folders = (run.folder / CHECKPOINTS_FOLDER).glob("step-*")
    return sorted(int(folder.name.removeprefix("step-")) for folder in folders)


def read_checkpoint_metadata(folder: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint's state.json."""
    metadata: dict[str, Any] = json.loads((folder / CHECKPOINT_METADATA_FILE).read_text(encoding="utf-8"))
    return metadata


def finite_or_none(value: Any) -> Any:
    """Copy a tree of plain values, with None for numbers that are not finite, which JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
                # Touch this file first. If the process is killed before config.yaml is saved, the old result is
                # published again.
                (self.folder / CONTINUED_FILE).touch()
            overrides = [f"{key}={json.dumps(value)}" for key, value in _length(self.recipe).items()]
            save_text(config, dump_recipe(load_recipe(config, overrides)))

    def log(self, text: str) -> None:
        self._append(self.folder / "log.txt", text)

    def log_metrics(self, row: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl. Numbers that are not finite become null, since JSON cannot hold them."""
        self._append(self.metrics, json.dumps(finite_or_none(row), allow_nan=False))

    def save_report(self, page: str) -> None:
        with _training_errors(self.folder):
            save_text(self.folder / "report.html", page)

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
            f"{folder} already holds a run",
            hint=f"go on with it: myna train --resume {folder}; or choose another folder with --out",
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
