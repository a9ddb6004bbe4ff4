"""Silence, pauses, pitch and copies, of sounds that were made to have them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from myna.audio.files import Samples
from myna.evaluate.scoring import copy_similarity, measure_acoustics
from tests.evaluate.speech import RATE, say


def rest(seconds: float) -> Samples:
    return np.zeros(int(seconds * RATE), np.float32)


def test_silence_before_after_and_within_speech_is_measured() -> None:
    found = measure_acoustics(
        np.concatenate([rest(0.3), say("abcdef", 150), rest(0.5), say("gh", 150), rest(0.2)]), RATE
    )
    assert found["leading_silence"] == pytest.approx(0.3, abs=0.02) and found["trailing_silence"] == pytest.approx(
        0.2, abs=0.02
    )
    assert found["speech_seconds"] == pytest.approx(0.98, abs=0.03)
    assert found["pause_share"] == pytest.approx(0.5 / 0.98, abs=0.03)
    assert found["speech_seconds"]


def test_a_short_rest_is_not_counted_as_a_pause() -> None:
    assert measure_acoustics(np.concatenate([say("ab", 150), rest(0.08), say("cd", 150)]), RATE)["pause_share"] == 0


@given(st.floats(80, 380), st.sampled_from([16_000, 24_000]))
def test_pitch_is_found_at_every_sample_rate(pitch: float, rate: int) -> None:
    time = np.arange(rate // 2) / rate
    hum = sum(np.sin(2 * np.pi * pitch * n * time) / n for n in range(1, 5))
    found = measure_acoustics(np.asarray(0.2 * hum, np.float32), rate)
    assert found["pitch"] == pytest.approx(pitch, rel=0.03) and found["voiced_share"] > 0.9
    assert found["pitch_range"] < 1


def test_a_rising_voice_has_a_range() -> None:
    time = np.arange(2 * RATE) / RATE
    phase = 2 * np.pi * np.cumsum(100 * 2 ** (time / 2)) / RATE
    found = measure_acoustics(np.asarray(sum(np.sin(n * phase) / n for n in (1, 2, 3)) * 0.2, np.float32), RATE)
    assert found["pitch_range"] == pytest.approx(0.8 * 12, abs=1.0), "a tenth is left out at either end of an octave"


def test_noise_and_silence_have_no_pitch() -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, RATE).astype(np.float32)
    assert measure_acoustics(noise, RATE)["voiced_share"] < 0.05
    for silence in (rest(1.0), rest(0.0), np.full(RATE, 1e-5, np.float32)):
        found = measure_acoustics(silence, RATE)
        assert found["speech_seconds"] == 0 and found["voiced_share"] == 0 and math.isnan(found["pitch"])
        assert found["leading_silence"] == pytest.approx(len(silence) / RATE)


def test_a_shifted_or_degraded_copy_is_recognised() -> None:
    clip = say("follow me over the quiet hill", 150)
    dice = np.random.default_rng(0)
    for copy in (
        clip,
        np.concatenate([rest(0.2), clip, rest(0.1)]),
        0.3 * clip,
        (clip + dice.normal(0, 0.002, len(clip))).astype(np.float32),
    ):
        assert copy_similarity(copy, clip, RATE) > 0.8
    assert copy_similarity(say("nobody knows the long way home", 150), clip, RATE) < 0.7
    assert copy_similarity(rest(1.0), clip, RATE) == copy_similarity(clip, rest(0.0), RATE) == 0.0
