"""Scored recordings for tests of pronunciation: sixteen learners say one word; a phone is a tone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from myna.audio.files import write_audio

RATE = 16_000
TONES = {"T": 400, "K": 900, "S": 1900, "M": 3600}
"""Frequency in Hz of the tone that stands for a phone."""
TEXT = "tok"


def sound(phones: str, seconds: float = 0.2) -> np.ndarray[Any, np.dtype[np.float32]]:
    time = np.arange(int(RATE * seconds)) / RATE
    tones = [0.3 * np.sin(2 * np.pi * TONES[phone] * time) for phone in phones.split()]
    return np.concatenate(tones).astype(np.float32)


def lines() -> list[dict[str, Any]]:
    """Return the lines of scores.jsonl: all sixteen pairs of phones, with scores by the number of right phones."""
    made = []
    for number in range(16):
        heard = [list(TONES)[number // 4], list(TONES)[number % 4]]
        right = (heard[0] == "T") + (heard[1] == "K")
        scores = {"accuracy": 2 + 4 * right, "fluency": number % 11, "prosodic": 10 - number // 4, "total": 3 + right}
        word = {"text": TEXT, "accuracy": 5 * right, "phones": "T K", "pronounced": " ".join(heard)}
        line = {"audio": f"{number:02d}.wav", "text": TEXT, "speaker": f"s{number % 4}", "question": "How was it?"}
        made.append(line | {"scores": scores, "words": [word]})
    return made


def record(folder: Path) -> Path:
    """Write the recordings and their scores; return the JSONL file."""
    folder.mkdir(parents=True)
    for line in lines():
        write_audio(folder / line["audio"], sound(line["words"][0]["pronounced"]), RATE)
    path = folder / "scores.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines()), encoding="utf-8")
    return path


def recipe(folder: Path) -> dict[str, Any]:
    """Return the settings of a LoRA on every layer, with the random embeddings, head and projection trained in full."""
    return {
        "name": "learners",
        "model": {"source": str(folder / "model"), "check_pretrained": False},
        "data": {"train": str(folder / "prepared"), "reference": "none", "row_tokens": 4096, "workers": 0},
        "adapt": {"rank": 16, "train_modules": ["text_embedding", "text_head", "audio_projection"]},
        "loss": {"text_weight": 1.0},
        "train": {
            "steps": 300,
            "batch_size": 1,
            "learning_rate": 0.005,
            "warmup": 10,
            "precision": "fp32",
            "device": "cpu",
            "save_every": 1000,
        },
    }
