"""Divergence of a training: steps after which nothing is learned any more, told from those it recovers from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from myna.core.config import TrainSettings
from myna.train.loss import LossAccumulator, weighted_loss

MAX_ZERO_GRADIENT_STEPS = 3
"""Steps in a row with a gradient of exactly zero before a training is given up."""
MAX_STEPS_ABOVE_CHANCE = 50
"""Steps in a row with a loss above chance, after it was well below, before a training is given up: it may recover from
some."""
MAX_FINAL_STEPS = 2
"""The same for either, at the end of a run, which leaves no time to recover."""
WELL_BELOW_CHANCE = 0.8
"""Share of a uniform guess's loss that only a model has which knows something."""
SAFE_LEARNING_RATE = TrainSettings().learning_rate


@dataclass(slots=True)
class DivergenceMonitor:
    """Watches the loss and the gradient norm, step by step. Every rank sees the same; checkpoints keep its state.

    Steps that a loss scale skips are not counted: the trainer stops by itself when there are too many.
    """

    since: int | None = None
    """First of the steps in a row that taught nothing; None while the training is well."""
    zero_gradients: int = 0
    """Such steps with a gradient of zero, up to now."""
    above_chance: int = 0
    """Such steps with a loss above chance."""
    lowest: float | None = None
    """Lowest loss so far, as a share of chance."""
    streams: list[bool] | None = None
    """Streams that had a weight in the last step. Losses of others cannot be compared."""
    message: str = ""

    def update(
        self, step: int, losses: LossAccumulator, norm: float, chance: tuple[float, ...], weights: torch.Tensor
    ) -> None:
        """`chance` is that of the family's streams, which come first; a guess is nothing to compare others with."""
        sums, counts, weights = (part[: len(chance)] for part in (losses.sums, losses.counts, weights))
        uniform = torch.tensor(chance, dtype=torch.float64) * counts
        loss, guess = (float(weighted_loss(part, counts, weights)) for part in (sums, uniform))
        if self.streams != (weighted := (weights > 0).tolist()):
            self.streams, self.lowest, self.above_chance = weighted, None, 0
        if not norm < float("inf") or guess == 0:
            return
        self.zero_gradients = self.zero_gradients + 1 if norm == 0 and loss > 0 else 0
        is_above = self.lowest is not None and self.lowest <= WELL_BELOW_CHANCE and loss >= guess
        self.above_chance = self.above_chance + 1 if is_above else 0
        self.lowest = loss / guess if self.lowest is None else min(self.lowest, loss / guess)
        if not self.zero_gradients and not self.above_chance:
            self.since = None
            return
        self.since = step if self.since is None else self.since
        fault = "the gradient is exactly zero" if self.zero_gradients else "the loss is not better than chance"
        self.message = f"{fault} since step {self.since}, at a loss of {loss:.2f} where a guess has {guess:.2f}"

    def diagnose(self, *, is_last: bool = False) -> str | None:
        """What is wrong, once it is certain; at the end of a run sooner."""
        zero, above = MAX_ZERO_GRADIENT_STEPS, MAX_STEPS_ABOVE_CHANCE
        if is_last:
            zero = above = MAX_FINAL_STEPS
        return self.message if self.zero_gradients >= zero or self.above_chance >= above else None
