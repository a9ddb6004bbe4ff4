"""Fake scorers: deterministic, and without weights."""

from __future__ import annotations

import numpy as np
import pytest

from myna.audio.files import Samples
from myna.core.errors import ConfigError, ModelError
from myna.listen import speaker_encoders
from myna.listen.asr import ASR, Transcript, is_loop
from myna.listen.mos import DNSMOS, DistillMOS
from myna.listen.speaker_encoders import SpeakerEmbedding


class SpectrumEncoder:
    """A voice is the level of eight frequency bands."""

    name = "spectrum"

    def embed(self, samples: Samples, sample_rate: int) -> SpeakerEmbedding:  # noqa: ARG002
        spectrum = np.abs(np.fft.rfft(samples, 4096))[:2048].reshape(8, 256).sum(axis=1)
        return np.asarray(spectrum / (np.linalg.norm(spectrum) or 1), np.float32)


class ConstantASR(ASR):
    """ASR that gives one transcript for every clip."""

    name, note = "constant", ""

    def __init__(self, text: str) -> None:
        self._text = text

    def transcribe(self, samples: Samples, sample_rate: int, language: str | None = "en") -> Transcript:  # noqa: ARG002
        return Transcript(self._text, is_loop(self._text))


def unavailable(error: ConfigError | ModelError) -> staticmethod[..., object]:
    def raise_error(*_: object, **__: object) -> object:
        raise error

    return staticmethod(raise_error)


def install_scorers(monkeypatch: pytest.MonkeyPatch, transcript: str) -> None:
    """No MOS predictor, a speaker encoder, and an ASR that always gives this transcript."""
    remove_scorers(monkeypatch)
    monkeypatch.setattr(speaker_encoders, "open_speaker_encoder", lambda *_: SpectrumEncoder())
    monkeypatch.setattr(ASR, "open", staticmethod(lambda *_, **__: ConstantASR(transcript)))


def remove_scorers(monkeypatch: pytest.MonkeyPatch) -> None:
    no_encoder = ModelError("the speaker encoder is not here", hint="myna setup metrics")
    monkeypatch.setattr(speaker_encoders, "open_speaker_encoder", unavailable(no_encoder))
    monkeypatch.setattr(ASR, "open", unavailable(ModelError("no ASR model constant here", hint="name a folder")))
    for predictor in (DistillMOS, DNSMOS):
        monkeypatch.setattr(predictor, "open", unavailable(ConfigError("no MOS here", hint="pip install it")))
