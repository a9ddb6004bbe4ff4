"""Padded attention equals attention within each sequence, forward and backward."""

from __future__ import annotations

import pytest
import torch

from myna.models import attention
from myna.models.attention import packed_causal_attention, padded_causal_attention

HEADS, KEYS, SIZE = 4, 2, 8


def drawn(lengths: tuple[int, ...]) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return queries, keys and values, and the places of positions in the padded batch."""
    stream = torch.Generator().manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(sum(lengths), heads, SIZE, generator=stream).requires_grad_()

    places = torch.cat([row * max(lengths) + torch.arange(length) for row, length in enumerate(lengths)])
    return (draw(HEADS), draw(KEYS), draw(KEYS)), places


@pytest.mark.parametrize("lengths", [(5,), (7, 5, 9), (1, 1, 1), (30, 2, 2, 2)])
def test_padded_attention_equals_attention_per_sequence(lengths: tuple[int, ...]) -> None:
    qkv, places = drawn(lengths)
    weights = torch.randn(sum(lengths), HEADS, SIZE, generator=torch.Generator().manual_seed(1))
    results = []
    for attended in (packed_causal_attention(*qkv, lengths), padded_causal_attention(*qkv, places, lengths)):
        gradients = torch.autograd.grad((attended * weights).sum(), qkv)
        results.append((attended, *gradients))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_mostly_padding_is_attended_to_sequence_by_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def apart(q: torch.Tensor, _k: torch.Tensor, _v: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        asked.append(lengths)
        return q

    monkeypatch.setattr(attention, "packed_causal_attention", apart)
    for lengths in ((30, 2, 2, 2), (30, 28)):
        qkv, places = drawn(lengths)
        padded_causal_attention(*qkv, places, lengths)
    assert asked == [(30, 2, 2, 2)]
