"""Round-trip metrics of a codec: word errors, speaker similarity, STOI and PESQ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from myna.audio.files import LISTENING_RATE, Samples
from myna.core.errors import import_optional
from myna.listen.asr import ASR
from myna.listen.speaker_encoders import EcapaEncoder, ResemblyzerEncoder, cosine_similarity
from myna.text.wer import word_errors


class RoundTripMetric(Protocol):
    """Compares a recording with its round trip through a codec."""

    def __call__(self, text: str, original: Samples, copy: Samples) -> dict[str, float]:
        """Values by name for one clip, both waveforms at 16 kHz."""


def word_error_metric(whisper: str, language: str) -> RoundTripMetric:
    """Word errors by Whisper, for original and copy; add errors and words up before dividing."""
    asr = ASR.open(whisper)

    def measure(text: str, original: Samples, copy: Samples) -> dict[str, float]:
        before, after = (
            word_errors(text, asr.transcribe(wave, LISTENING_RATE, language).text, language)
            for wave in (original, copy)
        )
        return {"words": before.total, "errors in original": before.errors, "errors in copy": after.errors}

    return measure


def ecapa_similarity(checkpoint: Path) -> RoundTripMetric:
    encoder = EcapaEncoder.open(checkpoint)
    return _speaker_similarity("ecapa", lambda wave: encoder.embed(wave, LISTENING_RATE))


def resemblyzer_similarity() -> RoundTripMetric:
    encoder = ResemblyzerEncoder.open()
    return _speaker_similarity("resemblyzer", lambda wave: encoder.embed(wave, LISTENING_RATE))


def _speaker_similarity(name: str, embed: Callable[[Samples], Samples]) -> RoundTripMetric:
    def measure(text: str, original: Samples, copy: Samples) -> dict[str, float]:  # noqa: ARG001
        return {name: cosine_similarity(embed(original), embed(copy))}

    return measure


def stoi() -> RoundTripMetric:
    pystoi = import_optional("pystoi", "pip install pystoi")
    return lambda text, original, copy: {"stoi": float(pystoi.stoi(original, copy, LISTENING_RATE))}  # noqa: ARG005


def pesq() -> RoundTripMetric:
    pesq = import_optional("pesq", "pip install pesq")
    return lambda text, original, copy: {"pesq": float(pesq.pesq(LISTENING_RATE, original, copy, "wb"))}  # noqa: ARG005
