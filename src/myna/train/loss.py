"""Training loss over several streams: weighted per stream, divided once by the targets of the whole optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from myna.core.config import LossSettings, Recipe
from myna.core.errors import ConfigError, DataError
from myna.data.batch_builder import VoiceLabel
from myna.data.loader import Loader
from myna.models.base import VOICE_STREAMS, Batch, Family, RenderedSequence, StreamLosses, require_speaking

ADAPTIVE_DECAY = 0.9
"""Of the running mean of each codebook's loss, per step."""
ADAPTIVE_FLOOR = 0.1
"""Added to the predicted share of each codebook: one that is at chance still learns."""
CHECKED_ROWS = 64
"""Rows among which at least one must hold two speakers for a contrastive loss."""


def stage_weights(
    streams: Sequence[str],
    recipe: Recipe,
    step: int,
    steps: int,
    adaptive: AdaptiveCodebookWeights | None = None,
) -> torch.Tensor:
    """Stream weights of this step: those of its stage, or the recipe's own after the last stage."""
    loss = recipe.loss
    if adaptive is not None:
        loss = loss.model_copy(update={"codebook_weights": adaptive.weights})
    for stage in recipe.train.stages:
        if step <= (stage.until * steps if stage.until <= 1 else stage.until):
            changed = {"text_weight": stage.text_weight, "audio_weight": stage.audio_weight}
            return stream_weights(streams, loss.model_copy(update=changed))
    return stream_weights(streams, loss)


def stream_weights(streams: Sequence[str], settings: LossSettings) -> torch.Tensor:
    """(streams,): the text weight, codebook weights that sum to the audio weight, and those of losses that compare
    voices; a single stream weighs 1. `adaptive` weights are uniform before the first step and in evaluations."""
    if len(streams) == 1:
        return torch.ones(1, dtype=torch.float64)
    codebooks = sum(name.startswith("code") for name in streams)
    uniform = [1.0] * codebooks
    named = {"uniform": uniform, "1/k": [1.0 / (k + 1) for k in range(codebooks)], "adaptive": uniform}
    setting = settings.codebook_weights
    audio = named[setting] if isinstance(setting, str) else [float(weight) for weight in setting]
    if len(audio) != codebooks or (codebooks and sum(audio) <= 0):
        raise ConfigError(
            f"`loss.codebook_weights` has {len(audio)} weights summing to {sum(audio):g}, for {codebooks} codebooks",
            hint="give one weight per codebook, or `uniform`, `1/k` or `adaptive`",
        )
    remaining = iter(audio)
    others = {"text": settings.text_weight} | {name: getattr(settings, f"{name}_weight") for name in VOICE_STREAMS}
    weights = [
        settings.audio_weight * next(remaining) / sum(audio) if name.startswith("code") else others[name]
        for name in streams
    ]
    return torch.tensor(weights, dtype=torch.float64)


def codebook_weights(streams: Sequence[str], weights: torch.Tensor) -> list[float]:
    """The codebooks' part of stream weights."""
    return [weight for name, weight in zip(streams, weights.tolist(), strict=True) if name.startswith("code")]


def training_streams(family: Family, settings: LossSettings) -> tuple[str, ...]:
    """The family's streams, and those of losses that compare voices where the recipe has one."""
    return (*family.streams, *(VOICE_STREAMS if settings.compares_voices else ()))


class AdaptiveCodebookWeights:
    """Codebook weights that follow how much of each codebook the model predicts.

    That share is 1 - loss / chance, with a running mean of the codebook's loss over steps. Codebooks that are close to
    chance, as the last ones of a residual codec are, are mostly noise to the model and weigh little. Losses are those
    over all ranks, so that every rank has the same weights.
    """

    def __init__(self, streams: Sequence[str], chance: Sequence[float]) -> None:
        self._codebooks = [k for k, name in enumerate(streams) if name.startswith("code")]
        self._chance = [chance[k] for k in self._codebooks]
        self.means: list[float] | None = None
        """The state: a running mean per codebook; None before the first step."""

    @property
    def weights(self) -> tuple[float, ...]:
        """One weight per codebook, 1 in the mean."""
        means = self.means or self._chance
        shares = [ADAPTIVE_FLOOR + max(0.0, 1 - mean / level) for mean, level in zip(means, self._chance, strict=True)]
        return tuple(len(shares) * share / sum(shares) for share in shares)

    def update(self, losses: LossAccumulator) -> None:
        """Take in the losses of a step over all ranks; not those of one that has no audio or has overflowed."""
        step = [stream_means(losses.sums, losses.counts)[k] for k in self._codebooks]
        finite = [loss for loss in step if loss is not None and math.isfinite(loss)]
        if len(finite) == len(step):
            pairs = zip(self.means or finite, finite, strict=True)
            self.means = [ADAPTIVE_DECAY * mean + (1 - ADAPTIVE_DECAY) * loss for mean, loss in pairs]


def collate_for_training(family: Family, settings: LossSettings, sequences: Sequence[RenderedSequence]) -> Batch:
    """A batch that takes as much memory as one of these sequences in training: with losses that compare voices, as one
    row of as many speakers."""
    if not settings.compares_voices:
        return family.collate(sequences)
    labels = [VoiceLabel(0, speaker) for speaker in range(len(sequences))]
    return require_speaking(family).collate_voices(sequences, labels)


def check_voices(recipe: Recipe, loader: Loader[RenderedSequence, Batch]) -> None:
    """Refuse losses that compare voices where there is nothing to compare."""
    off = "--set loss.speaker_contrastive_weight=0 --set loss.reference_consistency_weight=0"
    rows = loader.first_rows(min(CHECKED_ROWS, loader.rows_in_first_epoch()))
    paired = [[sequence.target for sequence in row if len(sequence.references) == 1] for row in rows]
    if not any(paired):
        raise DataError(
            f"the targets of {recipe.data.train} have no reference to compare their voice with",
            hint=f"give speakers a name and a second clip, or {off}",
        )
    speakers = [{loader.builder.speaker(target) for target in row} - {None} for row in paired]
    if not recipe.loss.speaker_contrastive_weight or any(len(row) > 1 for row in speakers):
        return
    if len(set().union(*speakers)) < 2:
        raise DataError(
            f"`loss.speaker_contrastive_weight` tells speakers apart, and {recipe.data.train} names "
            f"{len(set().union(*speakers))}",
            hint="add recordings of other speakers, or --set loss.speaker_contrastive_weight=0",
        )
    raise DataError(
        f"none of the first {len(rows)} rows holds two speakers for `loss.speaker_contrastive_weight` to tell apart",
        hint=f"--set data.row_tokens={4 * recipe.data.row_tokens}, or --set loss.speaker_contrastive_weight=0",
    )


def weighted_loss(sums: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The part of the step's loss in these sums; `counts` are the whole step's, over all ranks and micro-batches."""
    per_target = (weights / counts.clamp(min=1)).to(sums.dtype).to(sums.device, non_blocking=True)
    return (sums * per_target).sum()


def stream_means(sums: torch.Tensor, counts: torch.Tensor) -> list[float | None]:
    """Mean loss per stream, None where there were no targets."""
    return [s / c if c else None for s, c in zip(sums.tolist(), counts.tolist(), strict=True)]


class LossAccumulator:
    """Loss sums over the micro-batches of a step or of an evaluation, on the CPU in double precision.

    Added results stay on the device until they are read: fetching them at once would have the host wait for the
    micro-batch, and then the device for the host.
    """

    def __init__(self, sums: torch.Tensor, correct: torch.Tensor, stops: torch.Tensor, counts: torch.Tensor) -> None:
        self.counts = counts
        self._totals = (sums, correct, stops)
        self._pending: list[StreamLosses] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled between ranks without anything on a device.
        return LossAccumulator, (*self._fetch(), self.counts)

    @classmethod
    def zeros(cls, streams: int) -> LossAccumulator:
        return cls(*(torch.zeros(n, dtype=torch.float64) for n in (streams, streams, 2, streams)))

    @property
    def sums(self) -> torch.Tensor:
        return self._fetch()[0]

    @property
    def correct(self) -> torch.Tensor:
        return self._fetch()[1]

    @property
    def stops(self) -> torch.Tensor:
        return self._fetch()[2]

    def add(self, result: StreamLosses) -> None:
        """Add the result of one micro-batch; `counts` are added apart, since they are known before it."""
        self._pending.append(StreamLosses(*(part.detach() for part in result)))

    def _fetch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The totals, with all pending results in one transfer. Counts of a micro-batch are small enough for fp32;
        not every device has fp64."""
        if self._pending:
            batches = torch.stack([torch.cat([part.float() for part in result]) for result in self._pending])
            self._pending.clear()
            for total, part in zip(self._totals, self._split(batches.cpu().double().sum(0)), strict=True):
                total += part
        return self._totals

    def _split(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flat.split([len(total) for total in self._totals])  # type: ignore[no-untyped-call, no-any-return]

    def reduced(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> LossAccumulator:
        """Totals over all processes, in one reduction; `counts` must already be those of all processes."""
        sums, correct, stops = self._split(reduce(torch.cat(self._fetch())))
        return LossAccumulator(sums, correct, stops, self.counts)

    def metrics(self, names: Sequence[str], weights: torch.Tensor) -> dict[str, Any]:
        """Losses and accuracies as they are written to metrics.jsonl."""
        losses = zip(names, stream_means(self.sums, self.counts), strict=True)
        tokens = len(names) - sum(name in VOICE_STREAMS for name in names)
        correct, targets = float(self.correct[:tokens].sum()), float(self.counts[:tokens].sum())
        stops, ends = self.stops.tolist()
        return {
            "loss": float(weighted_loss(self.sums, self.counts, weights)),
            **{name: loss for name, loss in losses if loss is not None},
            "accuracy": correct / targets if targets else None,
            "stop_accuracy": stops / ends if ends else None,
        }
