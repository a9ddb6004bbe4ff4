"""Small prepared folders, made with a codec without weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from myna.core.io import file_hash
from myna.data.code_store import codes_key
from myna.data.dataset import DatasetInfo, PreparedDataset
from myna.data.encoding import encode_dataset
from myna.data.manifest import Span, Utterance, write_manifest
from tests.data.kill_helper import FakeCodec


def said(
    folder: Path,
    id: str,
    speaker: str = "anna",
    *,
    seconds: float = 1.0,
    sound: str | None = None,
    text: str | None = None,
    recording: str | None = None,
    span: Span | None = None,
    **extras: Any,
) -> Utterance:
    """Write a recording of noise that depends on `sound` (by default the id), and return its utterance."""
    path = folder / "recordings" / f"{recording or id}.wav"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        seed = int.from_bytes(hashlib.blake2b((sound or id).encode(), digest_size=8).digest(), "big")
        noise = np.random.default_rng(seed).uniform(-0.9, 0.9, round(seconds * FakeCodec.sample_rate))
        soundfile.write(path, noise, FakeCodec.sample_rate)
    return Utterance(id, path, text if text is not None else f"text of {id}", speaker, span=span, extras=extras)


def prepared(folder: Path, utterances: Sequence[Utterance]) -> PreparedDataset:
    """Prepare utterances as `myna prepare` does, and open the folder."""
    codec = FakeCodec()
    write_manifest(folder / "manifest.jsonl", utterances)
    encode_dataset(utterances, codec, folder)
    DatasetInfo.from_codec(codec).write(folder)
    return PreparedDataset.open(folder)


def utterance_key(utterance: Utterance, revision: str) -> str:
    return codes_key(file_hash(utterance.audio), utterance.span, revision)
