"""A run: the folder with everything a training made.

config.yaml      the resolved recipe, enough to train or speak again
metrics.jsonl    one line per optimizer step and per evaluation
log.txt          what was printed
adapter/         the LoRA, a plain PEFT folder (or model/ after full training); it appears when the run is finished
checkpoints/     what it takes to go on, see checkpoint.py
listen/          what was heard while it learned, where the recipe has somebody listen
best/            the checkpoint that was heard best, itself a run to speak with
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from myna.config import Recipe, dump_recipe, load_recipe
from myna.errors import TrainingError
from myna.io import replacing

MAY_CHANGE = frozenset(
    {
        "name",
        "model.check_pretrained",
        # Checked by what they hold.
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
        # Checked by what it is, wherever it lies.
        "speech_eval.asr",
        "speech_eval.batch_size",
    }
)
"""Settings that say how, and not what, a run learns: they may be others when it goes on."""

BEFORE_STEP_1 = ("config.yaml", "log.txt", "preflight.txt")
"""What a dry run, or a start that failed, leaves behind: nothing that a new start could lose."""


class Run:
    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder, self.recipe = folder, recipe

    @classmethod
    def create(cls, folder: Path, recipe: Recipe) -> Run:
        if folder.exists() and not folder.is_dir():
            raise TrainingError(f"{folder} is a file", hint="choose another folder with --out")
        if folder.exists() and any(entry.name not in BEFORE_STEP_1 for entry in folder.iterdir()):
            raise TrainingError(
                f"{folder} already holds a run", hint="choose another folder with --out, or move the old one away"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(folder / "config.yaml") as temporary:
                temporary.write_text(dump_recipe(recipe), encoding="utf-8")
        except OSError as error:
            raise TrainingError(f"cannot write to {folder}: {error}", hint="choose another folder with --out") from None
        return cls(folder, recipe)

    @classmethod
    def open(cls, folder: Path, settings: list[str] | None = None) -> Run:
        """A run as it was made, or with `settings` on top that do not change what it learns."""
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
                hint=f"drop it, or start a run of its own. What may change: {', '.join(sorted(MAY_CHANGE))}",
            )
        return run

    @classmethod
    def to_speak_with(cls, folder: Path) -> Run:
        """A run, or one of its checkpoints, which has the weights and leaves the rest to the run it lies in."""
        if not (folder / "config.yaml").is_file() and folder.absolute().parent.name == "checkpoints":
            above = cls.open(folder.absolute().parents[1])
            return cls(folder, above.recipe)
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
        """Where the tuned weights are, once the run is finished."""
        return self.model if self.recipe.adapt.mode == "full" else self.adapter

    @property
    def is_finished(self) -> bool:
        return self.result.is_dir()

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def log(self, text: str) -> None:
        with self._appending("log.txt") as file:
            file.write(text + "\n")

    def record(self, row: dict[str, Any]) -> None:
        with self._appending(self.metrics.name) as file:
            file.write(json.dumps(row) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop metrics of later steps, and a last line that a kill has cut: the run goes on from `step`."""
        if not self.metrics.exists():
            return
        with _writing(self.folder), replacing(self.metrics) as temporary:
            kept = []
            for line in self.metrics.read_text(encoding="utf-8").splitlines(keepends=True):
                if not line.endswith("\n") or json.loads(line)["step"] > step:
                    break
                kept.append(line)
            temporary.write_text("".join(kept), encoding="utf-8")

    @contextmanager
    def _appending(self, name: str) -> Iterator[IO[str]]:
        with _writing(self.folder), (self.folder / name).open("a", encoding="utf-8") as file:
            yield file


def changed_settings(before: Recipe, now: Recipe) -> list[str]:
    """Keys in which two recipes differ, and which must not under a run that goes on."""
    old, new = _flat(before.model_dump(mode="json")), _flat(now.model_dump(mode="json"))
    changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key) and key not in MAY_CHANGE]
    # Who listens may have moved, but not come or gone: the untuned model can only be heard at the beginning.
    return changed + ["speech_eval.asr"] * (before.evaluates_speech != now.evaluates_speech)


def sync(path: Path) -> None:
    """A file is safe from a power cut once it is on the disk, and so is its name once its folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"cannot write to {folder}: {error.strerror or error}",
            hint=f"make room there, then go on from the last checkpoint: myna train --resume {folder}",
        ) from error
