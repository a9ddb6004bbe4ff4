"""`myna.json`: what trained weights say of their training, kept beside them so that they can be moved and shared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from myna.core.config import Quantization, Recipe, Settings
from myna.core.errors import ModelError
from myna.models.files import read_json, write_json

METADATA_FILE = "myna.json"
USAGE_FINGERPRINTS = ("prompt", "codec")
"""Inputs of a training, as its checkpoints name them, that must be the same when any weights of it are used."""
FINGERPRINTS = ("base model", "precision", *USAGE_FINGERPRINTS)
"""The same for an adapter, which needs its base model too."""


class WeightsMetadata(Settings):
    """The base model, codec and prompt that trained weights belong to. The defaults are what is taken as given of
    weights that come without."""

    model_config = ConfigDict(extra="ignore")

    source: str = ""
    """Hub name or folder of the base model."""
    revision: str | None = None
    quantization: Quantization = "none"
    """Of the base model, in training."""
    text_head: bool | None = None
    """Whether the base model was loaded with its text head; None where it is not known."""
    codec: str | None = None
    """Hub name or folder of the codec; None is the base model's own."""
    reference_placement: Literal["turn", "system"] = "turn"
    scene: str = ""
    """The one that most of the training had."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Fingerprints, by the names in `FINGERPRINTS`."""
    provenance: dict[str, Any] = Field(default_factory=dict)
    """Of a merged model: what it was made of, and how that was checked."""

    @classmethod
    def from_recipe(cls, recipe: Recipe, inputs: Mapping[str, Any]) -> WeightsMetadata:
        """That of a training, whose checkpoints hold the fingerprints."""
        return cls(
            source=recipe.model.source,
            revision=recipe.model.revision,
            quantization=recipe.model.quantization,
            text_head=recipe.needs_text_head,
            codec=recipe.model.codec,
            reference_placement=recipe.data.reference_placement,
            scene=inputs.get("scene", recipe.data.scene),
            inputs={name: inputs[name] for name in FINGERPRINTS if name in inputs},
        )


def read_metadata(folder: Path) -> WeightsMetadata | None:
    """The metadata of a folder of weights; None where it has none."""
    file = folder / METADATA_FILE
    if not file.is_file():
        return None
    try:
        return WeightsMetadata.model_validate(read_json(file))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ModelError(
            f"{file} is damaged: `{where}`: {problem['msg']}", hint="copy the folder again, or remove that file"
        ) from None


def save_metadata(folder: Path, metadata: WeightsMetadata) -> None:
    write_json(folder / METADATA_FILE, metadata.model_dump(mode="json", exclude_defaults=True))
