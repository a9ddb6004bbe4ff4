"""Ears for tests: they hear something, always the same, and need no weights."""

from __future__ import annotations

import numpy as np
import pytest

from myna.audio.files import Samples
from myna.errors import ConfigError, ModelError
from myna.evaluate.resemblyzer import ResemblyzerEncoder, Voice
from myna.evaluate.wer import ASR, Transcript, is_loop


class SpectrumEar(ResemblyzerEncoder):
    """A voice is how loud eight ranges of pitch are."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def embed(self, samples: Samples, sample_rate: int) -> Voice:  # noqa: ARG002
        spectrum = np.abs(np.fft.rfft(samples, 4096))[:2048].reshape(8, 256).sum(axis=1)
        return np.asarray(spectrum / (np.linalg.norm(spectrum) or 1), np.float32)


class Parrot(ASR):
    """Whatever it hears, it writes down the same."""

    def __init__(self, text: str) -> None:
        self._text = text

    def transcribe(self, samples: Samples, sample_rate: int, language: str | None = "en") -> Transcript:  # noqa: ARG002
        return Transcript(self._text, is_loop(self._text))


def give_ears(monkeypatch: pytest.MonkeyPatch, heard: str) -> None:
    monkeypatch.setattr(ResemblyzerEncoder, "open", staticmethod(SpectrumEar))
    monkeypatch.setattr(ASR, "open", staticmethod(lambda _name: Parrot(heard)))


def take_ears(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_voice() -> ResemblyzerEncoder:
        raise ConfigError("resemblyzer cannot be imported", hint="pip install --no-deps resemblyzer==0.1.4")

    def no_words(name: str) -> ASR:
        raise ModelError(f"no recogniser {name} here", hint="name a folder")

    monkeypatch.setattr(ResemblyzerEncoder, "open", staticmethod(no_voice))
    monkeypatch.setattr(ASR, "open", staticmethod(no_words))
