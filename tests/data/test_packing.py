from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myna.data.loader import first_fit_decreasing


def by_definition(lengths: list[int], budget: int) -> list[list[int]]:
    """Reference implementation: the longest first, each into the first row with room, row by row."""
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        roomy = (row for row in rows if sum(lengths[i] for i in row) + lengths[index] <= budget)
        row = next(roomy, None)
        if row is None:
            rows.append(row := [])
        row.append(index)
    return rows


@given(st.lists(st.integers(1, 100), max_size=60))
@settings(max_examples=100, deadline=None)
def test_every_sequence_lands_once_and_no_row_overflows(lengths: list[int]) -> None:
    rows = first_fit_decreasing(lengths, 100)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 100 for row in rows)
    assert all(rows)


@given(st.integers(1, 60).flatmap(lambda most: st.tuples(st.lists(st.integers(1, most), max_size=80), st.just(most))))
@settings(max_examples=200, deadline=None)
def test_rows_are_those_of_the_definition(drawn: tuple[list[int], int]) -> None:
    lengths, budget = drawn
    assert first_fit_decreasing(lengths, budget) == by_definition(lengths, budget)
    assert first_fit_decreasing(lengths, 2 * budget + 1) == by_definition(lengths, 2 * budget + 1)


@pytest.mark.parametrize("budget", [4096, 8192, 16384, 32768])
def test_rows_of_a_window_are_nearly_full_on_speech_like_lengths(budget: int) -> None:
    """Clips of 9.7 seconds on average and references of 3 to 10, at 25 frames and 4 text tokens a second."""
    dice = np.random.default_rng(0)
    targets = np.clip(dice.lognormal(np.log(9.7) - 0.55**2 / 2, 0.55, (4, 4096)), 1, 30)
    seconds = targets + dice.uniform(3, 10, (4, 4096))
    lengths = (25 * seconds).astype(int) + (4 * seconds).astype(int) + 2 * 9 + 35
    rows = sum(len(first_fit_decreasing(window.tolist(), budget)) for window in lengths)
    assert lengths.sum() / (budget * rows) > 0.98


def test_nothing_is_ever_cut() -> None:
    with pytest.raises(ValueError, match="101 does not fit a row of 100"):
        first_fit_decreasing([5, 101], 100)
