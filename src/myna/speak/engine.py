"""Text to sound: the training renderer with the last turn left open, the model, and the codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from myna.audio.files import read
from myna.data.codec import Codec, Codes, Samples
from myna.data.conversation import AudioClip, Reference, ReferencePlacement, script
from myna.data.utterance import normalise_text
from myna.errors import SpeakError
from myna.models.base import Family, Sampling


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """Something to say."""

    text: str
    references: tuple[Reference, ...] = ()
    scene: str = ""
    id: str = "line"


@dataclass(frozen=True, slots=True, eq=False)
class Speech:
    samples: Samples
    codes: Codes
    stopped: bool
    """False when the length cap ended it: the model did not find its end."""


class Engine:
    """A model that speaks. `place` must be where the training put references; a model that is still in training has
    weights of several types, and `numbers` is where they can be computed with."""

    def __init__(
        self,
        family: Family,
        model: nn.Module,
        codec: Codec,
        place: ReferencePlacement = "turn",
        numbers: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.family, self.model, self.codec, self.place = family, model.eval(), codec, place
        self.numbers = numbers

    def voice(self, recording: Path, text: str) -> Reference:
        """A reference from a recording and what is said in it."""
        samples = read(recording, sample_rate=self.codec.sample_rate)
        if len(samples) < self.codec.hop:
            raise SpeakError(
                f"{recording} is shorter than one frame of {1000 / self.codec.frame_rate:g} ms",
                hint="give a few seconds of the voice",
            )
        return Reference(normalise_text(text), AudioClip(recording.stem, encode_clip(self.codec, samples)))

    def speak(
        self, lines: Sequence[SpeechRequest], sampling: Sampling, on_frame: Callable[[int], None] | None = None
    ) -> list[Speech]:
        prompts = []
        for line in lines:
            text = normalise_text(line.text)
            if not text:
                raise SpeakError(f"{line.id} has no text to speak", hint="give some words")
            conversation = script(text, id=line.id, references=line.references, scene=line.scene, place=self.place)
            prompts.append(self.family.render(conversation))
        if not prompts:
            return []
        with self.numbers():
            spoken = self.family.generate(self.model, prompts, sampling, on_frame)
        return [
            Speech(self.codec.decode(codes) if len(codes) else np.zeros(0, np.float32), codes, stopped)
            for codes, stopped in spoken
        ]


def encode_clip(codec: Codec, samples: Samples) -> Codes:
    """One clip to codes, trimmed to whole frames."""
    whole = len(samples) // codec.hop * codec.hop
    codes: Codes = codec.encode(samples[None, :whole])[0]
    return codes
