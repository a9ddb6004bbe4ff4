"""What training does with adapters: put one on with fp32 trainables, and save it as any PEFT program reads it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn

from myna.config import AdaptSettings
from myna.errors import TrainingError
from myna.models.adapting import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Adaptable,
    ParameterCounts,
    cast_trainable,
    count_parameters,
    load_adapter,
    merge,
    wrap,
)

__all__ = ["ParameterCounts", "adapt", "count_parameters", "load_adapter", "merge", "save_adapter"]


def adapt(
    model: nn.Module, family: Adaptable, settings: AdaptSettings, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Make the model trainable as the settings ask: what learns is in `dtype`, the rest frozen as it came."""
    return cast_trainable(wrap(model, family, settings), dtype)


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`, each under a temporary name first.

    The configuration goes last, so a folder that has one has its weights too.
    """
    if not isinstance(model, PeftModel):
        raise TrainingError("the model carries no adapter to save", hint="with adapt.mode: full save the whole model")
    folder.mkdir(parents=True, exist_ok=True)
    # Not "auto", which would look the base model up on the hub to see whether its vocabulary has grown.
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    partial = folder / f"{WEIGHTS_FILE}.partial"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata={"format": "pt"})
    partial.replace(folder / WEIGHTS_FILE)

    base = model.get_base_model()
    config = dataclasses.replace(
        model.peft_config["default"],
        inference_mode=True,
        auto_mapping={"base_model_class": type(base).__name__, "parent_library": type(base).__module__},
    ).to_dict()
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    partial = folder / f"{CONFIG_FILE}.partial"
    partial.write_text(json.dumps(plain, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(folder / CONFIG_FILE)
