"""Many streams, one loss: weighed per stream, divided once by the targets of the whole optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from myna.config import LossSettings
from myna.errors import ConfigError


def stream_weights(streams: Sequence[str], settings: LossSettings) -> torch.Tensor:
    """(streams,): the text weight, and codebook weights that sum to 1: the audio loss is a mean over codebooks."""
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
    weights = [next(left) / sum(audio) if name.startswith("code") else settings.text_weight for name in streams]
    return torch.tensor(weights, dtype=torch.float64)


def weighed_loss(sums: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The share of the step's loss that these sums hold; `counts` are the whole step's, over all ranks and passes."""
    per_target = (weights / counts.clamp(min=1)).to(sums.device, sums.dtype)
    return (sums * per_target).sum()


def stream_means(sums: torch.Tensor, counts: torch.Tensor) -> list[float | None]:
    """Mean per stream, None where there was nothing to learn."""
    return [s / c if c else None for s, c in zip(sums.tolist(), counts.tolist(), strict=True)]
