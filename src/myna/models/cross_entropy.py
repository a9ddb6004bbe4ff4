"""Cross-entropy without fp32 logits, which with a vocabulary of 128,000 would be the largest tensor in memory.

Losses, hits and the gradient come from one pass over the logits in their own type, and the gradient overwrites them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from myna.core.device import supports_triton
from myna.models.base import IGNORE_INDEX

CHUNK_LOGITS = 2**24
"""Logits that are converted to fp32 at a time without the kernel."""


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each row in fp32 and whether its target is ranked first, for (rows, classes) and
    (rows,). The logits are overwritten and must not be used afterwards. Rows whose target is `IGNORE_INDEX` have loss
    0."""
    return _CrossEntropy.apply(logits, targets, label_smoothing)  # type: ignore[no-any-return,no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        needs_grad = ctx.needs_input_grad[0]
        if supports_triton(logits):
            from myna.models.cross_entropy_kernel import cross_entropy_in_place

            losses, hits = cross_entropy_in_place(logits, targets, smoothing, IGNORE_INDEX, needs_grad)
        else:
            losses, hits = _in_chunks(logits, targets, smoothing, needs_grad)
        ctx.mark_non_differentiable(hits)
        if needs_grad:
            ctx.save_for_backward(logits.detach())
        return losses, hits

    @staticmethod
    def backward(ctx: Any, d_losses: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * d_losses[:, None].to(gradient.dtype), None, None


def _in_chunks(logits: Tensor, targets: Tensor, smoothing: float, needs_grad: bool) -> tuple[Tensor, Tensor]:
    classes = logits.shape[1]
    losses, hits = logits.new_empty(len(logits), dtype=torch.float32), targets.new_empty(len(logits), dtype=torch.bool)
    for start in range(0, len(logits), max(1, CHUNK_LOGITS // classes)):
        part = slice(start, start + max(1, CHUNK_LOGITS // classes))
        rows, labels = logits[part], targets[part]
        valid = labels != IGNORE_INDEX
        hits[part] = (rows.argmax(1) == labels) & valid
        log_probs = F.log_softmax(rows.float(), dim=1)
        losses[part] = F.nll_loss(log_probs, labels, ignore_index=IGNORE_INDEX, reduction="none") * (1 - smoothing)
        if smoothing:
            losses[part] -= log_probs.mean(1) * smoothing * valid
        if needs_grad:
            grad = log_probs.exp_().sub_(smoothing / classes)
            grad.scatter_add_(1, labels.clamp(min=0)[:, None], grad.new_full((len(rows), 1), smoothing - 1))
            rows.copy_(grad * valid[:, None])
    return losses, hits
