"""Checks and cleaning of references, on planted faults."""

from __future__ import annotations

import re

import numpy as np
import pytest
import soxr  # type: ignore[import-untyped]

from myna.audio.files import Samples
from myna.audio.reference import LEVEL_DB, check_reference
from myna.audio.signal_measures import speech_level_db, speech_spans

RATE = 24_000


def syllables(seconds: float, level_db: float = -22.0, seed: int = 0) -> Samples:
    """Noise whose loudness moves as that of speech does: syllables of 0.2 s, a pause of 0.2 s after each four."""
    rng = np.random.default_rng(seed)
    times = np.arange(round(seconds * RATE)) / RATE
    envelope = np.sin(np.pi * (times % 0.2) / 0.2) ** 2 * (times % 1.0 < 0.8)
    sound = np.asarray(envelope * rng.standard_normal(len(times)), np.float32)
    return sound * np.float32(10 ** ((level_db - speech_level_db(sound, RATE)) / 20))


def noise(seconds: float, level_db: float) -> Samples:
    drawn = np.random.default_rng(9).standard_normal(round(seconds * RATE))
    return np.asarray(drawn * 10 ** (level_db / 20), np.float32)


def problem(samples: Samples) -> str:
    (found,) = check_reference(samples, RATE, RATE).problems
    return found


@pytest.mark.parametrize("level", [-31.0, -22.0, -13.0])
def test_a_good_recording_stays_as_it_is(level: float) -> None:
    clean = syllables(5.0, level) + noise(5.0, -75.0)
    checked = check_reference(clean, RATE, RATE)
    assert checked.problems == () and np.array_equal(checked.samples, clean)


def test_another_rate_is_resampled_as_reading_does() -> None:
    clean = syllables(5.0)
    assert np.array_equal(
        check_reference(clean, RATE, 16_000).samples, soxr.resample(clean, RATE, 16_000, quality="VHQ")
    )


@pytest.mark.parametrize("level", [-40.0, -6.0])
def test_other_levels_are_brought_to_that_of_the_training(level: float) -> None:
    checked = check_reference(syllables(5.0, level), RATE, RATE)
    assert speech_level_db(checked.samples, RATE) == pytest.approx(LEVEL_DB, abs=0.5) and checked.problems == ()
    assert np.abs(checked.samples).max() < 1


def test_silence_at_the_ends_is_trimmed_and_pauses_are_kept() -> None:
    padded = np.concatenate([noise(3.0, -75.0), syllables(2.0), noise(1.0, -75.0), syllables(2.0), noise(2.0, -75.0)])
    checked = check_reference(padded, RATE, RATE)
    assert len(checked.samples) / RATE == pytest.approx(5.4, abs=0.3)
    assert len(speech_spans(checked.samples, RATE)) == 2 and checked.problems == ()


def test_an_offset_is_taken_out() -> None:
    clean = syllables(5.0)
    assert np.allclose(check_reference(clean + np.float32(0.1), RATE, RATE).samples, clean, atol=2e-3)


def test_a_very_quiet_voice_is_named() -> None:
    assert "very quiet (-50 dB)" in problem(syllables(5.0, -50.0))


def test_clipping_is_measured_at_the_rate_of_the_file() -> None:
    clipped = (4 * syllables(5.0)).clip(-0.3, 0.3)
    assert "clipped" in problem(clipped)
    resampled = soxr.resample(clipped, RATE, 16_000, quality="VHQ")
    assert check_reference(resampled, 16_000, RATE).problems == (), "the flat tops are gone, and it cannot be told"
    (found,) = check_reference(clipped, RATE, 16_000).problems
    assert "clipped" in found


def test_a_telephone_call_is_named_whatever_the_rate_of_its_file() -> None:
    call = soxr.resample(syllables(5.0), RATE, 8_000, quality="VHQ")
    (found,) = check_reference(call, 8_000, RATE).problems
    assert "nothing above 3.9 kHz" in found or "nothing above 3.8 kHz" in found
    assert "telephone" in problem(soxr.resample(call, 8_000, RATE, quality="VHQ"))


def test_noise_is_named_with_its_level() -> None:
    assert re.match(r"noise is 1[0-3] dB below the voice: record", problem(syllables(5.0) + noise(5.0, -33.0)))
    assert check_reference(syllables(5.0) + noise(5.0, -44.0), RATE, RATE).problems == ()


def test_steady_noise_is_no_voice() -> None:
    assert "no speech can be told" in problem(noise(5.0, -22.0))


def test_too_little_speech_is_named() -> None:
    assert "s of speech: give 3 to 15 s" in problem(syllables(0.8))
    mostly = np.concatenate([syllables(1.0), *(p for _ in range(3) for p in (noise(4.0, -75.0), syllables(1.0)))])
    assert "mostly silence" in problem(mostly)


def test_too_much_speech_is_named() -> None:
    assert re.match(r"it holds (39|40) s of speech", problem(syllables(40.0)))
