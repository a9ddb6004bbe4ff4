"""What listeners make of an original and its round trip: words, voice, intelligibility, quality."""

from __future__ import annotations

import importlib
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import soxr  # type: ignore[import-untyped]
import torch

from codec_judging.ecapa import Ecapa
from myna.errors import ConfigError, ModelError

Wave = npt.NDArray[np.float32]
RATE = 16_000
"""What all listeners take."""


class Listener(Protocol):
    def __call__(self, text: str, original: Wave, copy: Wave) -> dict[str, float]:
        """Numbers by name, for one clip, both sounds at 16 kHz."""


def needed(module: str, package: str) -> Any:
    """An optional package, or what to type to have it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{module} cannot be imported: {error}", hint=f"pip install {package}") from None


def at_16k(wave: Wave, rate: int) -> Wave:
    return np.ascontiguousarray(soxr.resample(wave, rate, RATE, quality="VHQ"), dtype=np.float32)


def words_heard(folder: Path, language: str) -> Listener:
    """Errors and words by Whisper, for original and copy; add both up before dividing."""
    whisper = needed("faster_whisper", "faster-whisper")
    if not (folder / "model.bin").is_file():
        raise ModelError(f"{folder} has no model.bin", hint="give the folder of a CTranslate2 Whisper model")
    model = whisper.WhisperModel(str(folder), device="cpu", compute_type="int8")

    def hear(wave: Wave) -> str:
        segments, _ = model.transcribe(wave, language=language, beam_size=5, temperature=0.0)
        return " ".join(segment.text for segment in segments)

    def listen(text: str, original: Wave, copy: Wave) -> dict[str, float]:
        due = words(text)
        return {
            "words": len(due),
            "errors in original": edits(due, words(hear(original))),
            "errors in copy": edits(due, words(hear(copy))),
        }

    return listen


def words(text: str) -> list[str]:
    """Lower case, letters, digits and apostrophes; all else separates words."""
    plain = unicodedata.normalize("NFKC", text.casefold()).replace("’", "'")
    return "".join(symbol if symbol.isalnum() or symbol == "'" else " " for symbol in plain).split()


def edits(due: Sequence[str], heard: Sequence[str]) -> int:
    """Words to change, add or drop."""
    row = list(range(len(heard) + 1))
    for number, word in enumerate(due, start=1):
        above, row = row, [number]
        for place, other in enumerate(heard, start=1):
            row.append(min(above[place] + 1, row[-1] + 1, above[place - 1] + (word != other)))
    return row[-1]


def voice_by_ecapa(checkpoint: Path) -> Listener:
    encoder = Ecapa.open(checkpoint)

    def embed(wave: Wave) -> Wave:
        embedding: Wave = encoder(torch.from_numpy(wave)).numpy()
        return embedding

    return _alike("ecapa", embed)


def voice_by_resemblyzer() -> Listener:
    resemblyzer = needed("resemblyzer", "--no-deps resemblyzer, then webrtcvad-wheels and librosa")
    encoder = resemblyzer.VoiceEncoder("cpu", verbose=False)
    return _alike("resemblyzer", lambda wave: encoder.embed_utterance(resemblyzer.preprocess_wav(wave, RATE)))


def _alike(name: str, embed: Callable[[Wave], Wave]) -> Listener:
    def listen(text: str, original: Wave, copy: Wave) -> dict[str, float]:  # noqa: ARG001
        one, other = embed(original), embed(copy)
        return {name: float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))}

    return listen


def intelligibility() -> Listener:
    pystoi = needed("pystoi", "pystoi")
    return lambda text, original, copy: {"stoi": float(pystoi.stoi(original, copy, RATE))}  # noqa: ARG005


def quality() -> Listener:
    pesq = needed("pesq", "pesq")
    return lambda text, original, copy: {"pesq": float(pesq.pesq(RATE, original, copy, "wb"))}  # noqa: ARG005
