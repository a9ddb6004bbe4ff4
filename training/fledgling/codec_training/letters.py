"""What is said, as letters: they teach the first codebook to tell speech sounds apart.

A language model has an easier time with codes that follow the words. Others borrow that from a large speech model; here
the texts of the recordings do it, by connectionist temporal classification: a small reader behind the first codebook
must be able to spell the text, whoever speaks it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from myna.models.mel_codec.network import Block

BLANK = 0
NEVER = -1e30
"""The logarithm of what cannot happen; finite, so that differences of two stay numbers."""


def spelled(text: str) -> str:
    """Lower-case letters and the marks on them; all else is not heard as a sound of its own."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return "".join(symbol for symbol in plain if unicodedata.category(symbol)[0] in "LM")


def alphabet_of(texts: Iterable[str]) -> str:
    return "".join(sorted({symbol for text in texts for symbol in spelled(text)}))


def as_numbers(texts: Sequence[str], alphabet: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(texts, longest) numbers from 1, filled up with 0, and how many each text has.

    A letter outside the alphabet leaves its whole text out: a wrong spelling would teach worse than none.
    """
    number = {symbol: place for place, symbol in enumerate(alphabet, start=1)}
    rows = [[number.get(symbol, BLANK) for symbol in spelled(text)] for text in texts]
    rows = [row if BLANK not in row else [] for row in rows]
    table = torch.zeros(len(rows), max([1, *map(len, rows)]), dtype=torch.int64)
    for place, row in enumerate(rows):
        table[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return table, torch.tensor([len(row) for row in rows])


class Reader(nn.Module):
    """(clips, frames, latent) -> a score for each letter, and for none, at each frame."""

    def __init__(self, latent: int, width: int, letters: int) -> None:
        super().__init__()
        self.enter = nn.Linear(latent, width)
        self.blocks = nn.Sequential(*(Block(width, 7, 2) for _ in range(2)))
        self.norm = nn.LayerNorm(width)
        self.leave = nn.Linear(width, letters + 1)

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.leave(self.norm(self.blocks(self.enter(latent))))
        return scores


class _Spelling(torch.autograd.Function):
    """-log of the probability of each text, over all ways to spread its letters over the frames.

    torch's own wants the lengths on the host, which a captured graph cannot give. Forward and backward sums run side by
    side as one batch, so that a frame costs a handful of kernels.
    """

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, letters: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        clips, frames, _ = scores.shape
        logs = scores.log_softmax(-1)
        states = 2 * letters.shape[1] + 1
        # A blank before, between and behind the letters.
        path = torch.zeros(clips, states, dtype=torch.int64, device=scores.device)
        path[:, 1::2] = letters
        emitted = logs.gather(2, path[:, None].expand(-1, frames, -1))
        # Two letters may follow each other without a blank where they differ.
        skips = torch.zeros(clips, states, dtype=torch.bool, device=scores.device)
        skips[:, 2:] = (path[:, 2:] != BLANK) & (path[:, 2:] != path[:, :-2])
        skips_back = torch.zeros_like(skips)
        skips_back[:, :-2] = skips[:, 2:]

        places = torch.arange(states, device=scores.device)
        last = 2 * counts[:, None]
        begins = (places < 2).expand(clips, -1)
        ends = (places == last) | (places == last - 1)
        steps = torch.cat([emitted, emitted.flip(1, 2)]).transpose(0, 1).contiguous()
        barred = torch.where(torch.cat([skips, skips_back.flip(1)]), 0.0, NEVER)
        first = torch.where(torch.cat([begins, ends.flip(1)]), 0.0, NEVER)

        # Two columns on the left that nothing can come from.
        sums = torch.full((frames, 2 * clips, states + 2), NEVER, device=scores.device)
        sums[0, :, 2:] = first + steps[0]
        for frame in range(1, frames):
            before = sums[frame - 1]
            stay_or_step = torch.logaddexp(before[:, 2:], before[:, 1:-1])
            either = torch.logaddexp(stay_or_step, before[:, :-2] + barred)
            torch.add(either, steps[frame], out=sums[frame, :, 2:])
        onward = sums[:, :clips, 2:].transpose(0, 1)
        backward = sums[:, clips:, 2:].transpose(0, 1).flip(1, 2)

        total = torch.where(ends, onward[:, -1], NEVER).logsumexp(-1)
        shares = (onward + backward - emitted - total[:, None, None]).exp()
        expected = torch.zeros_like(logs).scatter_add_(2, path[:, None].expand(-1, frames, -1), shares)
        possible = (total > NEVER / 2) & (counts > 0)
        ctx.save_for_backward(torch.where(possible[:, None, None], logs.exp() - expected, 0.0))
        return torch.where(possible, -total, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * grad[:, None, None], None, None


def spelling_loss(scores: torch.Tensor, letters: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Nats per letter, over the clips whose text is known and fits its frames."""
    lost: torch.Tensor = _Spelling.apply(scores.float(), letters, counts)  # type: ignore[no-untyped-call]
    return lost.sum() / torch.where(lost > 0, counts, 0).sum().clamp(min=1)
