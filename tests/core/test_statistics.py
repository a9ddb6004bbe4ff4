"""Intervals: always the same, about as wide as they should be, and narrower where lines are paired."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from myna.core.statistics import Estimate, RatioPart, estimate, paired_difference

values = st.lists(st.floats(-5, 5), min_size=1, max_size=30)


def parts(numbers: list[float]) -> list[RatioPart]:
    return [RatioPart(number) for number in numbers]


@given(values)
def test_a_mean_lies_in_its_interval_and_is_always_the_same(numbers: list[float]) -> None:
    found = estimate(parts(numbers))
    assert found == estimate(parts(numbers)) and found.n == len(numbers)
    assert found.mean == pytest.approx(np.mean(numbers), abs=1e-9)
    assert found.low is not None and found.high is not None
    assert min(numbers) - 1e-9 <= found.low <= found.high <= max(numbers) + 1e-9


def test_nothing_is_made_up_where_there_is_nothing() -> None:
    assert estimate([]) == paired_difference([], []) == Estimate(None, None, None, 0)
    assert estimate([RatioPart(0, 0)]) == Estimate(n=0), "no words were to be said"
    assert not Estimate().excludes_zero


def test_every_word_counts_alike() -> None:
    assert estimate([RatioPart(1, 1), RatioPart(0, 9)]).mean == pytest.approx(0.1)


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    dice = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        found = estimate(parts(dice.normal(3, 1, 60).tolist()))
        assert found.low is not None and found.high is not None
        held += found.low <= 3 <= found.high
    assert 180 <= held <= 199


def test_paired_lines_tell_small_differences() -> None:
    dice = np.random.default_rng(1)
    hard = dice.normal(0, 1, 50)
    one, other = hard + 0.05 + dice.normal(0, 0.02, 50), hard
    paired = paired_difference(parts(one.tolist()), parts(other.tolist()))
    assert paired.excludes_zero and paired.mean == pytest.approx(0.05, abs=0.01)
    apart = paired_difference(parts(one.tolist()), parts(other[::-1].tolist()))
    assert not apart.excludes_zero


@given(values)
def test_a_system_does_not_differ_from_itself(numbers: list[float]) -> None:
    same = paired_difference(parts(numbers), parts(numbers))
    assert (same.mean, same.low, same.high) == (0.0, 0.0, 0.0) and not same.excludes_zero
