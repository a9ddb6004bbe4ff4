"""CTC loss on letters, which makes the first codebook semantic.

Codes that follow the words are easier for a language model. Others distil that from a large speech model; here the
transcripts do it: a small CTC head on the first codebook has to predict the letters of the text.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from myna.models.mel_codec import ConvNeXtBlock

BLANK = 0
MIN_LETTER_SHARE = 1e-4
"""Minimum share of all letters: rarer ones are in no alphabet, and texts with them have no CTC target."""
LOG_ZERO = -1e30
"""Log probability of the impossible; finite, so that differences of two stay numbers."""


def letters_of(text: str) -> str:
    """Lower-case letters of a text and their combining marks; everything else is dropped."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return "".join(symbol for symbol in plain if unicodedata.category(symbol)[0] in "LM")


def alphabet_of(texts: Iterable[str]) -> str:
    """Letters that are common enough to be learned."""
    counts = Counter(symbol for text in texts for symbol in letters_of(text))
    return "".join(sorted(symbol for symbol, count in counts.items() if count >= MIN_LETTER_SHARE * counts.total()))


def letter_ids(texts: Sequence[str], alphabet: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Letter ids from 1, padded with 0, as (texts, longest), and the number of letters of each text.

    A letter outside the alphabet leaves its whole text out: a wrong target is worse than none.
    """
    number = {symbol: place for place, symbol in enumerate(alphabet, start=1)}
    rows = [[number.get(symbol, BLANK) for symbol in letters_of(text)] for text in texts]
    rows = [row if BLANK not in row else [] for row in rows]
    table = torch.zeros(len(rows), max([1, *map(len, rows)]), dtype=torch.int64)
    for place, row in enumerate(rows):
        table[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return table, torch.tensor([len(row) for row in rows])


class CTCHead(nn.Module):
    """Letter classifier: (clips, frames, latent) -> logits of the letters and the blank at each frame."""

    def __init__(self, latent: int, width: int, letters: int) -> None:
        super().__init__()
        self.enter = nn.Linear(latent, width)
        self.blocks = nn.Sequential(*(ConvNeXtBlock(width, 7, 2) for _ in range(2)))
        self.norm = nn.LayerNorm(width)
        self.leave = nn.Linear(width, letters + 1)

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.leave(self.norm(self.blocks(self.enter(latent))))
        return scores


class _CTCLoss(torch.autograd.Function):
    """CTC negative log likelihood of each text, without host synchronisation.

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
        barred = torch.where(torch.cat([skips, skips_back.flip(1)]), 0.0, LOG_ZERO)
        first = torch.where(torch.cat([begins, ends.flip(1)]), 0.0, LOG_ZERO)

        # Two columns on the left that nothing can come from.
        sums = torch.full((frames, 2 * clips, states + 2), LOG_ZERO, device=scores.device)
        sums[0, :, 2:] = first + steps[0]
        for frame in range(1, frames):
            before = sums[frame - 1]
            stay_or_step = torch.logaddexp(before[:, 2:], before[:, 1:-1])
            either = torch.logaddexp(stay_or_step, before[:, :-2] + barred)
            torch.add(either, steps[frame], out=sums[frame, :, 2:])
        onward = sums[:, :clips, 2:].transpose(0, 1)
        backward = sums[:, clips:, 2:].transpose(0, 1).flip(1, 2)

        total = torch.where(ends, onward[:, -1], LOG_ZERO).logsumexp(-1)
        shares = (onward + backward - emitted - total[:, None, None]).exp()
        expected = torch.zeros_like(logs).scatter_add_(2, path[:, None].expand(-1, frames, -1), shares)
        possible = (total > LOG_ZERO / 2) & (counts > 0)
        ctx.save_for_backward(torch.where(possible[:, None, None], logs.exp() - expected, 0.0))
        return torch.where(possible, -total, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad[:, None, None], None, None


def ctc_loss(scores: torch.Tensor, letters: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """CTC loss in nats per letter, over the clips whose text is known and fits its frames."""
    lost: torch.Tensor = _CTCLoss.apply(scores.float(), letters, counts)  # type: ignore[no-untyped-call]
    return lost.sum() / torch.where(lost > 0, counts, 0).sum().clamp(min=1)
