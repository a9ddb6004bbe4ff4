"""`cross_entropy` as a Triton kernel: a row is read once if it fits, else twice, and overwritten with its gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST_BLOCK = 8192


@triton.jit
def _cross_entropy(
    logits,
    targets,
    losses,
    hits,
    smoothing,
    ignored,
    CLASSES: tl.constexpr,
    LEARNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    counts = target != ignored
    line = logits + row * CLASSES
    column = tl.arange(0, BLOCK)
    largest = -float("inf")
    first = 0
    total = 0.0
    plain_sum = 0.0
    for start in range(0, CLASSES, BLOCK):
        inside = start + column < CLASSES
        x = tl.load(line + start + column, mask=inside, other=-float("inf")).to(tl.float32)
        highest = tl.max(x, axis=0)
        # Of equals the first counts, as with argmax: only what is larger takes its place.
        first = tl.where(highest > largest, start + tl.argmax(x, axis=0), first)
        above = tl.maximum(largest, highest)
        total = total * tl.exp(largest - above) + tl.sum(tl.exp(x - above), axis=0)
        plain_sum += tl.sum(tl.where(inside, x, 0.0), axis=0)
        largest = above
    level = largest + tl.log(total)
    wanted = tl.load(line + tl.where(counts, target, 0)).to(tl.float32)
    loss = (1.0 - smoothing) * (level - wanted) + smoothing * (level - plain_sum / CLASSES)
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    tl.store(hits + row, counts & (first == target))
    if LEARNS:
        # Every thread has read the wanted logit before any overwrites it.
        tl.debug_barrier()
        for start in range(0, CLASSES, BLOCK):
            inside = start + column < CLASSES
            x = tl.load(line + start + column, mask=inside, other=-float("inf")).to(tl.float32)
            slope = tl.exp(x - level) - smoothing / CLASSES
            slope -= tl.where(start + column == target, 1.0 - smoothing, 0.0)
            slope = tl.where(counts, slope, 0.0)
            tl.store(line + start + column, slope.to(logits.dtype.element_ty), mask=inside)


def cross_entropy_in_place(
    logits: torch.Tensor, targets: torch.Tensor, smoothing: float, ignored: int, learns: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, classes = logits.shape
    assert logits.is_contiguous()
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    hits = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        block = min(LARGEST_BLOCK, triton.next_power_of_2(classes))
        _cross_entropy[(rows,)](
            logits,
            targets,
            losses,
            hits,
            smoothing,
            ignored,
            CLASSES=classes,
            LEARNS=learns,
            BLOCK=block,
            num_warps=4 if block <= 2048 else 8,
        )
    return losses, hits
