"""Fingerprints find copies that were shifted, compressed or cut, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from myna.listen.fingerprints import find_duplicates, fingerprint
from tests.listen.signals import SAMPLE_RATE, babble, through_mp3


def test_a_copy_through_mp3_and_a_shift_is_found_and_placed() -> None:
    clips = [babble(5, seed) for seed in range(12)]
    shifted = through_mp3(clips[3])[round(0.4 * SAMPLE_RATE) + 101 :]
    prints = [fingerprint(clip, SAMPLE_RATE) for clip in [*clips, shifted]]
    [match] = find_duplicates(prints)
    assert (match.first, match.second) == (3, 12)
    assert match.first_start - match.second_start == pytest.approx(0.4, abs=0.1)
    assert match.seconds > 3.5


def test_a_passage_inside_other_recordings_is_found_with_its_place() -> None:
    passage = babble(4, 100)
    first = np.concatenate([babble(3, 1), passage, babble(2, 2)])
    second = np.concatenate([babble(6, 3), through_mp3(passage)])
    [match] = find_duplicates([fingerprint(first, SAMPLE_RATE), fingerprint(second, SAMPLE_RATE)])
    assert match.first_start == pytest.approx(3, abs=0.4)
    assert match.second_start == pytest.approx(6, abs=0.4)
    assert match.seconds == pytest.approx(4, abs=0.8)


def test_a_passage_that_comes_twice_in_one_recording_is_found() -> None:
    passage = babble(4, 5)
    wave = np.concatenate([passage, babble(5, 6), passage])
    [match] = find_duplicates([fingerprint(wave, SAMPLE_RATE)])
    assert match.second_start - match.first_start == pytest.approx(9, abs=0.1)


def test_silence_and_noise_have_no_copies() -> None:
    rng = np.random.default_rng(0)
    silence = np.zeros(3 * SAMPLE_RATE, np.float32)
    noises = [rng.normal(0, 0.1, 3 * SAMPLE_RATE).astype(np.float32) for _ in range(5)]
    prints = [fingerprint(clip, SAMPLE_RATE) for clip in [silence, silence, *noises]]
    assert find_duplicates(prints) == []


def test_short_clips_have_no_fingerprint_and_do_no_harm() -> None:
    assert fingerprint(babble(0.2, 1), SAMPLE_RATE) == b""
    assert find_duplicates([]) == []
    assert find_duplicates([b"", b""]) == []
