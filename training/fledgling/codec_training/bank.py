"""All sounds in the memory of the device, and batches drawn from them without asking the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from codec_training.letters import as_numbers
from codec_training.sounds import Clip, as_waves

WHOLE = 0.7
"""The share of clips that are placed whole where they fit; the rest is cut anywhere, as at the edges of recordings."""
QUIETER = 12.0
"""Decibels by which half of the clips are turned down at most, since recordings come at all levels."""
EDGE = 3
"""Frames of silence that a window may show before and behind a clip."""


class Batch(NamedTuple):
    waves: torch.Tensor
    """(clips, context * hop): each clip, or a part of it, with silence around it."""
    heard: torch.Tensor
    """(clips, context): frames that hold sound of the clip."""
    window: torch.Tensor
    """(clips,): the frame from which on the sound is decoded and compared."""
    letters: torch.Tensor
    counts: torch.Tensor
    """Letters of each clip; none where the clip was cut."""


class Bank:
    """Sources with their weights: a batch takes so much of each, whatever their hours."""

    def __init__(
        self,
        sources: Sequence[Sequence[Clip]],
        weights: Sequence[float],
        *,
        alphabet: str,
        hop: int,
        context: int,
        window: int,
        noise: float,
        device: torch.device,
    ) -> None:
        assert window <= context
        self.hop, self.context, self.window, self.noise, self.device = hop, context, window, noise, device
        clips = [clip for source in sources for clip in source]
        lengths = torch.tensor([len(clip.samples) for clip in clips])
        self.samples = torch.cat([torch.from_numpy(clip.samples) for clip in clips]).to(device)
        self.starts = (lengths.cumsum(0) - lengths).to(device)
        self.lengths = lengths.to(device)
        # What never fits the context is never spelled, and would only widen the table; nor is anything without letters.
        fits = [bool(alphabet) and len(clip.samples) <= context * hop for clip in clips]
        texts = [clip.text if fit else "" for clip, fit in zip(clips, fits, strict=True)]
        letters, counts = as_numbers(texts, alphabet)
        self.letters, self.counts = letters.to(device), counts.to(device)
        shares = [
            torch.full((len(source),), weight / sum(weights)) * _lengths(source) / _lengths(source).sum()
            for source, weight in zip(sources, weights, strict=True)
        ]
        self.ladder = torch.cat(shares).double().cumsum(0).float().to(device)

    def draw(self, clips: int) -> Batch:
        size, device = self.context * self.hop, self.device
        chosen = torch.searchsorted(self.ladder, torch.rand(clips, device=device)).clamp(max=len(self.ladder) - 1)
        lengths = self.lengths[chosen]
        begins = self._begins(lengths, size)
        waves = self._cut(self.starts[chosen], lengths, begins, size)
        waves = self._at_some_level(waves)

        frames = torch.arange(self.context, device=device)[None] * self.hop + begins[:, None]
        heard = (frames < lengths[:, None]) & (frames + self.hop > 0)
        first = torch.div((-begins).clamp(min=0), self.hop, rounding_mode="floor") - EDGE
        last = torch.div((lengths - begins).clamp(max=size), self.hop, rounding_mode="floor") - self.window + EDGE
        first = first.clamp(0, self.context - self.window)
        last = torch.maximum(last.clamp(max=self.context - self.window), first)
        window = (first + torch.rand(clips, device=device) * (last - first + 1)).long()

        whole = (begins <= 0) & (begins + size >= lengths)
        return Batch(waves, heard, window, self.letters[chosen], torch.where(whole, self.counts[chosen], 0))

    def _begins(self, lengths: torch.Tensor, size: int) -> torch.Tensor:
        """Where in the clip the context begins, in samples; below 0 where silence comes first."""
        dice = torch.rand(2, len(lengths), device=self.device)
        spare, window = lengths - size, self.window * self.hop
        low = torch.where(dice[0] < WHOLE, spare.clamp(max=0), window - size)
        high = torch.where(dice[0] < WHOLE, spare.clamp(min=0), torch.maximum(lengths - window, low))
        return (low + dice[1] * (high - low + 1)).long()

    def _cut(self, starts: torch.Tensor, lengths: torch.Tensor, begins: torch.Tensor, size: int) -> torch.Tensor:
        places = begins[:, None] + torch.arange(size, device=self.device)
        inside = (places >= 0) & (places < lengths[:, None])
        found = self.samples[(starts[:, None] + places).clamp(0, len(self.samples) - 1)]
        return as_waves(found) * inside

    def _at_some_level(self, waves: torch.Tensor) -> torch.Tensor:
        dice = torch.rand(4, len(waves), 1, device=self.device)
        gain = torch.where(dice[0] < 0.5, 10 ** (-QUIETER / 20 * dice[1]), 1.0)
        # Rooms are never silent: now and then a hiss between -80 and -50 dB lies under the clip.
        hiss = torch.where(dice[2] < self.noise, 10 ** (-4 + 1.5 * dice[3]), 0.0)
        return waves * gain + hiss * torch.randn_like(waves)


def _lengths(source: Sequence[Clip]) -> torch.Tensor:
    return torch.tensor([len(clip.samples) for clip in source], dtype=torch.float64)
