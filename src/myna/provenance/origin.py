"""What is known of a piece of speech: the model, the voice, the text, and how it is marked."""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass, field
from pathlib import Path


def new_id() -> str:
    """Of one generation."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class SpeechOrigin:
    """Where speech comes from. One id is one generation."""

    model: str
    """Name of the model; of a folder, its own name."""
    adapter: str = ""
    """Name of the run or of the adapter."""
    adapter_sha256: str = ""
    """Of the weights that were trained."""
    voice: str = ""
    """Name of the stored voice, or of the reference recordings."""
    consent: str = ""
    """Id of the consent of a stored voice."""
    text: str = ""
    seed: int = 0
    watermark: str = ""
    """Name of the watermark; empty for speech without one."""
    id: str = field(default_factory=new_id)

    @property
    def text_sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def display_name(source: str) -> str:
    """A hub name as it is; of a folder, the last part: where it lies is nobody else's business."""
    path = Path(source)
    return path.name if path.is_absolute() or path.exists() else source


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_sha256(folder: Path) -> str:
    """Of the one safetensors file of a folder, or of the hashes of several in the order of their names."""
    hashes = [file_sha256(file) for file in sorted(folder.glob("*.safetensors"))]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest() if hashes else ""
