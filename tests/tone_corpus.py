"""Synthetic speech for tests: two speakers, each with a pitch of its own; a letter is a tone.

A tiny model with random weights overfits it in a minute, code for code. It tests the whole pipeline, but not how a
voice sounds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from myna.audio.files import write_audio
from myna.data.codec import Codes, Samples

SAMPLE_RATE = 24_000
LETTER_SECONDS = 0.06
SPEAKER_PITCHES = {"robin": 320.0, "heron": 110.0}
LINES = ("good morning", "what a fine day")
REFERENCE = "follow me"


def tone_speech(text: str, pitch: float) -> Samples:
    """Return 60 ms for each letter: a tone with three harmonics and a soft edge, or silence for a space."""
    count = int(LETTER_SECONDS * SAMPLE_RATE)
    time = np.arange(count) / SAMPLE_RATE
    edge = np.minimum(1.0, np.minimum(time, time[::-1]) / 0.008)
    notes = [np.zeros(count)]
    for letter in text.lower():
        tone = pitch * 2 ** ((ord(letter) % 24) / 12)
        sound = sum(np.sin(2 * np.pi * tone * n * time) / n for n in (1, 2, 3))
        notes.append(np.zeros(count) if letter == " " else 0.25 * edge * sound)
    return np.concatenate(notes).astype(np.float32)


def write_recordings(folder: Path) -> None:
    """Write three clips of each speaker into a folder of its own, each with its transcript beside it."""
    for speaker, pitch in SPEAKER_PITCHES.items():
        for number, text in enumerate((REFERENCE, *LINES)):
            clip = folder / speaker / f"{speaker}-{number}.wav"
            write_audio(clip, tone_speech(text, pitch), SAMPLE_RATE)
            clip.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")


def recipe(out: Path, steps: int = 250) -> dict[str, Any]:
    """Return the settings of a training that overfits the prepared corpus in `out`."""
    return {
        "name": "tones",
        "model": {"source": str(out / "model"), "check_pretrained": False},
        "data": {"train": str(out / "prepared"), "row_tokens": 1024, "reference_seconds": [0.2, 10]},
        "adapt": {"rank": 16, "alpha": 32, "train_modules": ["audio_head", "audio_embedding"]},
        "train": {"steps": steps, "batch_size": 4, "learning_rate": 5e-3, "warmup": 10, "device": "cpu"},
    }


def code_accuracy(generated: Codes, target: Codes) -> float:
    """Share of equal codes, over the longer of the two sequences."""
    shared = min(len(generated), len(target))
    longer = max(len(generated), len(target))
    return float((generated[:shared] == target[:shared]).sum() / (longer * target.shape[1]))
