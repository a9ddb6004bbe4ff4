"""Loudness against values that the recommendation states."""

from __future__ import annotations

import numpy as np
import pytest

from myna.audio.files import Samples
from myna.audio.signal_measures import integrated_loudness, k_weighting


def sine(level_db: float, seconds: float, sample_rate: int, hertz: float = 997.0) -> Samples:
    wave = np.sin(2 * np.pi * hertz * np.arange(round(seconds * sample_rate)) / sample_rate)
    return np.asarray(10 ** (level_db / 20) * wave, np.float32)


def test_the_filters_at_48_khz_are_those_of_the_recommendation() -> None:
    (shelf, shelf_poles), (high, high_poles) = k_weighting(48_000)
    assert shelf == pytest.approx([1.53512485958697, -2.69169618940638, 1.19839281085285], abs=1e-7)
    assert shelf_poles == pytest.approx([1, -1.69065929318241, 0.73248077421585], abs=1e-7)
    assert high == [1, -2, 1]
    assert high_poles == pytest.approx([1, -1.99004745483398, 0.99007225036621], abs=1e-7)


@pytest.mark.parametrize("sample_rate", [16_000, 24_000, 44_100, 48_000])
def test_a_sine_of_full_scale_has_minus_3_01_lufs_at_any_rate(sample_rate: int) -> None:
    assert integrated_loudness(sine(0, 5, sample_rate), sample_rate) == pytest.approx(-3.01, abs=0.05)
    assert integrated_loudness(sine(-20, 5, sample_rate), sample_rate) == pytest.approx(-23.01, abs=0.05)


def test_quiet_parts_are_gated_out() -> None:
    loud, quiet, silent = sine(-20, 60, 24_000), sine(-36, 10, 24_000), sine(-90, 20, 24_000)
    wave = np.concatenate([quiet, loud, quiet, silent])  # cases 3 and 4 of EBU Tech 3341
    assert integrated_loudness(wave, 24_000) == pytest.approx(-23.01, abs=0.1)


def test_silence_and_short_clips_have_no_loudness() -> None:
    assert np.isnan(integrated_loudness(np.zeros(24_000, np.float32), 24_000))
    assert np.isnan(integrated_loudness(sine(0, 0.3, 24_000), 24_000))
    assert np.isnan(integrated_loudness(np.empty(0, np.float32), 24_000))
