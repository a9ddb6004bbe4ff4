"""Many streams, one loss: weighed per stream, divided once by the targets of the whole optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from myna.config import LossSettings, Recipe
from myna.errors import ConfigError
from myna.models.base import StreamLosses


def stage_weights(streams: Sequence[str], recipe: Recipe, step: int, steps: int) -> torch.Tensor:
    """The weights of this step: those of its stage, or the recipe's own after the last one."""
    loss = recipe.loss
    for stage in recipe.train.stages:
        if step <= (stage.until * steps if stage.until <= 1 else stage.until):
            changed = {"text_weight": stage.text_weight, "audio_weight": stage.audio_weight}
            return stream_weights(streams, loss.model_copy(update=changed))
    return stream_weights(streams, loss)


def stream_weights(streams: Sequence[str], settings: LossSettings) -> torch.Tensor:
    """(streams,): the text weight, and codebook weights that sum to the audio weight; one stream alone weighs 1."""
    if len(streams) == 1:
        return torch.ones(1, dtype=torch.float64)
    codebooks = sum(name.startswith("code") for name in streams)
    chosen = settings.codebook_weights
    if chosen == "uniform":
        audio = [1.0] * codebooks
    elif chosen == "1/k":
        audio = [1.0 / (k + 1) for k in range(codebooks)]
    else:
        audio = [float(weight) for weight in chosen]
    if len(audio) != codebooks or (codebooks and sum(audio) <= 0):
        raise ConfigError(
            f"`loss.codebook_weights` has {len(audio)} weights summing to {sum(audio):g}, for {codebooks} codebooks",
            hint="give one weight per codebook, or `uniform` or `1/k`",
        )
    left = iter(audio)
    weights = [
        settings.audio_weight * next(left) / sum(audio) if name.startswith("code") else settings.text_weight
        for name in streams
    ]
    return torch.tensor(weights, dtype=torch.float64)


def weighted_loss(sums: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The share of the step's loss that these sums hold; `counts` are the whole step's, over all ranks and passes."""
    per_target = (weights / counts.clamp(min=1)).to(sums.dtype).to(sums.device, non_blocking=True)
    return (sums * per_target).sum()


def stream_means(sums: torch.Tensor, counts: torch.Tensor) -> list[float | None]:
    """Mean per stream, None where there was nothing to learn."""
    return [s / c if c else None for s, c in zip(sums.tolist(), counts.tolist(), strict=True)]


class LossAccumulator:
    """Sums over the passes of a step or of an evaluation, on the CPU in double precision.

    What passes add stays on the device until somebody looks: fetching it at once would have the host wait for the pass,
    and then the device for the host.
    """

    def __init__(self, sums: torch.Tensor, correct: torch.Tensor, stops: torch.Tensor, counts: torch.Tensor) -> None:
        self.counts = counts
        self._sums, self._correct, self._stops = sums, correct, stops
        self._waiting: list[StreamLosses] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # Between ranks travels what is on the CPU.
        return LossAccumulator, (self.sums, self.correct, self.stops, self.counts)

    @classmethod
    def of(cls, streams: int) -> LossAccumulator:
        return cls(*(torch.zeros(n, dtype=torch.float64) for n in (streams, streams, 2, streams)))

    @property
    def sums(self) -> torch.Tensor:
        self._fetch()
        return self._sums

    @property
    def correct(self) -> torch.Tensor:
        self._fetch()
        return self._correct

    @property
    def stops(self) -> torch.Tensor:
        self._fetch()
        return self._stops

    def add(self, result: StreamLosses) -> None:
        """Results of one pass; counts are added apart, since they are known before it."""
        self._waiting.append(StreamLosses(*(part.detach() for part in result)))

    def _fetch(self) -> None:
        """All passes in one message. Counts of a pass are small enough for fp32; doubles not every device has."""
        if self._waiting:
            passes = torch.stack([torch.cat([part.float() for part in result]) for result in self._waiting])
            self._waiting.clear()
            whole = passes.cpu().double().sum(0)
            parts = whole.split([len(self._sums), len(self._correct), 2])  # type: ignore[no-untyped-call]
            for total, part in zip((self._sums, self._correct, self._stops), parts, strict=True):
                total += part

    def over_ranks(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> LossAccumulator:
        """The same over all processes, in one message; counts are taken to be everybody's already."""
        whole = reduce(torch.cat([self.sums, self.correct, self.stops]))
        sums, correct, stops = whole.split([len(self.sums), len(self.correct), 2])  # type: ignore[no-untyped-call]
        return LossAccumulator(sums, correct, stops, self.counts)

    def row(self, names: Sequence[str], weights: torch.Tensor) -> dict[str, Any]:
        """As it is written to metrics.jsonl."""
        losses = zip(names, stream_means(self.sums, self.counts), strict=True)
        hits, targets = float(self.correct.sum()), float(self.counts.sum())
        stops, ends = self.stops.tolist()
        return {
            "loss": float(weighted_loss(self.sums, self.counts, weights)),
            **{name: loss for name, loss in losses if loss is not None},
            "accuracy": hits / targets if targets else None,
            "stop_accuracy": stops / ends if ends else None,
        }
