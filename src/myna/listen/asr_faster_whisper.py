"""faster-whisper backend of the ASR: CTranslate2 weights, int8 on a CPU and float16 on a GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from myna.audio.files import Samples
from myna.core.device import pick_device
from myna.core.errors import ModelError
from myna.core.optional import import_optional
from myna.listen.asr_windows import BEAMS, DecodedClip, decode_clips
from myna.listen.pretrained import SAMPLE_RATE

INSTALL = ('pip install "myna[evaluate]"',)
WEIGHTS_FILE = "model.bin"
GPU_BATCH_CLIPS = 32
REQUIRED_FILES = (WEIGHTS_FILE, "tokenizer.json", "config.json")
"""Without them faster-whisper would look for a network, or fail deep inside."""
ASR_HINT = (
    "name a folder that holds a Whisper of CTranslate2 (model.bin, tokenizer.json, config.json) or of transformers "
    "(config.json, model.safetensors), or base with network"
)


class FasterWhisper:
    def __init__(self, model: Any, name: str, note: str = "") -> None:
        self._model, self.name, self.note = model, name, note

    @classmethod
    def open(cls, folder: Path, name: str, device: str, workers: int, threads: int = 0) -> FasterWhisper:
        """The CPU cores are divided among the `workers` threads that transcribe concurrently."""
        faster_whisper = import_optional("faster_whisper", *INSTALL)
        if missing := [file for file in REQUIRED_FILES if not (folder / file).is_file()]:
            raise ModelError(f"{folder} has no {', '.join(missing)}", hint=ASR_HINT)
        target = pick_device(device)
        note = "faster-whisper runs on the CPU, for it knows no Apple GPUs" if target.type == "mps" else ""
        on_gpu = target.type == "cuda"

        def load(on_gpu: bool) -> Any:
            return faster_whisper.WhisperModel(
                str(folder),
                device="cuda" if on_gpu else "cpu",
                device_index=target.index or 0,
                compute_type="float16" if on_gpu else "int8",
                cpu_threads=threads or max(1, min(4, os.cpu_count() or 1) // workers),
                num_workers=workers,
            )

        try:
            model = load(on_gpu)
            if on_gpu:
                # Libraries of CUDA that are missing are only missed by the first clip.
                list(model.transcribe(np.zeros(SAMPLE_RATE, np.float32), language="en")[0])
        except (RuntimeError, ValueError) as error:
            if not on_gpu or device != "auto":
                raise ModelError(
                    f"{name} cannot be opened on {target}: {error}",
                    hint="--device cpu; or have transformers run it, --asr transformers:NAME; or give a Whisper "
                    "converted with ct2-transformers-converter",
                ) from error
            note = f"faster-whisper runs on the CPU, since it does not on {target}: {error}"
            on_gpu, model = False, load(False)
        size = (folder / WEIGHTS_FILE).stat().st_size
        # Other numbers may give another transcript.
        numbers = " float16" if on_gpu else ""
        return cls(model, f"faster-whisper {version('faster-whisper')} {Path(name).name} {size}{numbers}", note)

    @property
    def batch_size(self) -> int:
        """Clips that are best given at once. On a CPU two windows take twice the time of one."""
        return GPU_BATCH_CLIPS if self._model.model.device == "cuda" else 1

    def transcribe(self, clip: Samples, language: str | None) -> str:
        segments, _ = self._model.transcribe(
            clip,
            language=language,
            beam_size=BEAMS,
            temperature=0.0,
            condition_on_previous_text=False,
            word_timestamps=False,
        )
        return " ".join(segment.text.strip() for segment in segments)

    def decode(self, clips: Sequence[Samples], languages: Sequence[str | None], *, words: bool) -> list[DecodedClip]:
        short = not words and self._model.model.device == "cpu"
        return decode_clips(self._model, clips, languages, word_times=words, short_windows=short)


def download_faster_whisper(name: str) -> Path:
    """The folder of a Whisper by faster-whisper's short name for it: base, large-v3."""
    faster_whisper = import_optional("faster_whisper", *INSTALL)
    try:
        return Path(faster_whisper.download_model(name))
    except Exception as error:
        raise ModelError(f"no ASR model {name} here, and it cannot be downloaded: {error}", hint=ASR_HINT) from error
