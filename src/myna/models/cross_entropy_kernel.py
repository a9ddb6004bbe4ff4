"""Triton kernel of `cross_entropy`. A row is read once or twice, and overwritten by its gradient."""

import torch
import triton
import triton.language as tl

MAX_BLOCK_SIZE = 8192


@triton.jit
def _cross_entropy_kernel(
    logits, targets, losses, hits, smoothing, ignored,
    CLASSES: tl.constexpr, NEEDS_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    valid = target != ignored
    line = logits + row * CLASSES
    column = tl.arange(0, BLOCK)
    running_max = -float("inf")
    first = 0
    total = 0.0
    logit_sum = 0.0
    for start in range(0, CLASSES, BLOCK):
        inside = start + column < CLASSES
        x = tl.load(line + start + column, mask=inside, other=-float("inf")).to(tl.float32)
        block_max = tl.max(x, axis=0)
        # Ties go to the first class, as in argmax.
        first = tl.where(block_max > running_max, start + tl.argmax(x, axis=0), first)
        new_max = tl.maximum(running_max, block_max)
        total = total * tl.exp(running_max - new_max) + tl.sum(tl.exp(x - new_max), axis=0)
        logit_sum += tl.sum(tl.where(inside, x, 0.0), axis=0)
        running_max = new_max
    logsumexp = running_max + tl.log(total)
    target_logit = tl.load(line + tl.where(valid, target, 0)).to(tl.float32)
    loss = (1.0 - smoothing) * (logsumexp - target_logit) + smoothing * (logsumexp - logit_sum / CLASSES)
    tl.store(losses + row, tl.where(valid, loss, 0.0))
    tl.store(hits + row, valid & (first == target))
    if NEEDS_GRAD:
        # All threads must have read the target logit before it is overwritten.
        tl.debug_barrier()
        for start in range(0, CLASSES, BLOCK):
            inside = start + column < CLASSES
            x = tl.load(line + start + column, mask=inside, other=-float("inf")).to(tl.float32)
            grad = tl.exp(x - logsumexp) - smoothing / CLASSES
            grad -= tl.where(start + column == target, 1.0 - smoothing, 0.0)
            grad = tl.where(valid, grad, 0.0)
            tl.store(line + start + column, grad.to(logits.dtype.element_ty), mask=inside)


def cross_entropy_in_place(
    logits: torch.Tensor, targets: torch.Tensor, smoothing: float, ignored: int, needs_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return losses and hits. With `needs_grad` the logits become their gradient."""
    rows, classes = logits.shape
    assert logits.is_contiguous()
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    hits = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        block = min(MAX_BLOCK_SIZE, triton.next_power_of_2(classes))
        _cross_entropy_kernel[(rows,)](
            *(logits, targets, losses, hits, smoothing, ignored),
            CLASSES=classes,
            NEEDS_GRAD=needs_grad,
            BLOCK=block,
            num_warps=4 if block <= 2048 else 8,
        )
    return losses, hits
