"""Integrated loudness by ITU-R BS.1770-4, of mono audio at any rate."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from myna.audio.files import Samples
from myna.core.optional import import_optional
from myna.listen.models import INSTALL

BLOCK_SECONDS, BLOCK_OVERLAP = 0.4, 0.75
ABSOLUTE_GATE_LUFS, RELATIVE_GATE_LU = -70.0, -10.0
SHELF = (1681.974450955533, 0.7071752369554196, 3.999843853973347)
"""Frequency in hertz, quality and gain in dB of the filter of the head."""
HIGH_PASS = (38.13547087602444, 0.5003270373238773)
"""Frequency and quality of the second filter."""


def integrated_loudness(samples: Samples, sample_rate: int) -> float:
    """LUFS; NaN where there is no block of 0.4 s above -70 LUFS."""
    signal = import_optional("scipy.signal", INSTALL)
    weighted = samples.astype(np.float64)
    for numerator, denominator in k_weighting(sample_rate):
        weighted = signal.lfilter(numerator, denominator, weighted)
    size, step = round(BLOCK_SECONDS * sample_rate), round(BLOCK_SECONDS * (1 - BLOCK_OVERLAP) * sample_rate)
    sums = np.concatenate([[0.0], np.cumsum(weighted**2)])
    power = np.maximum((sums[size::step] - sums[:-size:step]) / size, 1e-30) if len(samples) >= size else np.empty(0)
    power = power[_lufs(power) > ABSOLUTE_GATE_LUFS]
    if not len(power):
        return float("nan")
    return float(_lufs(power[_lufs(power) > _lufs(power.mean()) + RELATIVE_GATE_LU].mean()))


def k_weighting(sample_rate: int) -> list[tuple[list[float], list[float]]]:
    """Numerator and denominator of both filters, by the bilinear transform of their analogue forms."""
    frequency, quality, gain_db = SHELF
    k = np.tan(np.pi * frequency / sample_rate)
    high, middle = 10 ** (gain_db / 20), 10 ** (gain_db / 20 * 0.4996667741545416)
    norm = 1 + k / quality + k * k
    shelf = [high + middle * k / quality + k * k, 2 * (k * k - high), high - middle * k / quality + k * k]
    first = ([value / norm for value in shelf], [1.0, 2 * (k * k - 1) / norm, (1 - k / quality + k * k) / norm])
    frequency, quality = HIGH_PASS
    k = np.tan(np.pi * frequency / sample_rate)
    norm = 1 + k / quality + k * k
    return [first, ([1.0, -2.0, 1.0], [1.0, 2 * (k * k - 1) / norm, (1 - k / quality + k * k) / norm])]


def _lufs(power: npt.ArrayLike) -> npt.NDArray[np.float64]:
    return np.asarray(-0.691 + 10 * np.log10(power))
