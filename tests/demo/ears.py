"""Ears for tests: they hear something, always the same, and need no weights."""

from __future__ import annotations

import numpy as np
import pytest

from myna.audio.clip import Samples
from myna.errors import ConfigError, ModelError
from myna.evaluate.similarity import Voice, VoiceEar
from myna.evaluate.words import Heard, Recogniser, is_loop


class SpectrumEar(VoiceEar):
    """A voice is how loud eight ranges of pitch are."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def embed(self, samples: Samples, sample_rate: int) -> Voice:  # noqa: ARG002
        spectrum = np.abs(np.fft.rfft(samples, 4096))[:2048].reshape(8, 256).sum(axis=1)
        return np.asarray(spectrum / (np.linalg.norm(spectrum) or 1), np.float32)


class Parrot(Recogniser):
    """Whatever it hears, it writes down the same."""

    def __init__(self, text: str) -> None:
        self._text = text

    def transcribe(self, samples: Samples, sample_rate: int, language: str | None = "en") -> Heard:  # noqa: ARG002
        return Heard(self._text, is_loop(self._text))


def give_ears(monkeypatch: pytest.MonkeyPatch, heard: str) -> None:
    monkeypatch.setattr(VoiceEar, "open", staticmethod(SpectrumEar))
    monkeypatch.setattr(Recogniser, "open", staticmethod(lambda _name: Parrot(heard)))


def take_ears(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_voice() -> VoiceEar:
        raise ConfigError("resemblyzer cannot be imported", hint="pip install --no-deps resemblyzer==0.1.4")

    def no_words(name: str) -> Recogniser:
        raise ModelError(f"no recogniser {name} here", hint="name a folder")

    monkeypatch.setattr(VoiceEar, "open", staticmethod(no_voice))
    monkeypatch.setattr(Recogniser, "open", staticmethod(no_words))
