"""The model to verify, with the sequences and prompts that it is verified on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from myna.data.codec import Codec
from myna.data.conversation import AudioClip, Conversation, Reference, answer_conversation, speech_conversation
from myna.models.base import Family, RenderedSequence, SpeakingFamily, TransformersGeneration

TEXTS = (
    "Good morning.",
    "The weather is fine today, is it not?",
    "Seven ships sailed.",
    "She said that nobody would come, and then everybody came at once.",
)
QUESTIONS = ("What is said?", "How is it said, and by whom?", "In which language?")


class NotApplicableError(Exception):
    """A check that says nothing about this model; the message is the reason."""


@dataclass(eq=False)
class VerifiedModel:
    """The model to verify, with its codec if it speaks."""

    family: Family
    model: nn.Module
    """With an adapter on it until `check_merged` has merged it."""
    adapter: Path | None
    """The folder of that adapter; None for a whole model."""
    codec: Codec | None
    device: torch.device
    dtype: torch.dtype
    quick: bool

    @property
    def frames(self) -> int:
        """Frames, or tokens, to generate."""
        return 16 if self.quick else 64

    @property
    def is_exact(self) -> bool:
        """Whether requests are spoken in exact batches: on a CPU any batch is one, and elsewhere only CUDA has them."""
        return self.device.type == "cuda" and isinstance(self.family, SpeakingFamily)

    @property
    def speaking(self) -> tuple[SpeakingFamily, Codec]:
        if not isinstance(self.family, SpeakingFamily) or self.codec is None:
            raise NotApplicableError("the model answers in words: it generates no speech and has no codec")
        return self.family, self.codec

    @cached_property
    def clips(self) -> list[AudioClip]:
        """Those of the family's probe: a reference and a target, or the clip of a question."""
        return [part for turn in self.family.probe().turns for part in turn.parts if isinstance(part, AudioClip)]

    @cached_property
    def sequences(self) -> list[RenderedSequence]:
        """Supervised: the family's probe, and others of other lengths, one of them without a reference."""
        conversations = [self.family.probe()]
        for number, text in enumerate(TEXTS[:2]):
            clip = replace(self.clips[-1], codes=self.clips[-1].codes[number:])
            if isinstance(self.family, SpeakingFamily):
                references = (Reference(TEXTS[2], self.clips[0]),) if number else ()
                conversations.append(speech_conversation(text, id=text, references=references, target=clip))
            else:
                conversations.append(answer_conversation(QUESTIONS[number + 1], clip, id=text, answer=text))
        return [self.family.render(conversation, supervise_text=True) for conversation in conversations]

    @cached_property
    def prompts(self) -> list[RenderedSequence]:
        """Open: with and without a reference, of different lengths."""
        return [self.family.render(conversation) for conversation in self._open()]

    @cached_property
    def generated(self) -> list[TransformersGeneration]:
        """What transformers' own `generate` makes of the prompts, with the adapter merged."""
        return [self.family.transformers_generate(self.model, prompt, self.frames) for prompt in self.prompts]

    def _open(self) -> Iterator[Conversation]:
        if isinstance(self.family, SpeakingFamily):
            yield from map(self.speech, range(len(TEXTS)))
            return
        for number, question in enumerate(QUESTIONS):
            clip = replace(self.clips[0], codes=self.clips[0].codes[8 * number :])
            yield answer_conversation(question, clip, id=question)

    def speech(self, number: int, target: AudioClip | None = None) -> Conversation:
        """The conversation of a prompt; with a target, that of its answer."""
        references = (Reference(TEXTS[2], self.clips[0]),) if number % 2 else ()
        return speech_conversation(TEXTS[number], id=TEXTS[number], references=references, target=target)

    def autocast(self) -> AbstractContextManager[Any]:
        """As in training."""
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, self.dtype)
