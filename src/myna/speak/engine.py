"""Speech engine: text to audio through the training renderer, the model and the codec."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from myna.audio.files import write_audio
from myna.data.codec import Codec, Codes, Encoder, Samples
from myna.data.conversation import AudioClip, Conversation, Reference, ReferencePlacement, speech_conversation
from myna.data.utterance import normalise_text
from myna.errors import SpeakError
from myna.io import check_output_file
from myna.models.base import Family, RenderedSequence, Sampling, require_speaking
from myna.speak.scheduler import SPARE_POSITIONS, BatchScheduler, request_sampling
from myna.speak.streaming import StreamDecoder
from myna.speak.validation import read_reference

MAX_ROWS = 64
"""Requests that are spoken at the same time; the others wait."""
POSITION_BLOCK = 256
"""Caches are made in multiples of this many positions, so that a little longer request finds room."""


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

    def save(self, path: Path | str, *, force: bool = False) -> Path:
        """Write an audio file, in the format that its name asks for; over one that is there only with `force`."""
        check_output_file(Path(path), force=force)
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
    several types, and needs the `autocast` context of its training. `scene` is the one that most of its training had.
    """

    def __init__(
        self,
        family: Family,
        model: nn.Module,
        codec: Codec,
        reference_placement: ReferencePlacement = "turn",
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        scene: str = "",
        max_rows: int = MAX_ROWS,
    ) -> None:
        self.family, self.model, self.codec = require_speaking(family), model.eval(), codec
        self.reference_placement, self.autocast, self.scene = reference_placement, autocast, scene
        self.max_rows = max_rows
        self._batch: BatchScheduler | None = None

    def reference(self, recording: Path, text: str) -> Reference:
        """A reference voice from a recording and its transcript."""
        samples = read_reference(recording, self.codec.sample_rate)
        if len(samples) < self.codec.hop:
            raise SpeakError(
                f"{recording} is shorter than one frame of {1000 / self.codec.frame_rate:g} ms",
                hint="give a few seconds of the voice",
            )
        return Reference(normalise_text(text), AudioClip(recording.stem, encode_clip(self.codec, samples)))

    def speak(
        self, requests: Sequence[SpeechRequest], sampling: Sampling, on_frame: Callable[[int], None] | None = None
    ) -> list[Speech]:
        """Speak requests together; `on_frame` is called with the number of whole frames so far."""
        prompts = [self.family.render(self._conversation(request)) for request in requests]
        max_frames = max(1, int(sampling.max_seconds * self.codec.frame_rate))
        with self.autocast():
            scheduler = self._scheduler(prompts, max_frames)
            generations = [
                scheduler.submit(prompt, request_sampling(sampling, prompt.id), max_frames) for prompt in prompts
            ]
            frames = 0
            while scheduler.busy:
                scheduler.advance()
                longest = max(generation.frames for generation in generations)
                if on_frame is not None and longest > frames:
                    on_frame(longest)
                frames = longest
        return [
            Speech(
                self.codec.decode(codes) if len(codes) else np.zeros(0, np.float32),
                codes,
                generation.finish_reason == "stop",
                self.codec.sample_rate,
            )
            for generation in generations
            for codes in (generation.codes(),)
        ]

    def stream(self, request: SpeechRequest, sampling: Sampling) -> Iterator[Samples]:
        """Speak one request, yielding samples as they are generated; together they are those of `speak`, bit for bit.

        A caller that stops reading ends the request.
        """
        prompt = self.family.render(self._conversation(request))
        max_frames = max(1, int(sampling.max_seconds * self.codec.frame_rate))
        decoder, done = StreamDecoder(self.codec), 0
        with self.autocast():
            scheduler = self._scheduler([prompt], max_frames)
            generation = scheduler.submit(prompt, request_sampling(sampling, prompt.id), max_frames)
        frames = scheduler.run(generation)
        try:
            while True:
                with self.autocast():
                    count = next(frames, None)
                if count is None:
                    break
                samples = decoder.decode(generation.codes(done))
                done = count
                if len(samples):
                    yield samples
        finally:
            generation.cancel()
        if len(samples := decoder.finish()):
            yield samples

    def _scheduler(self, prompts: Sequence[RenderedSequence], max_frames: int) -> BatchScheduler:
        """The batch, made anew where these prompts do not fit it."""
        rows = min(len(prompts), self.max_rows)
        positions = max(map(len, prompts), default=0) + max_frames + SPARE_POSITIONS
        current = self._batch
        if current is None or current.decoder.rows < rows or current.decoder.max_positions < positions:
            positions = -(-positions // POSITION_BLOCK) * POSITION_BLOCK
            self._batch = None  # freed before the next is allocated
            self._batch = current = BatchScheduler(self.family.speech_decoder(self.model, max(1, rows), positions))
        return current

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
