"""A mean and how sure it is: lines drawn again and again, by dice that are always the same."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

DRAWS, SEED, LEVEL = 2000, 20_26, 0.95
"""How often the lines are drawn anew, by which dice, and how much of the draws an interval holds."""


class RatioPart(NamedTuple):
    """What one line adds above and below a fraction: word errors and words, or a value and 1."""

    above: float
    below: float = 1.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Over `n` lines. None where there were none: nothing is made up."""

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
    """The fraction of all lines together, so that every word counts alike, with a bootstrap interval over lines."""
    return _estimate(np.array(parts, np.float64).reshape(-1, 2)[:, None])


def difference(ones: Sequence[RatioPart], others: Sequence[RatioPart]) -> Estimate:
    """By how much the first is above the second on the same lines: both are drawn together, so that what is hard or
    easy about a line counts on both sides."""
    pair = np.stack([np.array(side, np.float64).reshape(-1, 2) for side in (ones, others)], axis=1)
    return _estimate(pair)


def _estimate(values: npt.NDArray[np.float64]) -> Estimate:
    """(lines, one or two systems, above and below)."""
    lines = len(values)
    total = values.sum(axis=0)
    if not lines or not (total[:, 1] > 0).all():
        return Estimate(n=0)
    drawn = np.tensordot(_draws(lines), values, axes=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        fractions = drawn[:, :, 0] / drawn[:, :, 1]
    told = _told(fractions)
    told = told[np.isfinite(told)]
    outside = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(told, [outside, 100 - outside]) if len(told) else (math.nan, math.nan)
    mean = float(_told((total[:, 0] / total[:, 1])[None])[0])
    return Estimate(mean, float(low), float(high), lines)


@functools.lru_cache(maxsize=8)
def _draws(lines: int) -> npt.NDArray[np.float64]:
    """(draws, lines): how often each line is drawn."""
    dice = np.random.default_rng(SEED)
    return dice.multinomial(lines, np.full(lines, 1 / lines), size=DRAWS).astype(np.float64)


def _told(fractions: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return fractions[:, 0] if fractions.shape[1] == 1 else fractions[:, 0] - fractions[:, 1]
