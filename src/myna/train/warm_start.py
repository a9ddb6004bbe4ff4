"""Training on from a saved adapter: `adapt.init`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from accelerate.utils import broadcast_object_list

from myna.core.errors import TrainingError
from myna.models.files import USAGE_FINGERPRINTS, find_adapter
from myna.models.lora import base_model_hash, initialize_adapter
from myna.models.ref import ModelRef
from myna.train.ema import WeightEMA
from myna.train.precision import DTYPES
from myna.train.trainer import Trainer


def start_from_adapter(trainer: Trainer, inputs: Mapping[str, Any], log: Callable[[str], None]) -> None:
    """Give the new adapter of a training the weights of `adapt.init`. `inputs` are the fingerprints of the training."""
    source = trainer.recipe.adapt.init
    assert source is not None, "the recipe names one"
    ref = ModelRef.find_trained(find_adapter(source))
    folder, known = ref.require_adapter(), ref.metadata.inputs
    for name in USAGE_FINGERPRINTS:
        if known.get(name, inputs[name]) != inputs[name]:
            raise TrainingError(
                f"`adapt.init`: {source} was trained with another {name} ({known[name]}, now {inputs[name]})",
                hint=f"train with the {name} it was trained with, or without adapt.init",
            )
    _check_base(trainer, ref, inputs)
    initialize_adapter(trainer.model, folder)
    if trainer.ema is not None:
        trainer.ema = WeightEMA(trainer.trainable_parameters, trainer.ema.decay)
    log(f"training on from {folder}")
    if "base model" not in known and ref.metadata.source != trainer.family.source:
        log(f"it names {ref.metadata.source} as its base model, and no fingerprint of it to compare")


def _check_base(trainer: Trainer, ref: ModelRef, inputs: Mapping[str, Any]) -> None:
    metadata, recipe, accelerator = ref.metadata, trainer.recipe, trainer.accelerator
    expected, precision = metadata.inputs.get("base model"), metadata.inputs.get("precision", "")
    if expected is None or precision not in DTYPES:
        return
    found = [inputs["base model"]]
    as_trained = (inputs["precision"], recipe.model.quantization, recipe.needs_text_head)
    if as_trained != (precision, metadata.quantization, bool(metadata.text_head)):
        # A fingerprint is of rounded weights, so the base is read once more, rounded as it was then.
        if accelerator.is_main_process:
            text_head, dtype = bool(metadata.text_head), DTYPES[precision]
            model = trainer.family.load_model(dtype=dtype, device="cpu", text_head=text_head)
            found = [
                base_model_hash(
                    model,
                    trainer.family,
                    ref.require_adapter(),
                    dtype=dtype,
                    quantization=metadata.quantization,
                    text_head=text_head,
                )
            ]
        if accelerator.num_processes > 1:
            found = broadcast_object_list(found)
    if found[0] != expected:
        raise TrainingError(
            f"`adapt.init`: {recipe.adapt.init} was trained on another base model than {trainer.family.source}: the "
            f"fingerprint of its weights was {expected}, and is {found[0]}",
            hint=f"--set model.source=... with the model it was trained on, {metadata.source}",
        )
