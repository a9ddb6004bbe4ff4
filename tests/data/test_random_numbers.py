"""Random numbers from hashed names: always the same, and uniformly distributed."""

from __future__ import annotations

import numpy as np

from myna.core.io import string_hash
from myna.data.references import permutation, randint, random_bits

NAMES = np.array([string_hash(f"{n}") for n in range(20_000)], np.uint64)


def test_they_are_the_same_for_ever() -> None:
    """These numbers decide which rows a resumed run will see."""
    assert string_hash("marta/0412") == 9747469348828060864
    assert random_bits(np.array([string_hash("marta/0412")], np.uint64), "0/0/order").tolist() == [13218490670043171690]
    assert permutation(NAMES[:8], "0/0/order").tolist() == [3, 2, 7, 6, 5, 1, 4, 0]


def test_names_and_occasions_are_told_apart() -> None:
    one, two = random_bits(NAMES, "0/0/order"), random_bits(NAMES, "0/1/order")
    assert len(set(one.tolist()) | set(two.tolist())) == 40_000
    assert (random_bits(NAMES[5:9], "0/0/order") == one[5:9]).all(), "whoever else is asked for"
    differing = np.unpackbits((one ^ two).view(np.uint8)).mean()
    assert 0.49 < differing < 0.51, "every other bit"


def test_below_is_even_and_keeps_to_its_limit() -> None:
    thrown = random_bits(NAMES, "here")
    times = np.bincount(randint(thrown, np.full(20_000, 7)), minlength=7)
    assert len(times) == 7 and times.min() > 2600 and times.max() < 3100
    assert (randint(thrown, np.full(20_000, 1)) == 0).all()
    limits = np.arange(1, 20_001)
    assert (randint(thrown, limits) < limits).all() and (randint(thrown, limits) >= 0).all()


def test_a_shuffle_holds_each_place_once() -> None:
    order = permutation(NAMES, "0/0/order")
    assert sorted(order.tolist()) == list(range(20_000))
    assert abs(np.corrcoef(order, np.arange(20_000))[0, 1]) < 0.03
