"""Intervals: always the same, about as wide as they should be, and narrower where lines are paired."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from myna.core.statistics import Estimate, RatioPart, estimate, paired_difference, share_interval, sign_test

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


def tail(wins: int, of: int, share: float) -> float:
    """The chance of at least so many wins."""
    return sum(math.comb(of, k) * share**k * (1 - share) ** (of - k) for k in range(wins, of + 1))


@given(st.integers(0, 60), st.data())
def test_share_intervals_are_exact(of: int, data: st.DataObject) -> None:
    wins = data.draw(st.integers(0, of))
    low, high = share_interval(wins, of)
    assert 0 <= low <= (wins / of if of else 0.5) <= high <= 1
    assert low == 0 if wins == 0 else tail(wins, of, low) == pytest.approx(0.025)
    assert high == 1 if wins == of else 1 - tail(wins + 1, of, high) == pytest.approx(0.025)
    assert (1 - high, 1 - low) == pytest.approx(share_interval(of - wins, of))


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_sign_test_gives_exact_p_values(one: int, other: int) -> None:
    p = sign_test(one, other)
    assert p == sign_test(other, one) and 0 < p <= 1
    assert p == pytest.approx(min(1.0, 2 * tail(max(one, other), one + other, 0.5)))


def test_twenty_four_of_twenty_four_may_fail_the_next_time() -> None:
    sure = estimate(parts([1.0] * 24), is_outcome=True)
    assert (sure.mean, sure.high) == (1.0, 1.0) and sure.low == pytest.approx(0.858, abs=1e-3)


def test_a_rare_failure_is_not_certain() -> None:
    """McNemar's test of 20 of 24 against 24 of 24 has p = 0.125; six losses of 24 have p = 0.03."""

    def lost(count: int) -> Estimate:
        return paired_difference(parts([0.0] * count + [1.0] * (24 - count)), parts([1.0] * 24), is_outcome=True)

    assert not lost(4).excludes_zero and lost(6).excludes_zero
    equal = lost(0)
    assert equal.low is not None and equal.high is not None and equal.low < -0.1 and equal.high > 0.1


def test_speakers_are_resampled_where_there_are_several() -> None:
    """Eight items of each of four speakers, who differ more than their items."""
    dice = np.random.default_rng(2)
    numbers = [mean + number for mean in (0.2, 0.4, 0.6, 0.8) for number in dice.normal(0, 0.01, 8)]
    names = [name for name in "abcd" for _ in range(8)]
    alike, apart = estimate(parts(numbers), groups=["a"] * 32), estimate(parts(numbers), groups=names)
    assert alike == estimate(parts(numbers)) and alike.mean == apart.mean
    assert None not in (alike.low, alike.high, apart.low, apart.high)
    assert apart.high - apart.low > 1.5 * (alike.high - alike.low)  # type: ignore[operator]


def test_a_handful_of_items_is_never_certain() -> None:
    assert not estimate(parts([1.0])).excludes_zero and not estimate(parts([1.0] * 5)).excludes_zero
    assert estimate(parts([1.0] * 6)).excludes_zero
