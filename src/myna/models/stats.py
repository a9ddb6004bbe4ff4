"""Parameter counts of a model on the meta device: nothing is downloaded or allocated."""

from __future__ import annotations

from typing import Any

import torch

from myna.core.config import AdaptSettings
from myna.models.lora import SupportsBaseModel, count_parameters, make_trainable, resolve_module_names


def count_model(family: SupportsBaseModel, settings: AdaptSettings) -> dict[str, Any]:
    """Total, trainable and LoRA parameters, with shares from 0 to 1, and their modules. The text head always counts."""
    model = family.load_model(dtype=torch.bfloat16, device="meta", text_head=True)
    if settings.mode == "full":
        adapted = selected = 0
        parts = [part for part in family.module_names(model) if part not in settings.freeze]
        trained = resolve_module_names(family, model, parts, "adapt.freeze")
    else:
        targets = family.lora_targets(model, settings.mode, settings.targets)
        adapted, selected = len(targets.adapted), len(targets.selected)
        trained = resolve_module_names(family, model, settings.train_modules, "adapt.train_modules")
    total, trainable, lora = count_parameters(make_trainable(model, family, settings))
    return {
        "total": total,
        "trainable": trainable,
        "trainable_share": trainable / total,
        "lora": lora,
        "lora_share": lora / total,
        "lora_modules": adapted,
        "selected_modules": selected,
        "trained_modules": trained,
    }
