"""`ModelRef`: the run, adapter or model that a user named, resolved once and then passed on. Imports no torch."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from myna.core.errors import ModelError, MynaError, SpeakError
from myna.core.io import file_sha256, similar_path
from myna.core.run_folder import RunFolder
from myna.models import find_checkpoint, open_family
from myna.models.files import WeightsMetadata, adapter_base, find_adapter, is_adapter, read_metadata

if TYPE_CHECKING:
    from myna.models.base import Family

ModelSource = str | os.PathLike[str]
"""Folder, hub name or name of a shipped model, as a user gives it."""


@dataclass(frozen=True, slots=True)
class ModelRef:
    """Run (or one of its checkpoints), LoRA adapter, or whole model, with what is known of its weights."""

    source: str
    """Name or path, as given."""
    kind: Literal["run", "adapter", "model"]
    folder: Path | None
    """Folder of the run, the adapter or the model; None for a built-in configuration."""
    weights: Path | None
    """PEFT folder, or folder of a whole model; None for a built-in configuration."""
    adapter: Path | None
    """PEFT folder; None for a whole model, which a run has after full training."""
    metadata: WeightsMetadata
    """Base model, codec, prompt and fingerprints of the training; defaults where they are unknown."""
    run: RunFolder | None = None
    base: str | None = None
    """Base model given by the user, in place of the one that was trained on."""

    @classmethod
    def find(cls, source: ModelSource, base: str | None = None) -> Self:
        """Resolve whatever a user named: a folder, a hub name (downloaded if needed) or a shipped model. A run or an
        adapter is opened on another `base` model if one is given."""
        folder = Path(source).expanduser()
        # The adapter/ or model/ of a run is resolved to its run, which knows more.
        run = RunFolder.find(folder) or (RunFolder.find(folder.parent) if folder.name in ("adapter", "model") else None)
        if run is not None:
            return cls._from_run(source, run, base)
        found = folder if is_adapter(folder) else find_checkpoint(Path(source).as_posix())
        if found is not None and is_adapter(found):
            return cls._from_adapter(source, found, base)
        return cls._from_model(os.fspath(source), found, base)

    @classmethod
    def find_trained(cls, source: ModelSource, base: str | None = None) -> Self:
        """Resolve a run or an adapter; anything else is an error."""
        folder = Path(source).expanduser()
        if not folder.exists() and len(folder.parts) != 2:  # OWNER/NAME may be on the hub
            similar, takes = similar_path(folder), "--run takes what `myna train` made, or an adapter"
            hint = f"did you mean {similar}?" if similar is not None else f"{takes}: a folder, or OWNER/NAME"
            raise SpeakError(f"there is no run {source}", hint=hint)
        return cls.find(source, base).require_trained()

    @classmethod
    def find_model(cls, source: str) -> Self:
        """Resolve a whole model, also where the folder could be taken for something else."""
        return cls._from_model(source, find_checkpoint(source), None)

    @classmethod
    def from_options(cls, run: ModelSource | None, model: str | None) -> Self:
        """Resolve the options `--run` and `--model`: beside a run, `model` is its base model."""
        if model is not None:
            find_checkpoint(model)
        if run is not None:
            return cls.find_trained(run, model)
        if model is None:
            raise SpeakError("give --run or --model", hint="--run runs/NAME, or --model HUB_NAME_OR_FOLDER")
        return cls.find_model(model)

    @classmethod
    def _from_run(cls, source: ModelSource, run: RunFolder, base: str | None) -> Self:
        metadata = WeightsMetadata.from_recipe(run.recipe, run.training_inputs())
        if base is not None:
            metadata = metadata.model_copy(update={"source": base, "revision": None})
        adapter = None if run.model.is_dir() else find_adapter(run.folder)
        return cls(os.fspath(source), "run", run.folder, adapter or run.model, adapter, metadata, run, base)

    @classmethod
    def _from_adapter(cls, source: ModelSource, folder: Path, base: str | None) -> Self:
        metadata = read_metadata(folder) or WeightsMetadata()
        model, revision = adapter_base(folder) if base is None else (base, None)
        if model != metadata.source:
            metadata = metadata.model_copy(update={"source": model, "revision": revision})
        return cls(os.fspath(source), "adapter", folder, folder, folder, metadata, None, base)

    @classmethod
    def _from_model(cls, source: str, folder: Path | None, base: str | None) -> Self:
        # A merged or fully trained model has metadata of its training.
        metadata = (read_metadata(folder) if folder is not None else None) or WeightsMetadata()
        return cls(source, "model", folder, folder, None, metadata, None, base)

    @property
    def is_trained(self) -> bool:
        """Whether this is a run or an adapter, whose metadata name a base model."""
        return self.kind != "model"

    @property
    def base_source(self) -> str:
        """Base model of a run or an adapter, with its revision if known; a model itself."""
        known = self.metadata
        if not self.is_trained:
            return self.source
        return known.source if known.revision is None else f"{known.source}@{known.revision}"

    def require_trained(self) -> Self:
        """Return this reference; raise an error unless it is a run or an adapter."""
        if not self.is_trained:
            raise SpeakError(
                f"{self.source} is neither a run nor an adapter: it has no config.yaml and no adapter_config.json",
                hint=f"--model {self.source} opens an untuned model; --run takes what `myna train` made, or an adapter",
            )
        return self

    def require_adapter(self) -> Path:
        """Return the PEFT folder; raise an error for a whole model."""
        if self.adapter is None:
            raise ModelError(
                f"{self.source} {'was trained in full' if self.is_trained else 'is a whole model'}, and has no LoRA",
                hint=f"open it as a model: --model {self.weights or self.source}",
            )
        return self.adapter

    def open_family(self, codec: str | None = None) -> "Family":
        """Open the model without its weights: the base model of an adapter, or the whole model itself."""
        if not self.is_trained:
            return open_family(self.source, codec=codec)
        if self.adapter is not None:
            return self._open_base(codec)
        assert self.weights is not None, "a run has weights"
        if codec is None and read_metadata(self.weights) is None:
            codec = self._open_base(None).codec_source
        return open_family(str(self.weights), codec=codec)

    def _open_base(self, codec: str | None) -> "Family":
        known = self.metadata
        try:
            return open_family(known.source, revision=known.revision, codec=codec or known.codec)
        except MynaError as error:
            raise type(error)(
                f"the base model of {self.folder} does not open: {error.what}",
                hint="say where it is, --model HUB_NAME_OR_FOLDER, unless this helps: " + error.hint,
            ) from error


def split_name(text: str) -> tuple[str, str]:
    """Split NAME=SOURCE into name and source; the name of a source alone is its last part. An existing path may have
    such a name too."""
    name, separator, source = text.partition("=")
    if separator and not Path(text).exists():
        return name, source
    return Path(text).name or text, text


def display_name(source: str) -> str:
    """Return a hub name as it is, and the last part of a path: where a folder lies on a disk stays private."""
    path = Path(source)
    return path.name if path.is_absolute() or path.exists() else source


def weights_sha256(folder: Path) -> str:
    """Hash the safetensors file of a folder, or the hashes of several in the order of their names."""
    hashes = [file_sha256(file) for file in sorted(folder.glob("*.safetensors"))]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest() if hashes else ""
