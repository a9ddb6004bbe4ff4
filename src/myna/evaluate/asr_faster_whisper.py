"""faster-whisper backend of the ASR: CTranslate2 weights, int8 on a CPU and float16 on a GPU."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from myna.audio.files import Samples
from myna.errors import ModelError
from myna.evaluate.dependencies import import_optional

INSTALL = ('pip install "myna[evaluate]"',)
WEIGHTS_FILE = "model.bin"
REQUIRED_FILES = (WEIGHTS_FILE, "tokenizer.json", "config.json")
"""Without them faster-whisper would look for a network, or fail deep inside."""
ASR_HINT = (
    "name a folder that holds a Whisper of CTranslate2 (model.bin, tokenizer.json, config.json) or of transformers "
    "(config.json, model.safetensors), or base with network"
)


class FasterWhisper:
    def __init__(self, model: Any, name: str) -> None:
        self._model, self.name = model, name

    @classmethod
    def open(cls, folder: Path, name: str, device: str, workers: int) -> FasterWhisper:
        """The CPU cores are divided among the `workers` threads that transcribe concurrently."""
        faster_whisper = import_optional("faster_whisper", *INSTALL)
        if missing := [file for file in REQUIRED_FILES if not (folder / file).is_file()]:
            raise ModelError(f"{folder} has no {', '.join(missing)}", hint=ASR_HINT)
        try:
            model = faster_whisper.WhisperModel(
                str(folder),
                device=device,
                compute_type="int8" if device == "cpu" else "float16",
                cpu_threads=max(1, min(4, os.cpu_count() or 1) // workers),
                num_workers=workers,
            )
        except (RuntimeError, ValueError) as error:
            raise ModelError(
                f"{name} cannot be opened on {device}: {error}",
                hint="give a Whisper converted with ct2-transformers-converter, and cpu or cuda",
            ) from error
        size = (folder / WEIGHTS_FILE).stat().st_size
        return cls(model, f"faster-whisper {version('faster-whisper')} {Path(name).name} {size}")

    def transcribe(self, clip: Samples, language: str | None) -> str:
        segments, _ = self._model.transcribe(
            clip, language=language, beam_size=5, temperature=0.0, condition_on_previous_text=False
        )
        return " ".join(segment.text.strip() for segment in segments)


def download_faster_whisper(name: str) -> Path:
    """The folder of a Whisper by faster-whisper's short name for it: base, large-v3."""
    faster_whisper = import_optional("faster_whisper", *INSTALL)
    try:
        return Path(faster_whisper.download_model(name))
    except Exception as error:
        raise ModelError(f"no ASR model {name} here, and it cannot be downloaded: {error}", hint=ASR_HINT) from error
