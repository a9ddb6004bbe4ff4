"""How large a model is and how much of it would learn, from shapes alone: nothing is downloaded, nothing allocated."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from myna.config import AdaptSettings
from myna.models.lora import Adaptable, count_parameters, full_names, wrap


class Measurable(Adaptable, Protocol):
    """The part of a `Family` that counting needs."""

    def load_model(self, *, dtype: torch.dtype, device: torch.device | str, text_head: bool) -> nn.Module: ...


def model_stats(family: Measurable, settings: AdaptSettings) -> dict[str, Any]:
    """Parameters in all, trainable, and of the LoRA, with shares from 0 to 1 and the modules they belong to.

    The text head always counts: the checkpoint carries it, whether or not the loss needs it.
    """
    model = family.load_model(dtype=torch.bfloat16, device="meta", text_head=True)
    if settings.mode == "full":
        adapted = selected = 0
        parts = [part for part in family.module_names(model) if part not in settings.freeze]
        trained = full_names(family, model, parts, "adapt.freeze")
    else:
        targets = family.adapt_targets(model, settings.mode, settings.targets)
        adapted, selected = len(targets.adapted), len(targets.selected)
        trained = full_names(family, model, settings.train_modules, "adapt.train_modules")
    total, trainable, lora = count_parameters(wrap(model, family, settings))
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
