"""Scores: of the right sounds against the right ones, and none where there is no ear."""

from __future__ import annotations

import numpy as np
import pytest

from myna.audio.files import Samples
from myna.demo.listening import AFTER, BEFORE, REAL, Scores, listen
from myna.evaluate.resemblyzer import ResemblyzerEncoder
from tests.demo.ears import SpectrumEar, give_ears, take_ears

RATE = 24_000
TEXTS = ("red green blue grey", "cat dog", "sun moon stars")


def tones(*pitches: float) -> list[Samples]:
    return [np.sin(2 * np.pi * pitch * np.arange(RATE) / RATE).astype(np.float32) for pitch in pitches]


SOUNDS = {REAL: tones(500, 520, 5000), BEFORE: tones(9000, 9000, 9000), AFTER: tones(500, 500, 500)}


def heard(recogniser: str | None = "parrot") -> tuple[Scores, int]:
    count = 0

    def advance() -> None:
        nonlocal count
        count += 1

    return listen(SOUNDS, TEXTS, RATE, recogniser=recogniser, language="en", advance=advance), count


def test_likeness_is_to_the_real_recordings_of_the_other_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    give_ears(monkeypatch, "red green blue grey")
    scores, count = heard()
    assert count == 2 * 9, "each ear hears each sound once"
    assert scores.likeness is not None
    ear, real = SpectrumEar(), SOUNDS[REAL]
    voices = [ear.embed(samples, RATE) for samples in real]
    others = np.mean(voices[1:], axis=0)
    assert scores.likeness[REAL].to_voice[0] == pytest.approx(ResemblyzerEncoder.similarity(voices[0], others))
    assert scores.likeness[REAL].to_voice[0] < 0.9, "a recording is not compared with itself"
    assert scores.likeness[REAL].to_line is None and scores.likeness[REAL].line_mean is None
    assert scores.likeness[AFTER].to_line == pytest.approx(
        [ResemblyzerEncoder.similarity(ear.embed(SOUNDS[AFTER][line], RATE), voices[line]) for line in range(3)]
    )
    assert scores.likeness[AFTER].mean > scores.likeness[BEFORE].mean


def test_wrong_words_are_counted_over_all_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    give_ears(monkeypatch, "red green blue grey")
    scores, _ = heard()
    assert scores.words is not None
    total = scores.words[AFTER].total
    assert (total.errors, total.words) == (0 + 4 + 4, 9)
    said = scores.to_json()
    assert said["systems"][AFTER]["word_error_rate"] == pytest.approx(8 / 9)
    assert said["systems"][REAL]["heard"] == ["red green blue grey"] * 3
    assert said["missing"] == {}


def test_a_recogniser_that_goes_in_circles_has_understood_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    give_ears(monkeypatch, "red green blue grey " * 40)
    scores, _ = heard()
    assert scores.words is not None
    assert scores.words[AFTER].total.rate == 1.0, "and not forty times as much"


def test_without_ears_there_are_reasons_instead_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    take_ears(monkeypatch)
    scores, count = heard()
    assert (scores.likeness, scores.words, count) == (None, None, 0)
    assert "pip install --no-deps resemblyzer" in scores.no_likeness
    assert "no recogniser parrot here" in scores.no_words and "name a folder" in scores.no_words
    said = scores.to_json()
    assert said["systems"] == {REAL: {}, BEFORE: {}, AFTER: {}} and set(said["missing"]) == {
        "similarity",
        "word_errors",
    }


def test_no_recogniser_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    give_ears(monkeypatch, "")
    scores, count = heard(None)
    assert scores.likeness is not None and scores.words is None and count == 9
    assert "--recogniser" in scores.no_words
