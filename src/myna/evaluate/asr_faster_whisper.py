"""Whisper by faster-whisper: CTranslate2's weights in eight bits, the quickest way on a processor."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from myna.audio.files import Samples
from myna.errors import ModelError
from myna.evaluate.dependencies import needed

INSTALL = ('pip install "myna[evaluate]"',)
WEIGHTS = "model.bin"
FILES = (WEIGHTS, "tokenizer.json", "config.json")
"""Without them faster-whisper would look for a network, or fail deep inside."""
HINT = (
    "name a folder that holds a Whisper of CTranslate2 (model.bin, tokenizer.json, config.json) or of transformers "
    "(config.json, model.safetensors), or base with network"
)


class FasterWhisper:
    def __init__(self, model: Any, name: str) -> None:
        self._model, self.name = model, name

    @classmethod
    def open(cls, folder: Path, name: str, device: str, at_once: int) -> FasterWhisper:
        """So many threads may transcribe at once; the cores of this machine are shared out among them."""
        faster_whisper = needed("faster_whisper", *INSTALL)
        if missing := [file for file in FILES if not (folder / file).is_file()]:
            raise ModelError(f"{folder} has no {', '.join(missing)}", hint=HINT)
        try:
            model = faster_whisper.WhisperModel(
                str(folder),
                device=device,
                compute_type="int8" if device == "cpu" else "float16",
                cpu_threads=max(1, min(4, os.cpu_count() or 1) // at_once),
                num_workers=at_once,
            )
        except (RuntimeError, ValueError) as error:
            raise ModelError(
                f"{name} cannot be opened on {device}: {error}",
                hint="give a Whisper converted with ct2-transformers-converter, and cpu or cuda",
            ) from error
        size = (folder / WEIGHTS).stat().st_size
        return cls(model, f"faster-whisper {version('faster-whisper')} {Path(name).name} {size}")

    def write(self, clip: Samples, language: str | None) -> str:
        segments, _ = self._model.transcribe(
            clip, language=language, beam_size=5, temperature=0.0, condition_on_previous_text=False
        )
        return " ".join(segment.text.strip() for segment in segments)


def download(name: str) -> Path:
    """A Whisper by the short name that faster-whisper has for it: base, large-v3."""
    faster_whisper = needed("faster_whisper", *INSTALL)
    try:
        return Path(faster_whisper.download_model(name))
    except Exception as error:
        raise ModelError(f"no recogniser {name} here, and it cannot be downloaded: {error}", hint=HINT) from error
