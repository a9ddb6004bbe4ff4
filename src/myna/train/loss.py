"""Training loss, a weighted sum over terms divided by the targets of the whole step, and its divergence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from myna.core.config import LossSettings, Recipe, TrainSettings
from myna.core.errors import ConfigError
from myna.models.base import LossSums


def stage_weights(loss_terms: Sequence[str], recipe: Recipe, step: int, steps: int) -> torch.Tensor:
    """Return the weights of all terms in this step: those of its stage, or the recipe's own after the last stage."""
    loss = recipe.loss
    for stage in recipe.train.stages:
        if step <= (stage.until * steps if stage.until <= 1 else stage.until):
            changed = {"text_weight": stage.text_weight, "audio_weight": stage.audio_weight}
            return term_weights(loss_terms, loss.model_copy(update=changed))
    return term_weights(loss_terms, loss)


def term_weights(loss_terms: Sequence[str], settings: LossSettings) -> torch.Tensor:
    """Weights (terms,): the text weight, and codebook weights that sum to the audio weight. A single term weighs 1."""
    if len(loss_terms) == 1:
        return torch.ones(1, dtype=torch.float64)
    codebooks = sum(name.startswith("code") for name in loss_terms)
    named = {"uniform": [1.0] * codebooks, "1/k": [1.0 / (k + 1) for k in range(codebooks)]}
    setting = settings.codebook_weights
    audio = named[setting] if isinstance(setting, str) else [float(weight) for weight in setting]
    if len(audio) != codebooks or (codebooks and sum(audio) <= 0):
        raise ConfigError(
            f"`loss.codebook_weights` has {len(audio)} weights summing to {sum(audio):g}, for {codebooks} codebooks",
            hint="give one weight per codebook, or `uniform` or `1/k`",
        )
    remaining = iter(audio)
    weights = [
        settings.audio_weight * next(remaining) / sum(audio) if name.startswith("code") else settings.text_weight
        for name in loss_terms
    ]
    return torch.tensor(weights, dtype=torch.float64)


def weighted_loss(sums: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the part of the step's loss in these sums; `counts` are those of the whole step on all ranks."""
    per_target = (weights / counts.clamp(min=1)).to(sums.dtype).to(sums.device, non_blocking=True)
    return (sums * per_target).sum()


def term_means(sums: torch.Tensor, counts: torch.Tensor) -> list[float | None]:
    """Return the mean loss of each term, None without targets."""
    return [s / c if c else None for s, c in zip(sums.tolist(), counts.tolist(), strict=True)]


class LossAccumulator:
    """Loss sums over the micro-batches of a step or of an evaluation, on the CPU in double precision.

    Added results stay on the device until they are read: fetching them at once would make the host wait for the
    micro-batch, and then the device for the host.
    """

    def __init__(self, totals: LossSums, counts: torch.Tensor) -> None:
        self.counts = counts
        self._totals = totals
        self._pending: list[LossSums] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled between ranks without tensors on a device.
        return LossAccumulator, (self.totals, self.counts)

    @classmethod
    def zeros(cls, terms: int) -> Self:
        *totals, counts = (torch.zeros(n, dtype=torch.float64) for n in (terms, terms, 2, terms))
        return cls(LossSums(*totals), counts)

    def add(self, result: LossSums) -> None:
        """Add the result of one micro-batch. Its `counts` are known before, and are added separately."""
        self._pending.append(LossSums(*(part.detach() for part in result)))

    @property
    def totals(self) -> LossSums:
        """Totals with all pending results, which are fetched in one transfer. Counts are small enough for fp32."""
        if self._pending:
            batches = torch.stack([torch.cat([part.float() for part in result]) for result in self._pending])
            self._pending.clear()
            for total, part in zip(self._totals, self._split(batches.cpu().double().sum(0)), strict=True):
                total += part
        return self._totals

    def _split(self, flat: torch.Tensor) -> LossSums:
        return LossSums(*flat.split([len(total) for total in self._totals]))  # type: ignore[no-untyped-call]

    def reduced(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> "LossAccumulator":
        """Return totals over all processes, in one reduction; `counts` must already be those of all processes."""
        return LossAccumulator(self._split(reduce(torch.cat(self.totals))), self.counts)

    def metrics(self, names: Sequence[str], weights: torch.Tensor) -> dict[str, Any]:
        """Return losses and accuracies as they are written to metrics.jsonl."""
        totals, targets = self.totals, float(self.counts.sum())
        losses = zip(names, term_means(totals.sums, self.counts), strict=True)
        stops, ends = totals.stops.tolist()
        return {
            "loss": float(weighted_loss(totals.sums, self.counts, weights)),
            **{name: loss for name, loss in losses if loss is not None},
            "accuracy": float(totals.correct.sum()) / targets if targets else None,
            "stop_accuracy": stops / ends if ends else None,
        }


# Divergence


MAX_ZERO_GRADIENT_STEPS = 3
"""Steps in a row with a gradient of exactly zero after which a training is stopped."""
MAX_STEPS_ABOVE_CHANCE = 50
"""Steps in a row above chance after which a training that was well below is stopped; it may recover from some."""
MAX_FINAL_STEPS = 2
"""Limit in the last steps of a run, in place of the two above: no time is left to recover."""
WELL_BELOW_CHANCE = 0.8
"""Share of a uniform guess's loss that only a trained model reaches."""
SAFE_LEARNING_RATE = TrainSettings().learning_rate


@dataclass(slots=True)
class DivergenceMonitor:
    """Monitor of the loss and the gradient norm, step by step. Every rank sees the same; checkpoints keep its state.

    Steps that a loss scale skips are not counted: the trainer stops by itself after too many of them.
    """

    since: int | None = None
    """First of the current steps in a row without learning; None while the training is well."""
    zero_gradients: int = 0
    """Number of steps in a row with a gradient of zero."""
    above_chance: int = 0
    """Number of steps in a row with a loss above chance."""
    lowest: float | None = None
    """Lowest loss so far, as a share of chance."""
    weighted_terms: list[bool] | None = None
    """Whether each term had a weight in the last step. Losses with other weights cannot be compared."""
    message: str = ""

    def update(
        self, step: int, losses: LossAccumulator, norm: float, chance: tuple[float, ...], weights: torch.Tensor
    ) -> None:
        """Update the monitor with one step; `chance` is the loss of a uniform guess for each term."""
        sums, counts, weights = (part[: len(chance)] for part in (losses.totals.sums, losses.counts, weights))
        uniform = torch.tensor(chance, dtype=torch.float64) * counts
        loss, guess = (float(weighted_loss(part, counts, weights)) for part in (sums, uniform))
        if self.weighted_terms != (weighted := (weights > 0).tolist()):
            self.weighted_terms, self.lowest, self.above_chance = weighted, None, 0
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
        """Describe the fault once it is certain, which is sooner at the end of a run; None without one."""
        zero, above = MAX_ZERO_GRADIENT_STEPS, MAX_STEPS_ABOVE_CHANCE
        if is_last:
            zero = above = MAX_FINAL_STEPS
        return self.message if self.zero_gradients >= zero or self.above_chance >= above else None
