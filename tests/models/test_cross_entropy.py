"""Our cross-entropy equals torch's: losses, gradients, hits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from myna.models import cross_entropy as module
from myna.models.base import IGNORE_INDEX
from myna.models.cross_entropy import cross_entropy


def drawn(rows: int, classes: int, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * classes)
    logits = torch.randn(rows, classes, generator=generator).to(device, dtype)
    targets = torch.randint(classes, (rows,), generator=generator).to(device)
    targets[::5] = IGNORE_INDEX
    return logits, targets


def both_ways(logits: torch.Tensor, targets: torch.Tensor, smoothing: float) -> tuple[list[torch.Tensor], ...]:
    """Return losses, gradients and hits, ours and torch's in fp32."""
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    weights = torch.arange(1.0, len(logits) + 1, device=logits.device) / len(logits)
    rank = logits.argmax(1) == targets
    losses, hits = cross_entropy(ours * 1, targets, smoothing)
    (losses * weights).sum().backward()  # type: ignore[no-untyped-call]
    expected = F.cross_entropy(
        theirs.float(), targets, ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=smoothing
    )
    (expected * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert ours.grad is not None and theirs.grad is not None
    return [losses, ours.grad, hits], [expected, theirs.grad, rank]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [100, 2**24])
def test_cross_entropy_equals_torchs(smoothing: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_LOGITS", chunk)
    ours, theirs = both_ways(*drawn(37, 19, torch.float32), smoothing)
    for mine, reference in zip(ours[:2], theirs[:2], strict=True):
        assert torch.allclose(mine, reference, atol=1e-6)
    assert torch.equal(*(hits[2] for hits in (ours, theirs)))


def test_ignored_targets_have_no_loss_and_no_gradient() -> None:
    logits, targets = drawn(10, 7, torch.float32)
    (losses, gradients, hits), _ = both_ways(logits, targets.fill_(IGNORE_INDEX), 0.1)
    assert not losses.any() and not gradients.any() and not hits.any()


def test_no_rows_give_an_empty_loss() -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    losses, hits = cross_entropy(logits * 1, torch.zeros(0, dtype=torch.long))
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert len(losses) == len(hits) == 0


def test_without_a_gradient_the_logits_stay() -> None:
    logits, targets = drawn(6, 5, torch.float32)
    before = logits.clone()
    with torch.no_grad():
        cross_entropy(logits, targets)
    assert torch.equal(logits, before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [66, 1026, 128256])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_kernel_equals_torch(dtype: torch.dtype, classes: int, smoothing: float) -> None:
    ours, theirs = both_ways(*drawn(133, classes, dtype, "cuda"), smoothing)
    assert torch.allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert torch.allclose(ours[1], theirs[1], rtol=tolerance, atol=tolerance / 100)
    # If several logits are the largest, argmax may name any of them.
    logits, _ = drawn(133, classes, dtype, "cuda")
    alone = (logits == logits.amax(1, keepdim=True)).sum(1) == 1
    assert torch.equal(ours[2][alone], theirs[2][alone])
