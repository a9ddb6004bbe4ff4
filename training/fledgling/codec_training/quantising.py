"""How the codebooks learn: entries move to the running mean of what they stand for, and idle ones start anew."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from myna.models.mel_codec.network import Quantiser

MEMORY = 0.99
"""How much of the running means a step keeps."""
IDLE, FRESH = 0.05, 0.3
"""An entry that stands for less than the first share of its due is put where sounds are, and counts like the second, so
that it has a hundred steps and more to find its own."""
ROUNDS = 10
"""Of k-means, when the codebooks are first laid out."""


class Quantised(NamedTuple):
    latent: torch.Tensor
    """What the decoder gets: (clips, frames, latent)."""
    first: torch.Tensor
    """What the first codebook alone says."""
    distance: torch.Tensor
    """How far latents lie from their entries: pulls the encoder to what can be written down. All codebooks added up."""
    left: torch.Tensor
    """The same for what the last codebook leaves over. The first ones do not pull at what later ones are there for."""
    codes: torch.Tensor
    """(clips, frames, codebooks)."""


class LearningQuantiser(nn.Module):
    """The codec's quantiser with what it needs in training beside its entries."""

    counts: torch.Tensor
    sums: torch.Tensor

    def __init__(self, quantiser: Quantiser) -> None:
        super().__init__()
        self._quantiser = [quantiser]  # in a list, so that its entries are saved once, with the codec
        self.register_buffer("counts", torch.zeros(quantiser.books.shape[:2]))
        self.register_buffer("sums", torch.zeros(quantiser.books.shape))

    @property
    def quantiser(self) -> Quantiser:
        return self._quantiser[0]

    @torch.no_grad()
    def lay_out(self, latents: torch.Tensor, frames: float) -> None:
        """Lay out every codebook by k-means on (many, latent), each on what those before it leave over.

        `frames` is how many a step has, so that the entries begin with the counts that are their due.
        """
        books, rest = self.quantiser.books, latents
        for number, book in enumerate(books):
            book.copy_(
                rest[torch.randperm(len(rest), device=rest.device).repeat(1 + len(book) // len(rest))[: len(book)]]
            )
            for _ in range(ROUNDS):
                sums, counts = self._heaped(rest, self.quantiser.nearest(rest, number), number)
                book.copy_(torch.where(counts[:, None] > 0, sums / counts[:, None].clamp(min=1), book))
            chosen = self.quantiser.nearest(rest, number)
            self.counts[number] = self._heaped(rest, chosen, number)[1] * (frames / len(rest))
            rest = rest - book[chosen]
        self.sums.copy_(books * self.counts[..., None])

    def forward(self, latent: torch.Tensor, heard: torch.Tensor, depth: torch.Tensor) -> Quantised:
        """`heard` marks frames that hold sound (clips, frames); `depth` is how many codebooks each clip may use."""
        weight = heard.to(latent.dtype)
        rest, total, distance = latent, torch.zeros_like(latent), latent.new_zeros(())
        codes, first = [], latent
        places = self._somewhere(heard) if self.training else None
        for number in range(len(self.quantiser.books)):
            chosen = self.quantiser.nearest(rest.detach(), number)
            entry = F.embedding(chosen, self.quantiser.books[number])
            used = weight * (number < depth)[:, None]
            distance = distance + ((rest - entry).square().mean(-1) * used).sum() / used.sum().clamp(min=1)
            if places is not None:
                self._learn(number, rest.detach(), chosen, used, places)
            total = total + entry * (number < depth)[:, None, None]
            rest = rest - entry
            codes.append(chosen)
            first = total if number == 0 else first
        # The gradient passes as if nothing had been rounded.
        return Quantised(
            latent + (total - latent).detach(),
            latent + (first - latent).detach(),
            distance,
            ((latent - total.detach()).square().mean(-1) * weight).sum() / weight.sum().clamp(min=1),
            torch.stack(codes, -1),
        )

    def rounded(self, latent: torch.Tensor) -> torch.Tensor:
        """What the codes of (..., latent) mean, with nothing learned: `decode` of `encode`, number by number."""
        rest, total = latent, torch.zeros_like(latent)
        for number, book in enumerate(self.quantiser.books):
            entry = F.embedding(self.quantiser.nearest(rest, number), book)
            rest, total = rest - entry, total + entry
        return total

    def _somewhere(self, heard: torch.Tensor) -> torch.Tensor:
        """As many random places as a codebook has entries, of frames that hold sound as far as there are."""
        size, flat = self.counts.shape[1], heard.flatten()
        dice = torch.rand(len(flat), device=heard.device) + flat
        picked = dice.topk(min(size, len(flat))).indices
        return picked.repeat(-(-size // len(picked)))[:size]

    @torch.no_grad()
    def _learn(
        self, number: int, rest: torch.Tensor, chosen: torch.Tensor, used: torch.Tensor, places: torch.Tensor
    ) -> None:
        flat = rest.flatten(0, 1)
        sums, counts = self._heaped(flat, chosen.flatten(), number, used.flatten())
        self.counts[number].lerp_(counts, 1 - MEMORY)
        self.sums[number].lerp_(sums, 1 - MEMORY)
        due = self.counts[number].mean()
        idle = self.counts[number] < IDLE * due
        fresh = torch.where(idle, FRESH * due, self.counts[number])
        self.sums[number].copy_(torch.where(idle[:, None], flat[places] * fresh[:, None], self.sums[number]))
        self.counts[number].copy_(fresh)
        self.quantiser.books[number].copy_(self.sums[number] / fresh[:, None].clamp(min=1e-5))

    def _heaped(
        self, vectors: torch.Tensor, chosen: torch.Tensor, number: int, weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum and the number of the vectors that chose each entry."""
        weight = torch.ones(len(vectors), device=vectors.device) if weight is None else weight
        sums = torch.zeros_like(self.sums[number]).index_add_(0, chosen, vectors * weight[:, None])
        return sums, torch.zeros_like(self.counts[number]).index_add_(0, chosen, weight)
