"""Confidence intervals: bootstrap of ratios over items, always with the same random draws, and exact ones of shares."""

import functools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

BOOTSTRAP_DRAWS, BOOTSTRAP_SEED, CONFIDENCE_LEVEL = 2000, 20_26, 0.95
"""Number of bootstrap resamples, their seed, and the share of them inside an interval."""
MIN_ITEMS = 6
"""Fewest items from which a difference can be certain: if all five of five agree, the sign test has p = 0.06."""
Array = npt.NDArray[np.float64]


class RatioPart(NamedTuple):
    """Contribution of one item to a ratio: word errors and words, or a value and 1."""

    numerator: float
    denominator: float = 1.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean and confidence interval over `n` items; None without items."""

    mean: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0

    def to_json(self) -> dict[str, float | int | None]:
        return asdict(self)

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval of a difference excludes zero; False with fewer than `MIN_ITEMS` items."""
        if self.low is None or self.high is None or self.n < MIN_ITEMS:
            return False
        return self.low > 0 or self.high < 0

    def widened(self, low: float, high: float) -> Self:
        """Return the estimate with its interval widened to contain another one."""
        if self.low is None or self.high is None:
            return self
        return replace(self, low=min(self.low, low), high=max(self.high, high))


def estimate(parts: Sequence[RatioPart], *, groups: Sequence[str] = (), is_outcome: bool = False) -> Estimate:
    """Return the ratio over all items together, so that all words have equal weight, with a bootstrap interval.

    `groups` names the speaker of each item: if there are several, the interval also contains the one of resampled
    speakers. `is_outcome` says that every item is 0 or 1, whose share has an exact interval.
    """
    found = _estimate(np.array(parts, np.float64).reshape(-1, 2)[:, None], groups)
    if not is_outcome:
        return found
    return found.widened(*share_interval(round(sum(part.numerator for part in parts)), found.n))


def paired_difference(
    first: Sequence[RatioPart], second: Sequence[RatioPart], *, groups: Sequence[str] = (), is_outcome: bool = False
) -> Estimate:
    """Return the difference of two systems, first minus second, on the same items. Both are resampled together, so that
    hard and easy items count on both sides. A difference of outcomes excludes zero only if McNemar's exact test does.
    """
    found = _estimate(np.stack([np.array(side, np.float64).reshape(-1, 2) for side in (first, second)], axis=1), groups)
    if not is_outcome or not found.n:
        return found
    changes = [one.numerator - other.numerator for one, other in zip(first, second, strict=True)]
    gained, changed = sum(change > 0 for change in changes), sum(change != 0 for change in changes)
    fewest, most = share_interval(changed, found.n)
    low, high = (2 * share - 1 for share in share_interval(gained, changed))
    return found.widened(low * (most if low < 0 else fewest), high * (most if high > 0 else fewest))


def share_interval(successes: int, n: int) -> tuple[float, float]:
    """Compute the exact two-sided confidence interval (Clopper and Pearson) of a share of `successes` in `n`."""
    low, low_of_failures = share_lower_bounds(n, [successes, n - successes])
    return float(low), float(1 - low_of_failures)


def share_lower_bounds(n: int, successes: Sequence[int]) -> Array:
    """Compute the lower ends of these intervals by bisection; upper ends follow from the failures."""
    counts, wanted = np.arange(n + 1), np.asarray(successes)[:, None]
    log_ways = math.lgamma(n + 1) - np.array([math.lgamma(k + 1) + math.lgamma(n - k + 1) for k in counts])
    low, high = np.zeros((len(wanted), 1)), np.ones((len(wanted), 1))
    for _ in range(50):
        share = (low + high) / 2
        chances = np.exp(log_ways + counts * np.log(share) + (n - counts) * np.log1p(-share))
        is_above = (chances * (counts >= wanted)).sum(axis=1, keepdims=True) > (1 - CONFIDENCE_LEVEL) / 2
        low, high = np.where(is_above, low, share), np.where(is_above, share, high)
    return np.asarray(low[:, 0])


def sign_test(wins: int, losses: int) -> float:
    """Compute the p-value of the two-sided sign test."""
    n = wins + losses
    fewer = sum(math.comb(n, count) for count in range(min(wins, losses) + 1))
    return min(1.0, float(2 * fewer / 2**n))


def two_way_shares(answers: Array) -> Array:
    """Draw the share of wins, (draws,), with items and listeners resampled: ten answers to one item are not ten items.

    `answers` are the numbers of wins and losses, (items, listeners, 2).
    """
    items, listeners, _ = answers.shape
    by_listener = np.tensordot(_resamples(items), answers, axes=1)
    wins, losses = np.einsum("dlk,dl->kd", by_listener, _resamples(listeners, BOOTSTRAP_SEED + 1))
    decided = wins + losses > 0
    return np.asarray(wins[decided] / (wins + losses)[decided])


def percentile_interval(samples: Array) -> tuple[float, float]:
    """Return the bounds of the share `CONFIDENCE_LEVEL` of the samples in the middle; NaN without samples."""
    tail = 100 * (1 - CONFIDENCE_LEVEL) / 2
    low, high = np.percentile(samples, [tail, 100 - tail]) if len(samples) else (math.nan, math.nan)
    return float(low), float(high)


def _estimate(values: Array, groups: Sequence[str]) -> Estimate:
    """Estimate from `values` of shape (items, one or two systems, numerator and denominator)."""
    items = len(values)
    total = values.sum(axis=0)
    if not items or not (total[:, 1] > 0).all():
        return Estimate(n=0)
    found = Estimate(float(_difference(total[None])[0]), *_bootstrap_interval(values), items)
    names = sorted(set(groups))
    if len(names) < 2:
        return found
    of_item = np.array(groups)
    return found.widened(*_bootstrap_interval(np.stack([values[of_item == name].sum(axis=0) for name in names])))


def _bootstrap_interval(values: Array) -> tuple[float, float]:
    samples = _difference(np.tensordot(_resamples(len(values)), values, axes=1))
    return percentile_interval(samples[np.isfinite(samples)])


@functools.lru_cache(maxsize=8)
def _resamples(items: int, seed: int = BOOTSTRAP_SEED) -> Array:
    """Return how often each item is drawn, shape (draws, items)."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(items, np.full(items, 1 / items), size=BOOTSTRAP_DRAWS).astype(np.float64)


def _difference(sums: Array) -> Array:
    """Return the ratio of one system, or the difference of the ratios of two, shape (draws,)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = sums[:, :, 0] / sums[:, :, 1]
    return ratios[:, 0] if ratios.shape[1] == 1 else ratios[:, 0] - ratios[:, 1]
