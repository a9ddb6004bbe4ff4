"""Learning-rate schedule, a function of the optimizer step alone."""

from __future__ import annotations

import math

from myna.core.config import TrainSettings


def learning_rate(settings: TrainSettings, step: int, steps: int) -> float:
    """Learning rate of step 1 to `steps`: linear warm-up to the full rate, then the schedule towards its end.

    The end lies one step past the last, which would otherwise have a rate of 0.
    """
    warmup = round(settings.warmup * steps) if settings.warmup < 1 else int(settings.warmup)
    if step <= warmup:
        return settings.learning_rate * step / warmup
    progress = (step - 1 - warmup) / max(1, steps - warmup)
    if settings.schedule == "constant":
        return settings.learning_rate
    factor = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    floor = settings.final_learning_rate_ratio
    return settings.learning_rate * (floor + (1.0 - floor) * factor)
