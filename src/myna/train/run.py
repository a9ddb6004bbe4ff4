"""A run: the folder with everything a training made.

config.yaml      the resolved recipe, enough to train or speak again
metrics.jsonl    one line per optimizer step and per evaluation
log.txt          what was printed
adapter/         the LoRA, a plain PEFT folder (or model/ after full training)
checkpoints/     what it takes to go on, see checkpoint.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from myna.config import Recipe, dump_recipe, load_recipe
from myna.errors import TrainingError


class Run:
    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder, self.recipe = folder, recipe

    @classmethod
    def create(cls, folder: Path, recipe: Recipe) -> Run:
        if folder.exists() and any(folder.iterdir()):
            raise TrainingError(
                f"{folder} already holds a run", hint="choose another folder with --out, or move the old one away"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
        except OSError as error:
            raise TrainingError(f"cannot write to {folder}: {error}", hint="choose another folder with --out") from None
        return cls(folder, recipe)

    @classmethod
    def open(cls, folder: Path) -> Run:
        if not (folder / "config.yaml").is_file():
            raise TrainingError(
                f"{folder} is not a run: it has no config.yaml", hint="give the folder `myna train` made"
            )
        return cls(folder, load_recipe(folder / "config.yaml"))

    @property
    def adapter(self) -> Path:
        return self.folder / "adapter"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def log(self, text: str) -> None:
        with (self.folder / "log.txt").open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def forget_after(self, step: int) -> None:
        """Drop metrics of later steps, and a last line that a kill has cut: the run goes on from `step`."""
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines(keepends=True):
            if not line.endswith("\n") or json.loads(line)["step"] > step:
                break
            kept.append(line)
        temporary = self.metrics.with_name(".metrics.jsonl")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(self.metrics)

    def record(self, row: dict[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
