"""Run folder of a training, as other commands read it: recipe, weights, checkpoints and metrics. Imports no torch.

`myna.train.run` and `myna.train.checkpoint` say what is in it, and write it.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from myna.core.config import Recipe, load_recipe
from myna.core.errors import TrainingError

RECIPE_FILE = "config.yaml"
CHECKPOINTS_FOLDER = "checkpoints"
CHECKPOINT_METADATA_FILE = "state.json"


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
