"""Bootstrap estimates: means of ratios over items with confidence intervals, always with the same random draws."""

import functools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BOOTSTRAP_DRAWS, BOOTSTRAP_SEED, CONFIDENCE_LEVEL = 2000, 20_26, 0.95
"""Number of bootstrap resamples, their seed, and the share of them inside an interval."""


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
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def estimate(parts: Sequence[RatioPart]) -> Estimate:
    """Return the ratio over all items together, so that all words have equal weight, with a bootstrap interval."""
    return _estimate(np.array(parts, np.float64).reshape(-1, 2)[:, None])


def paired_difference(first: Sequence[RatioPart], second: Sequence[RatioPart]) -> Estimate:
    """Return the difference of two systems, first minus second, on the same items. Both are resampled together, so that
    hard and easy items count on both sides."""
    return _estimate(np.stack([np.array(side, np.float64).reshape(-1, 2) for side in (first, second)], axis=1))


def _estimate(values: npt.NDArray[np.float64]) -> Estimate:
    """Estimate from `values` of shape (items, one or two systems, numerator and denominator)."""
    items = len(values)
    total = values.sum(axis=0)
    if not items or not (total[:, 1] > 0).all():
        return Estimate(n=0)
    samples = _difference(np.tensordot(_resamples(items), values, axes=1))
    samples = samples[np.isfinite(samples)]
    tail = 100 * (1 - CONFIDENCE_LEVEL) / 2
    low, high = np.percentile(samples, [tail, 100 - tail]) if len(samples) else (math.nan, math.nan)
    return Estimate(float(_difference(total[None])[0]), float(low), float(high), items)


@functools.lru_cache(maxsize=8)
def _resamples(items: int) -> npt.NDArray[np.float64]:
    """Return how often each item is drawn, shape (draws, items)."""
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    return rng.multinomial(items, np.full(items, 1 / items), size=BOOTSTRAP_DRAWS).astype(np.float64)


def _difference(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the ratio of one system, or the difference of the ratios of two, shape (draws,)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = sums[:, :, 0] / sums[:, :, 1]
    return ratios[:, 0] if ratios.shape[1] == 1 else ratios[:, 0] - ratios[:, 1]
