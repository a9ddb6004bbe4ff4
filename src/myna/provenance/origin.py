"""What is known of a piece of speech: the model, the voice, the text, and how it is marked."""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass, field

from myna.models.ref import ModelRef, display_name


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


def model_origin(ref: ModelRef) -> SpeechOrigin:
    """Return the origin of speech of a run, an adapter or a model, without voice and text."""
    if not ref.is_trained:
        return SpeechOrigin(ref.display_name)
    return SpeechOrigin(display_name(ref.base_source), ref.display_name, ref.trained_sha256)
