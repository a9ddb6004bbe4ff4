"""Speech engine: text to audio through the training renderer, the model and the codec."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from myna.audio.files import read_audio, write_audio
from myna.data.codec import Codec, Codes, Encoder, Samples
from myna.data.conversation import AudioClip, Conversation, Reference, ReferencePlacement, speech_conversation
from myna.data.utterance import normalise_text
from myna.errors import SpeakError
from myna.models.base import Family, Sampling, require_speaking


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """Text to speak, with the voices to speak it in."""

    text: str
    references: tuple[Reference, ...] = ()
    scene: str = ""
    id: str = "line"


@dataclass(frozen=True, slots=True, eq=False)
class Speech:
    """Generated audio; notebooks show it as a player."""

    samples: Samples
    codes: Codes
    stopped: bool
    """False when the length cap ended it: the model did not find its end."""
    sample_rate: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate

    def save(self, path: Path | str) -> Path:
        """Write an audio file, in the format that its name asks for."""
        write_audio(Path(path), self.samples, self.sample_rate)
        return Path(path)

    def _repr_html_(self) -> str:
        content = io.BytesIO()
        with wave.open(content, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(self.sample_rate)
            file.writeframes((self.samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
        encoded = base64.b64encode(content.getvalue()).decode()
        return f'<audio controls src="data:audio/wav;base64,{encoded}"></audio>'


class Engine:
    """A speaking model with its codec.

    `reference_placement` must be where the training put references. A model that is still in training has weights of
    several types, and needs the `autocast` context of its training.
    """

    def __init__(
        self,
        family: Family,
        model: nn.Module,
        codec: Codec,
        reference_placement: ReferencePlacement = "turn",
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.family, self.model, self.codec = require_speaking(family), model.eval(), codec
        self.reference_placement, self.autocast = reference_placement, autocast

    def reference(self, recording: Path, text: str) -> Reference:
        """A reference voice from a recording and its transcript."""
        samples = read_audio(recording, sample_rate=self.codec.sample_rate)
        if len(samples) < self.codec.hop:
            raise SpeakError(
                f"{recording} is shorter than one frame of {1000 / self.codec.frame_rate:g} ms",
                hint="give a few seconds of the voice",
            )
        return Reference(normalise_text(text), AudioClip(recording.stem, encode_clip(self.codec, samples)))

    def speak(
        self, requests: Sequence[SpeechRequest], sampling: Sampling, on_frame: Callable[[int], None] | None = None
    ) -> list[Speech]:
        """Speak requests as one batch; `on_frame` is called with the number of frames generated so far."""
        if not requests:
            return []
        prompts = [self.family.render(self._conversation(request)) for request in requests]
        with self.autocast():
            generated = self.family.generate(self.model, prompts, sampling, on_frame)
        return [
            Speech(
                self.codec.decode(codes) if len(codes) else np.zeros(0, np.float32),
                codes,
                stopped,
                self.codec.sample_rate,
            )
            for codes, stopped in generated
        ]

    def _conversation(self, request: SpeechRequest) -> Conversation:
        text = normalise_text(request.text)
        if not text:
            raise SpeakError(f"{request.id} has no text to speak", hint="give some words")
        return speech_conversation(
            text,
            id=request.id,
            references=request.references,
            scene=request.scene,
            reference_placement=self.reference_placement,
        )


def encode_clip(codec: Encoder, samples: Samples) -> Codes:
    """One clip to codes, trimmed to whole frames."""
    whole = len(samples) // codec.hop * codec.hop
    codes: Codes = codec.encode(samples[None, :whole])[0]
    return codes
