"""Residual vector quantizer with EMA codebook updates and restarts of idle entries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from myna.models.mel_codec import ResidualVectorQuantizer

EMA_DECAY = 0.99
"""Decay of the codebook statistics."""
IDLE_SHARE, RESTART_SHARE = 0.05, 0.3
"""An entry with a count below the first share of the mean is moved to a random latent and gets the second share as its
count, so that it has a hundred steps and more before it can be idle again."""
KMEANS_ROUNDS = 10
"""Rounds of k-means when codebooks are initialized."""


class QuantizerOutput(NamedTuple):
    latent: torch.Tensor
    """Quantized latents, the decoder's input: (clips, frames, latent)."""
    first: torch.Tensor
    """Latents quantized by the first codebook alone."""
    commitment: torch.Tensor
    """Commitment loss: mean squared distance of residuals from their entries, summed over codebooks."""
    residual: torch.Tensor
    """Mean squared residual after the last codebook."""
    codes: torch.Tensor
    """(clips, frames, codebooks)."""


class EMAQuantizer(nn.Module):
    """Wraps the codec's quantizer for training: straight-through gradients and moving averages of its entries."""

    counts: torch.Tensor
    sums: torch.Tensor

    def __init__(self, quantiser: ResidualVectorQuantizer) -> None:
        super().__init__()
        self._quantiser = [quantiser]  # in a list, so that its entries are saved once, with the codec
        self.register_buffer("counts", torch.zeros(quantiser.books.shape[:2]))
        self.register_buffer("sums", torch.zeros(quantiser.books.shape))

    @property
    def quantiser(self) -> ResidualVectorQuantizer:
        return self._quantiser[0]

    @torch.no_grad()
    def init_by_kmeans(self, latents: torch.Tensor, frames: float) -> None:
        """Initialise every codebook by k-means on (many, latent), each on the residual of those before it.

        `frames` is the number of frames of a step, which scales the initial counts.
        """
        books, residual = self.quantiser.books, latents
        for number, book in enumerate(books):
            book.copy_(
                residual[
                    torch.randperm(len(residual), device=residual.device).repeat(1 + len(book) // len(residual))[
                        : len(book)
                    ]
                ]
            )
            for _ in range(KMEANS_ROUNDS):
                sums, counts = self._sum_by_entry(residual, self.quantiser.nearest(residual, number), number)
                book.copy_(torch.where(counts[:, None] > 0, sums / counts[:, None].clamp(min=1), book))
            chosen = self.quantiser.nearest(residual, number)
            self.counts[number] = self._sum_by_entry(residual, chosen, number)[1] * (frames / len(residual))
            residual = residual - book[chosen]
        self.sums.copy_(books * self.counts[..., None])

    def forward(self, latent: torch.Tensor, mask: torch.Tensor, depth: torch.Tensor) -> QuantizerOutput:
        """`mask` is True for frames with audio (clips, frames); `depth` is how many codebooks each clip may use."""
        weight = mask.to(latent.dtype)
        residual, total, commitment = latent, torch.zeros_like(latent), latent.new_zeros(())
        codes, first = [], latent
        restarts = self._random_frames(mask) if self.training else None
        for number in range(len(self.quantiser.books)):
            chosen = self.quantiser.nearest(residual.detach(), number)
            entry = F.embedding(chosen, self.quantiser.books[number])
            used = weight * (number < depth)[:, None]
            commitment = commitment + ((residual - entry).square().mean(-1) * used).sum() / used.sum().clamp(min=1)
            if restarts is not None:
                self._update(number, residual.detach(), chosen, used, restarts)
            total = total + entry * (number < depth)[:, None, None]
            residual = residual - entry
            codes.append(chosen)
            first = total if number == 0 else first
        # Straight-through gradient.
        return QuantizerOutput(
            latent + (total - latent).detach(),
            latent + (first - latent).detach(),
            commitment,
            ((latent - total.detach()).square().mean(-1) * weight).sum() / weight.sum().clamp(min=1),
            torch.stack(codes, -1),
        )

    def quantize(self, latent: torch.Tensor) -> torch.Tensor:
        """`decode` of `encode` of (..., latent), bit by bit; no statistics are updated."""
        residual, total = latent, torch.zeros_like(latent)
        for number, book in enumerate(self.quantiser.books):
            entry = F.embedding(self.quantiser.nearest(residual, number), book)
            residual, total = residual - entry, total + entry
        return total

    def _random_frames(self, mask: torch.Tensor) -> torch.Tensor:
        """Draw a random frame index for each entry of a codebook, first of frames that hold audio."""
        size, flat = self.counts.shape[1], mask.flatten()
        priority = torch.rand(len(flat), device=mask.device) + flat
        picked = priority.topk(min(size, len(flat))).indices
        return picked.repeat(-(-size // len(picked)))[:size]

    @torch.no_grad()
    def _update(
        self, number: int, residual: torch.Tensor, chosen: torch.Tensor, used: torch.Tensor, restarts: torch.Tensor
    ) -> None:
        flat = residual.flatten(0, 1)
        sums, counts = self._sum_by_entry(flat, chosen.flatten(), number, used.flatten())
        self.counts[number].lerp_(counts, 1 - EMA_DECAY)
        self.sums[number].lerp_(sums, 1 - EMA_DECAY)
        mean_count = self.counts[number].mean()
        idle = self.counts[number] < IDLE_SHARE * mean_count
        counts = torch.where(idle, RESTART_SHARE * mean_count, self.counts[number])
        self.sums[number].copy_(torch.where(idle[:, None], flat[restarts] * counts[:, None], self.sums[number]))
        self.counts[number].copy_(counts)
        self.quantiser.books[number].copy_(self.sums[number] / counts[:, None].clamp(min=1e-5))

    def _sum_by_entry(
        self, vectors: torch.Tensor, chosen: torch.Tensor, number: int, weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum and number of the vectors assigned to each entry."""
        weight = torch.ones(len(vectors), device=vectors.device) if weight is None else weight
        sums = torch.zeros_like(self.sums[number]).index_add_(0, chosen, vectors * weight[:, None])
        return sums, torch.zeros_like(self.counts[number]).index_add_(0, chosen, weight)
