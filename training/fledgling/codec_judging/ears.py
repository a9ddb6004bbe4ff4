"""What listeners make of an original and its round trip: words, voice, intelligibility, quality."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from myna.audio.files import Samples
from myna.evaluate.dependencies import RATE, needed
from myna.evaluate.ecapa import EcapaEncoder
from myna.evaluate.resemblyzer import ResemblyzerEncoder
from myna.evaluate.wer import ASR, word_errors


class Listener(Protocol):
    def __call__(self, text: str, original: Samples, copy: Samples) -> dict[str, float]:
        """Numbers by name, for one clip, both sounds at 16 kHz."""


def words_heard(recogniser: str, language: str) -> Listener:
    """Errors and words by Whisper, for original and copy; add both up before dividing."""
    ear = ASR.open(recogniser)

    def listen(text: str, original: Samples, copy: Samples) -> dict[str, float]:
        before, after = (word_errors(text, ear.transcribe(wave, RATE, language), language) for wave in (original, copy))
        return {"words": before.words, "errors in original": before.errors, "errors in copy": after.errors}

    return listen


def voice_by_ecapa(checkpoint: Path) -> Listener:
    ear = EcapaEncoder.open(checkpoint)
    return _alike("ecapa", lambda wave: ear.embed(wave, RATE))


def voice_by_resemblyzer() -> Listener:
    ear = ResemblyzerEncoder.open()
    return _alike("resemblyzer", lambda wave: ear.embed(wave, RATE))


def _alike(name: str, embed: Callable[[Samples], Samples]) -> Listener:
    def listen(text: str, original: Samples, copy: Samples) -> dict[str, float]:  # noqa: ARG001
        return {name: ResemblyzerEncoder.similarity(embed(original), embed(copy))}

    return listen


def intelligibility() -> Listener:
    pystoi = needed("pystoi", "pip install pystoi")
    return lambda text, original, copy: {"stoi": float(pystoi.stoi(original, copy, RATE))}  # noqa: ARG005


def quality() -> Listener:
    pesq = needed("pesq", "pip install pesq")
    return lambda text, original, copy: {"pesq": float(pesq.pesq(RATE, original, copy, "wb"))}  # noqa: ARG005
