"""Signal measures on signals whose bandwidth, clipping, level and noise are known."""

from __future__ import annotations

import numpy as np
import pytest
import soxr  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from myna.audio.files import Samples
from myna.audio.signal_measures import (
    bandwidth_hz,
    clipped_share,
    frame_levels_db,
    noise_floor_db,
    snr_db,
    speech_level_db,
    speech_spans,
)

RATE = 24_000


def noise(seconds: float, level_db: float, seed: int = 0) -> Samples:
    drawn = np.random.default_rng(seed).standard_normal(round(seconds * RATE))
    return np.asarray(drawn * 10 ** (level_db / 20), np.float32)


def bursts(floor_db: float) -> Samples:
    """A second of pause, two bursts of a second each at -20 dB with half a second between them, half a second."""
    sound = noise(4.0, floor_db)
    for start in (1.0, 2.5):
        first = round(start * RATE)
        sound[first : first + RATE] += noise(1.0, -20.0, seed=1)
    return sound


@pytest.mark.parametrize(
    ("rate", "low", "high"), [(8_000, 3_700, 4_000), (16_000, 7_400, 8_000), (24_000, 11_900, 12_000)]
)
def test_bandwidth_is_that_of_the_recording_and_not_of_the_file(rate: int, low: float, high: float) -> None:
    recorded = soxr.resample(noise(2.0, -20.0), RATE, rate, quality="VHQ")
    assert low <= bandwidth_hz(soxr.resample(recorded, rate, RATE, quality="VHQ"), RATE) <= high


def test_bandwidth_does_not_depend_on_the_level() -> None:
    sound = soxr.resample(soxr.resample(noise(1.0, -20.0), RATE, 8_000), 8_000, RATE)
    assert bandwidth_hz(sound, RATE) == bandwidth_hz(sound * np.float32(0.01), RATE)


def test_a_clip_shorter_than_a_window_has_a_bandwidth() -> None:
    assert bandwidth_hz(noise(0.01, -20.0), RATE) > 0
    assert bandwidth_hz(np.zeros(10, np.float32), RATE) == 0


def test_clipping_is_found_after_rescaling() -> None:
    tone = np.sin(2 * np.pi * 200 * np.arange(RATE) / RATE).astype(np.float32)
    assert clipped_share(tone) == 0
    # A sine at twice its limit is beyond it two thirds of the time.
    assert clipped_share((2 * tone).clip(-1, 1) * np.float32(0.3)) == pytest.approx(2 / 3, abs=0.02)
    assert clipped_share(tone.clip(-0.9, 1)) > 0.05, "one side is enough"


def test_silence_is_not_clipped() -> None:
    assert clipped_share(np.zeros(100, np.float32)) == clipped_share(np.empty(0, np.float32)) == 0


@pytest.mark.parametrize("floor", [-30.0, -50.0, -80.0])
def test_levels_of_speech_and_pauses_are_told_apart(floor: float) -> None:
    sound = bursts(floor)
    assert noise_floor_db(sound, RATE) == pytest.approx(floor, abs=1.5)
    assert speech_level_db(sound, RATE) == pytest.approx(-20, abs=1.0)
    assert snr_db(sound, RATE) == pytest.approx(-20 - floor, abs=2.0)


def test_digital_silence_is_no_measure_of_noise() -> None:
    padded = np.concatenate([np.zeros(4 * RATE, np.float32), bursts(-40.0)])
    assert noise_floor_db(padded, RATE) == pytest.approx(-40, abs=1.5)


def test_a_constant_is_silent() -> None:
    shifted = bursts(-50.0) + np.float32(0.2)
    assert speech_level_db(shifted, RATE) == pytest.approx(-20, abs=1.0)


def test_spans_begin_and_end_where_speech_does() -> None:
    assert np.allclose(speech_spans(bursts(-60.0), RATE), [(1.0, 2.0), (2.5, 3.5)], atol=0.04)


def test_short_pauses_are_part_of_speech_and_clicks_are_not() -> None:
    sound = noise(3.0, -70.0)
    sound[RATE : RATE + RATE // 2] += noise(0.5, -20.0)
    sound[round(1.7 * RATE) : 2 * RATE] += noise(0.3, -20.0)
    sound[round(2.7 * RATE) : round(2.7 * RATE) + 24] += noise(0.001, -20.0)
    assert np.allclose(speech_spans(sound, RATE), [(1.0, 2.0)], atol=0.04)


@given(st.integers(0, 3_000), st.integers(4_000, 48_000))
def test_silence_of_any_length_has_no_speech(length: int, rate: int) -> None:
    silent = np.zeros(length, np.float32)
    assert speech_spans(silent, rate) == [] and speech_level_db(silent, rate) == noise_floor_db(silent, rate) == -100
    assert len(frame_levels_db(silent, rate)) <= length
