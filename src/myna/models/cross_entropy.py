"""Cross-entropy that never holds fp32 logits: with a vocabulary of 128,000 they would be the largest thing in memory.

Losses, hits and the gradient come from one pass over the logits in the type they have, and the gradient takes their
place.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from myna.models.base import IGNORED
from myna.models.triton_support import fused

CHUNK = 2**24
"""Logits that are fp32 at a time where there is no kernel."""


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, classes) and (rows,) -> each row's loss in fp32, and whether its target is ranked first.

    The logits are used up: nobody else may look at them afterwards. Rows whose target is `IGNORED` cost nothing.
    """
    return _CrossEntropy.apply(logits, targets, label_smoothing)  # type: ignore[no-any-return,no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, smoothing: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        learns = ctx.needs_input_grad[0]
        if fused(logits):
            from myna.models.cross_entropy_kernel import cross_entropy_in_place

            losses, hits = cross_entropy_in_place(logits, targets, smoothing, IGNORED, learns)
        else:
            losses, hits = _in_chunks(logits, targets, smoothing, learns)
        ctx.mark_non_differentiable(hits)
        if learns:
            ctx.save_for_backward(logits.detach())
        return losses, hits

    @staticmethod
    def backward(ctx: Any, d_losses: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * d_losses[:, None].to(gradient.dtype), None, None


def _in_chunks(
    logits: torch.Tensor, targets: torch.Tensor, smoothing: float, learns: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    classes = logits.shape[1]
    losses, hits = logits.new_empty(len(logits), dtype=torch.float32), targets.new_empty(len(logits), dtype=torch.bool)
    for start in range(0, len(logits), max(1, CHUNK // classes)):
        part = slice(start, start + max(1, CHUNK // classes))
        rows, wanted = logits[part], targets[part]
        counts = wanted != IGNORED
        hits[part] = (rows.argmax(1) == wanted) & counts
        chances = F.log_softmax(rows.float(), dim=1)
        losses[part] = F.nll_loss(chances, wanted, ignore_index=IGNORED, reduction="none") * (1 - smoothing)
        if smoothing:
            losses[part] -= chances.mean(1) * smoothing * counts
        if learns:
            slope = chances.exp_().sub_(smoothing / classes)
            slope.scatter_add_(1, wanted.clamp(min=0)[:, None], slope.new_full((len(rows), 1), smoothing - 1))
            rows.copy_(slope * counts[:, None])
    return losses, hits
