"""Detection of generated speech: watermark, content credentials, and the speech log of this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from myna.audio.files import read_audio
from myna.core.io import file_sha256
from myna.provenance import INSTALL_HINT, perth_checkpoint
from myna.provenance.credentials import Credentials, read_credentials
from myna.provenance.speech_log import read_log
from myna.provenance.watermark import MARK_NAME, MARK_THRESHOLD, ScoredSpan, detect_spans, mean_score

DETECTION_RATE = 24_000
"""Hertz to which recordings are resampled; the mark lies below 2 kHz."""


@dataclass(frozen=True, slots=True)
class Detection:
    """Marks found in a file."""

    file: Path
    seconds: float
    score: float
    """Score of the watermark in the whole file, 0 to 1."""
    spans: tuple[ScoredSpan, ...]
    """Scores of the parts of a long file."""
    credentials: Credentials | None
    logged: dict[str, Any] | None
    """Line of this machine's speech log about exactly this file."""

    @property
    def marked(self) -> bool:
        """Whether the watermark is in the file or in a part of it."""
        return any(span.score > MARK_THRESHOLD for span in self.spans)

    @property
    def is_synthetic(self) -> bool:
        """Whether the file is marked, or signed as speech of a model."""
        return self.marked or (self.credentials is not None and self.credentials.is_synthetic)

    def to_json(self) -> dict[str, Any]:
        credentials = asdict(self.credentials) if self.credentials is not None else None
        return {
            "file": str(self.file),
            "seconds": round(self.seconds, 3),
            "marked": self.marked,
            "watermark": MARK_NAME if self.marked else None,
            "score": round(self.score, 4),
            "spans": [[round(value, 4) for value in span] for span in self.spans],
            "credentials": credentials,
            "logged": self.logged,
        }


def inspect_file(file: Path, *, device: str = "cpu") -> Detection:
    """Look for the watermark and the credentials in an audio file."""
    perth_checkpoint(INSTALL_HINT)
    samples = read_audio(file, sample_rate=DETECTION_RATE)
    spans = detect_spans(samples, DETECTION_RATE, device=device)
    found = file_sha256(file)
    logged = next((row for row in read_log() if row.get("audio_sha256") == found), None)
    seconds = len(samples) / DETECTION_RATE
    return Detection(file, seconds, mean_score(spans), tuple(spans), read_credentials(file), logged)
