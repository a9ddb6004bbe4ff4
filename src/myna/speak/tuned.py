"""Trained weights by the names that users type: a run, one of its checkpoints, or a LoRA adapter. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from myna.core.errors import SpeakError
from myna.models import find_checkpoint
from myna.models.adapters import adapter_base, find_adapter, is_adapter
from myna.models.metadata import WeightsMetadata, read_metadata
from myna.provenance.origin import SpeechOrigin, display_name, weights_sha256
from myna.train.run import Run


@dataclass(frozen=True, slots=True)
class TunedWeights:
    """Trained weights, the base model they belong to, and what is known of their training."""

    folder: Path
    """Of the run or of the adapter."""
    weights: Path
    """A PEFT folder, or a whole model after full training."""
    metadata: WeightsMetadata
    run: Run | None = None

    @property
    def is_full(self) -> bool:
        return not is_adapter(self.weights)

    @property
    def base_source(self) -> str:
        """The base model, with its revision where that is known."""
        known = self.metadata
        return known.source if known.revision is None else f"{known.source}@{known.revision}"

    @property
    def adapter(self) -> Path:
        """The PEFT folder."""
        return find_adapter(self.folder) if self.is_full else self.weights


def find_tuned(source: str | os.PathLike[str], base: str | None = None) -> TunedWeights | None:
    """The trained weights of a run, a checkpoint or an adapter (a folder, or a name on the hub); None for a model.

    `base` takes the place of the base model that was trained on.
    """
    folder = Path(source).expanduser()
    # A run's own adapter knows all that the run knows.
    run = Run.find(folder) or (Run.find(folder.parent) if folder.name in ("adapter", "model") else None)
    if run is not None:
        return _from_run(run, base)
    if not folder.is_dir():
        checkpoint = find_checkpoint(Path(source).as_posix())
        if checkpoint is None:
            return None
        folder = checkpoint
    return _from_adapter(folder, base) if is_adapter(folder) else None


def require_tuned(source: str | os.PathLike[str], base: str | None = None) -> TunedWeights:
    """As `find_tuned`, with an error for anything else."""
    tuned = find_tuned(source, base)
    if tuned is None:
        raise SpeakError(
            f"{source} is neither a run nor an adapter: it has no config.yaml and no adapter_config.json",
            hint=f"--model {source} opens an untuned model; --run takes what `myna train` made, or an adapter",
        )
    return tuned


def speech_origin(run: str | os.PathLike[str] | None, model: str | None) -> SpeechOrigin:
    """What speech of a run or an adapter, or of an untuned model, says of where it comes from."""
    if run is None:
        return SpeechOrigin(display_name(str(model)))
    tuned = require_tuned(run, model)
    # A whole model may have many gigabytes.
    trained = "" if tuned.is_full else weights_sha256(tuned.weights)
    return SpeechOrigin(display_name(tuned.base_source), display_name(os.fspath(run)), trained)


def _from_run(run: Run, base: str | None) -> TunedWeights:
    from myna.train.checkpoint import training_inputs

    metadata = WeightsMetadata.from_recipe(run.recipe, training_inputs(run))
    if base is not None:
        metadata = metadata.model_copy(update={"source": base, "revision": None})
    weights = run.model if run.model.is_dir() else find_adapter(run.folder)
    return TunedWeights(run.folder, weights, metadata, run)


def _from_adapter(folder: Path, base: str | None) -> TunedWeights:
    metadata = read_metadata(folder) or WeightsMetadata()
    source, revision = adapter_base(folder) if base is None else (base, None)
    if source != metadata.source:
        metadata = metadata.model_copy(update={"source": source, "revision": revision})
    return TunedWeights(folder, folder, metadata)
