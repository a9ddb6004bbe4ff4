"""AdamW, and what it takes to train weights that are themselves fp16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from myna.config import TrainSettings
from myna.train.precision import Precision


def make_optimizer(parameters: Sequence[nn.Parameter], settings: TrainSettings, precision: Precision) -> Any:
    return torch.optim.AdamW(
        parameters, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
    )
