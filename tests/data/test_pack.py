from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myna.data.pack import first_fit_decreasing


@given(st.lists(st.integers(1, 100), max_size=60))
@settings(max_examples=100, deadline=None)
def test_every_sequence_lands_once_and_no_row_overflows(lengths: list[int]) -> None:
    rows = first_fit_decreasing(lengths, 100)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 100 for row in rows)
    assert all(rows)


def test_rows_are_nearly_full_on_speech_like_lengths() -> None:
    dice = random.Random(0)
    lengths = [int(min(1100, max(80, dice.lognormvariate(6.0, 0.5)))) for _ in range(1024)]
    rows = first_fit_decreasing(lengths, 4096)
    assert sum(lengths) / (4096 * len(rows)) > 0.98


def test_nothing_is_ever_cut() -> None:
    with pytest.raises(ValueError, match="101 does not fit a row of 100"):
        first_fit_decreasing([5, 101], 100)
