"""Music of any length, and batches of clips."""

from __future__ import annotations

import numpy as np
import pytest

from myna.listen.models import batches, map_batches
from myna.listen.sounds import MUSIC_WINDOW_SECONDS, SpeechMusicNoiseNetwork, log_mel_patches
from tests.listen.signals import SAMPLE_RATE, babble


def test_music_of_any_length_has_a_share_and_silence_none() -> None:
    network = SpeechMusicNoiseNetwork().eval()
    for seconds in (0.1, 0.7, 3.0):
        assert 0 <= network.music_share(babble(seconds, 2), SAMPLE_RATE) <= 1
    assert network.music_share(np.zeros(SAMPLE_RATE, np.float32), SAMPLE_RATE) == 0
    patches = log_mel_patches(babble(3, 2, 16_000))
    assert patches.shape[1:] == (68, 21)
    assert patches.mean((1, 2)) == pytest.approx(0, abs=1e-4)
    assert patches.std((1, 2)) == pytest.approx(1, abs=1e-4)


def test_music_of_an_hour_is_measured_minute_by_minute() -> None:
    network = SpeechMusicNoiseNetwork().eval()
    sound = babble(MUSIC_WINDOW_SECONDS + 5, 2, 16_000)
    first, rest = sound[: round(MUSIC_WINDOW_SECONDS * 16_000)], sound[round(MUSIC_WINDOW_SECONDS * 16_000) :]
    apart = np.concatenate([network.classify(first, 16_000), network.classify(rest, 16_000)])
    assert np.allclose(network.classify(sound, 16_000), apart, atol=1e-5)


def test_items_come_in_batches_when_they_are_needed() -> None:
    taken: list[int] = []
    source = batches((taken.append(number) or number for number in range(7)), 3)  # type: ignore[func-returns-value]
    assert next(source) == [0, 1, 2] and taken == [0, 1, 2]
    assert list(source) == [[3, 4, 5], [6]]


def test_batches_hold_items_of_similar_lengths_and_results_are_in_order() -> None:
    words = ["aaaa", "a", "aaa", "aa", "b", "bbbbb", "", "aaa", "c"]
    seen: list[list[str]] = []

    def upper(batch: list[str]) -> list[str]:
        seen.append(batch)
        return [word.upper() for word in batch]

    assert list(map_batches(upper, words, 2, len)) == [word.upper() for word in words]
    assert seen == [["", "a"], ["b", "aa"], ["aaa", "aaa"], ["aaaa", "bbbbb"], ["c"]]
    seen.clear()
    assert list(map_batches(upper, words, 1, len)) == [word.upper() for word in words]
    assert seen == [[word] for word in words]
