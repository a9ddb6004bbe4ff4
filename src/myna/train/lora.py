"""What training does with adapters: put one on with fp32 trainables. The rest is every room's, see models/adapting."""

from __future__ import annotations

import torch
from torch import nn

from myna.config import AdaptSettings
from myna.models.lora import (
    Adaptable,
    ParameterCounts,
    cast_trainable,
    count_parameters,
    load_adapter,
    merge,
    save_adapter,
    wrap,
)

__all__ = ["ParameterCounts", "adapt", "count_parameters", "load_adapter", "merge", "save_adapter"]


def adapt(
    model: nn.Module, family: Adaptable, settings: AdaptSettings, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Make the model trainable as the settings ask: what learns is in `dtype`, the rest frozen as it came."""
    return cast_trainable(wrap(model, family, settings), dtype)
