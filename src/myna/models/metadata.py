"""`myna.json`: facts about the training of weights, stored beside them so that they can be moved and shared."""

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
"""Names of training inputs that must be unchanged when any weights of that training are used."""
FINGERPRINTS = ("base model", "precision", *USAGE_FINGERPRINTS)
"""Names of training inputs that must be unchanged for an adapter, which also needs its base model."""


class WeightsMetadata(Settings):
    """Base model, codec and prompt that trained weights belong to. Weights without this file get the defaults."""

    model_config = ConfigDict(extra="ignore")

    source: str = ""
    """Hub name or folder of the base model."""
    revision: str | None = None
    quantization: Quantization = "none"
    """Quantization of the base model in training."""
    text_head: bool | None = None
    """Whether the base model was loaded with its text head; None if unknown."""
    codec: str | None = None
    """Hub name or folder of the codec; None is the base model's own."""
    reference_placement: Literal["turn", "system"] = "turn"
    scene: str = ""
    """Scene of most of the training data."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Fingerprints of the training's inputs, by the names in `FINGERPRINTS`."""
    provenance: dict[str, Any] = Field(default_factory=dict)
    """Sources of a merged model, and the result of its check."""

    @classmethod
    def from_recipe(cls, recipe: Recipe, inputs: Mapping[str, Any]) -> WeightsMetadata:
        """Make the metadata of a training from its recipe and the fingerprints in its checkpoints."""
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
    """Read the metadata of a folder of weights; None if it has none."""
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
