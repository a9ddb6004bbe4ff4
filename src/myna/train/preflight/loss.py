"""Preflight checks of the loss before training: finite, better than chance, labels at the right offset."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from myna.core.config import Recipe
from myna.core.errors import TrainingError
from myna.models.base import RenderedSequence
from myna.models.files import format_names
from myna.train.loss import LossAccumulator, stream_means
from myna.train.preflight.context import CheckContext

LABEL_OFFSETS = (-1, 0, 1, 2)
CHANCE_SHARE = 0.97
"""A loss above this share of a uniform guess's is that of an untrained model."""
MAX_INITIAL_ACCURACY = 0.98
"""Share of targets that no model gets right before it was trained on them."""


@dataclass(frozen=True, slots=True)
class InitialLoss:
    """Loss before training, per offset of the labels; the same on every rank."""

    streams: tuple[str, ...]
    chance: tuple[float, ...]
    by_offset: dict[int, LossAccumulator]
    sequences: int

    @classmethod
    def over_ranks(cls, ranks: list[InitialLoss]) -> InitialLoss:
        def total(offset: int, part: str) -> torch.Tensor:
            return torch.stack([getattr(loss.by_offset[offset], part) for loss in ranks]).sum(0)

        parts = ("sums", "correct", "stops", "counts")
        by_offset = {offset: LossAccumulator(*(total(offset, part) for part in parts)) for offset in ranks[0].by_offset}
        return replace(ranks[0], by_offset=by_offset, sequences=sum(loss.sequences for loss in ranks))

    @property
    def decisive(self) -> list[int]:
        """Streams to compare: the codebooks, or the text where there is no audio, which else has few targets."""
        present = [k for k, count in enumerate(self.by_offset[1].counts.tolist()) if count]
        return [k for k in present if self.streams[k].startswith("code")] or present

    def per_stream(self, offset: int) -> dict[str, float]:
        means = stream_means(self.by_offset[offset].sums, self.by_offset[offset].counts)
        return {name: mean for name, mean in zip(self.streams, means, strict=True) if mean is not None}

    def mean(self, offset: int) -> float:
        """Unweighted mean over the decisive streams."""
        per_stream = self.per_stream(offset)
        losses = [per_stream[self.streams[k]] for k in self.decisive if self.streams[k] in per_stream]
        return sum(losses) / len(losses) if losses else math.inf

    @property
    def mean_chance(self) -> float:
        return sum(self.chance[k] for k in self.decisive) / len(self.decisive)

    @property
    def accuracy(self) -> float:
        losses = self.by_offset[1]
        return float(losses.correct[self.decisive].sum() / losses.counts[self.decisive].sum())

    @property
    def message(self) -> str:
        per_stream = ", ".join(f"{name} {loss:.2f}" for name, loss in self.per_stream(1).items())
        return f"before training: loss {self.mean(1):.2f}, where chance is {self.mean_chance:.2f} ({per_stream})"

    @property
    def table(self) -> str:
        names = (*(self.streams[k] for k in self.decisive), "mean")
        rows = [self.per_stream(offset) | {"mean": self.mean(offset)} for offset in self.by_offset]
        lines = [f"{name:>10}" + "".join(f"{row.get(name, math.nan):9.3f}" for row in rows) for name in names]
        return "\n".join([f"{'offset':>10}" + "".join(f"{offset:+9d}" for offset in self.by_offset), *lines])


def measure_initial_loss(context: CheckContext) -> InitialLoss:
    """Loss with the labels at offset +1, and for a pretrained model also at the others."""
    family = context.trainer.family
    by_offset = {}
    for offset in LABEL_OFFSETS if context.recipe.model.check_pretrained else (1,):
        losses = by_offset[offset] = LossAccumulator.zeros(len(family.loss_terms))
        for sequences in _batches(context.samples, context.recipe):
            batch = family.collate(sequences, offset=offset)
            losses.counts += batch.counts
            context.forward(batch, losses)
    return InitialLoss(family.loss_terms, family.chance, by_offset, len(context.samples))


def check_loss_finite(loss: InitialLoss, context: CheckContext) -> None:
    if torch.isfinite(loss.by_offset[1].sums).all():
        return
    infinite = [name for name, mean in loss.per_stream(1).items() if not math.isfinite(mean)]
    precision = context.trainer.precision
    other = "bf16, or fp32 where there is none" if precision.may_overflow else "fp32, to find the cause"
    raise TrainingError(
        f"before training the loss of {format_names(infinite)} is not finite, in {precision.name}",
        hint=f"--set train.precision={other}",
    )


def check_stop_labels(loss: InitialLoss, context: CheckContext) -> None:
    """A model learns to stop from the ends of stream alone."""
    ends = int(loss.by_offset[1].stops[1])
    if ends < loss.sequences and any(loss.streams[k].startswith("code") for k in loss.decisive):
        raise TrainingError(
            f"{loss.sequences} samples have {ends} ends of stream among their labels: speech would not learn to stop",
            hint=context.render_hint(context.targets[0].id) + " --frames",
        )


def check_not_solved(loss: InitialLoss, context: CheckContext) -> None:
    if loss.accuracy > MAX_INITIAL_ACCURACY:
        raise TrainingError(
            f"before the first step {loss.accuracy:.1%} of the targets are right, at a loss of {loss.mean(1):.4f} "
            f"where chance is {loss.mean_chance:.2f}: the labels are what the model is given to read, a copy task, or "
            "it has learned these very clips before",
            hint=context.render_hint(context.targets[0].id) + " --frames",
        )


def check_better_than_chance(loss: InitialLoss, context: CheckContext) -> None:
    """One codebook is enough. On an unfamiliar voice, a small model may be wrong about the last ones with confidence,
    which weighs more in a mean than what it knows of the first."""
    means = loss.per_stream(1)
    if all(means.get(loss.streams[k], math.inf) >= CHANCE_SHARE * loss.chance[k] for k in loss.decisive):
        model = context.recipe.model.source
        raise TrainingError(
            f"{model} is no better than chance on this data: {loss.mean(1):.2f}, where a uniform "
            f"guess has {loss.mean_chance:.2f}. Its weights are random, or the codes are another codec's",
            hint=f"myna prepare SOURCE --out {context.recipe.data.train} --model {model} makes the "
            "codes anew; to train from random weights, --set model.check_pretrained=false",
        )


def check_label_alignment(loss: InitialLoss, context: CheckContext) -> None:
    """A pretrained model predicts best what it was trained for: labels at offset +1.

    The mean must be lowest there, and most codebooks must agree: one alone may waver, and one confident error weighs
    much in a mean.
    """
    means = {offset: loss.mean(offset) for offset in loss.by_offset}
    rows = {offset: loss.per_stream(offset) for offset in loss.by_offset}
    names = [loss.streams[k] for k in loss.decisive]
    best = [min(rows, key=lambda offset: rows[offset].get(name, math.inf)) for name in names]
    others = [offset for offset in means if offset != 1]
    if all(means[1] < means[other] and best.count(1) > best.count(other) for other in others):
        return
    lowest = min(others, key=lambda offset: means[offset])
    raise TrainingError(
        f"the labels are misplaced: {context.recipe.model.source} predicts them best at offset {lowest:+d} instead of "
        f"+1\n{loss.table}",
        hint="the family's `collate` or `render` is wrong: python -m pytest tests/models; if the model was never "
        "trained to speak, --set model.check_pretrained=false",
    )


def _batches(samples: list[RenderedSequence], recipe: Recipe) -> Iterator[list[RenderedSequence]]:
    """Samples in batches no larger than a micro-batch."""
    max_tokens = recipe.data.row_tokens * recipe.train.micro_batch_size
    batch: list[RenderedSequence] = []
    for sample in samples:
        if batch and sum(map(len, batch)) + len(sample) > max_tokens:
            yield batch
            batch = []
        batch.append(sample)
    yield batch
