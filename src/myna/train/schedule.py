"""Learning-rate schedule, a function of the optimizer step alone."""

from __future__ import annotations

import math

from myna.config import TrainSettings


def warmup_steps(settings: TrainSettings, steps: int) -> int:
    return round(settings.warmup * steps) if settings.warmup < 1 else int(settings.warmup)


def learning_rate(settings: TrainSettings, step: int, steps: int) -> float:
    """Learning rate of step 1 to `steps`: linear warm-up to the full rate, then the schedule towards its end.

    The end lies one step past the last, which would otherwise have a rate of 0.
    """
    warmup = warmup_steps(settings, steps)
    if step <= warmup:
        return settings.learning_rate * step / warmup
    progress = (step - 1 - warmup) / max(1, steps - warmup)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[settings.schedule]
    floor = settings.final_learning_rate_ratio if settings.schedule != "constant" else 1.0
    return settings.learning_rate * (floor + (1.0 - floor) * factor)
