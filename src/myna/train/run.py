"""Run folder: everything a training writes.

config.yaml      the resolved recipe, enough to train or synthesize again
metrics.jsonl    one line per optimizer step and per evaluation
log.txt          messages
adapter/         the LoRA, a plain PEFT folder (or model/ after full training); it appears when the run is finished
checkpoints/     the state to resume from, see checkpoint.py
speech_eval/     samples and scores of the speech evaluations, where the recipe has them
best/            the checkpoint with the best speech, itself a run to synthesize with
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from myna.config import Recipe, dump_recipe, load_recipe
from myna.errors import TrainingError
from myna.io import atomic_write

CHANGEABLE_ON_RESUME = (
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
    # Checked by its content, wherever it lies.
    "speech_eval.asr",
    "speech_eval.batch_size",
)
"""Settings that say how, and not what, a run learns: they may change on resume."""

FILES_BEFORE_FIRST_STEP = ("config.yaml", "log.txt", "preflight.txt")
"""Files of a dry run or a failed start, which a new start may overwrite."""


class Run:
    """Folder of a training and its recipe."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder, self.recipe = folder, recipe

    @classmethod
    def create(cls, folder: Path, recipe: Recipe) -> Run:
        if folder.exists() and not folder.is_dir():
            raise TrainingError(f"{folder} is a file", hint="choose another folder with --out")
        if folder.exists() and any(entry.name not in FILES_BEFORE_FIRST_STEP for entry in folder.iterdir()):
            raise TrainingError(
                f"{folder} already holds a run", hint="choose another folder with --out, or move the old one away"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(folder / "config.yaml") as temporary:
                temporary.write_text(dump_recipe(recipe), encoding="utf-8")
        except OSError as error:
            raise TrainingError(f"cannot write to {folder}: {error}", hint="choose another folder with --out") from None
        return cls(folder, recipe)

    @classmethod
    def open(cls, folder: Path, settings: list[str] | None = None) -> Run:
        """An existing run, or with `settings` on top that do not change what it learns."""
        config = folder / "config.yaml"
        if not config.is_file():
            raise TrainingError(
                f"{folder} is not a run: it has no config.yaml", hint="give the folder `myna train` made"
            )
        run = cls(folder, load_recipe(config, settings))
        changed = changed_settings(load_recipe(config), run.recipe)
        if changed:
            raise TrainingError(
                f"{folder} cannot go on with another {' and '.join(changed)}: it would learn something else",
                hint=f"drop it, or start a run of its own. What may change: {', '.join(sorted(CHANGEABLE_ON_RESUME))}",
            )
        return run

    @classmethod
    def find(cls, folder: Path) -> Run | None:
        """The run of a run folder, its `best/` or one of its checkpoints; None for anything else."""
        is_checkpoint = folder.absolute().parent.name == "checkpoints" and folder.is_dir()
        return cls.open_for_inference(folder) if is_checkpoint or (folder / "config.yaml").is_file() else None

    @classmethod
    def open_for_inference(cls, folder: Path) -> Run:
        """A run, or one of its checkpoints, which has weights of its own and the recipe of its run."""
        if not (folder / "config.yaml").is_file() and folder.absolute().parent.name == "checkpoints":
            return cls(folder, cls.open(folder.absolute().parents[1]).recipe)
        return cls.open(folder)

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
    def is_finished(self) -> bool:
        return self.result.is_dir()

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def log(self, text: str) -> None:
        self._append(self.folder / "log.txt", text)

    def log_metrics(self, row: dict[str, Any]) -> None:
        self._append(self.metrics, json.dumps(row))

    def truncate_metrics(self, step: int) -> None:
        """Drop metrics of later steps, and a last line that a kill has cut: the run resumes after `step`."""
        if not self.metrics.exists():
            return

        def is_kept(line: str) -> bool:
            return line.endswith("\n") and json.loads(line)["step"] <= step

        with _training_errors(self.folder), atomic_write(self.metrics) as temporary:
            lines = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
            temporary.write_text("".join(takewhile(is_kept, lines)), encoding="utf-8")

    def _append(self, path: Path, line: str) -> None:
        with _training_errors(self.folder), path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def changed_settings(before: Recipe, now: Recipe) -> list[str]:
    """Keys that differ between two recipes and must not change on resume."""
    old, new = _flatten(before.model_dump(mode="json")), _flatten(now.model_dump(mode="json"))
    changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key) and key not in CHANGEABLE_ON_RESUME]
    # The ASR model may have moved, but not come or gone: the base model can only be evaluated at the beginning.
    return changed + ["speech_eval.asr"] * (before.evaluates_speech != now.evaluates_speech)


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


@contextmanager
def _training_errors(folder: Path) -> Iterator[None]:
    """Turn an `OSError` while writing into a `TrainingError`."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"cannot write to {folder}: {error.strerror or error}",
            hint=f"make room there, then go on from the last checkpoint: myna train --resume {folder}",
        ) from error
