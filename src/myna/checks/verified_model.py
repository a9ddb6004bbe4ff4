"""Model to verify: the sequences and prompts it is verified on, and the speech it generates from them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from myna.core.check import CheckSkipped
from myna.data.codec import Codec, Codes, Samples
from myna.data.conversation import AudioClip, Conversation, Reference, answer_conversation, speech_conversation
from myna.models import base
from myna.models.base import AnsweringFamily, RenderedSequence, Sampling, SpeakingFamily
from myna.speak.scheduler import SPARE_POSITIONS, BatchScheduler, request_sampling
from myna.speak.streaming import CodeStream, decode_streams

TEXTS = (
    "Good morning.",
    "The weather is fine today, is it not?",
    "Seven ships sailed.",
    "She said that nobody would come, and then everybody came at once.",
)
QUESTIONS = ("What is said?", "How is it said, and by whom?", "In which language?")
GREEDY = Sampling(temperature=0.0, repetition_window=0)
GreedyChoices = tuple[npt.NDArray[np.int64], bool]
"""Ids that Myna chose for one prompt, without the end, (frames or tokens, codebooks or 1), and whether the model chose
the end after the last one."""


@dataclass(eq=False)
class VerifiedModel:
    """The model to verify, with its codec if it speaks."""

    family: base.Family
    model: nn.Module
    """Model with the adapter on it, until `check_merged` merges it."""
    adapter: Path | None
    """Folder of the adapter; None for a whole model."""
    codec: Codec | None
    device: torch.device
    dtype: torch.dtype
    quick: bool

    @property
    def frames(self) -> int:
        """Number of frames or tokens to generate."""
        return 16 if self.quick else 64

    @property
    def is_exact(self) -> bool:
        """Whether requests are spoken in exact batches, which CUDA has. Every batch on a CPU is exact anyway."""
        return self.device.type == "cuda" and isinstance(self.family, SpeakingFamily)

    @property
    def speaking(self) -> tuple[SpeakingFamily, Codec]:
        if not isinstance(self.family, SpeakingFamily) or self.codec is None:
            raise CheckSkipped("the model answers in words: it generates no speech and has no codec")
        return self.family, self.codec

    @cached_property
    def clips(self) -> list[AudioClip]:
        """Clips of the family's probe: a reference and a target, or the clip of a question."""
        return [part for turn in self.family.probe().turns for part in turn.parts if isinstance(part, AudioClip)]

    @cached_property
    def sequences(self) -> list[RenderedSequence]:
        """Supervised sequences: the family's probe, and others of other lengths, one without a reference."""
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
        """Prompts of different lengths, with and without a reference."""
        if isinstance(self.family, SpeakingFamily):
            return [self.family.render(self.speech(number)) for number in range(len(TEXTS))]
        codes = [replace(self.clips[0], codes=self.clips[0].codes[8 * n :]) for n in range(len(QUESTIONS))]
        questions = zip(QUESTIONS, codes, strict=True)
        return [self.family.render(answer_conversation(question, clip, id=question)) for question, clip in questions]

    @cached_property
    def generated(self) -> list[base.TransformersGeneration]:
        """Output of transformers' `generate` for the prompts, with the adapter merged."""
        return [self.family.transformers_generate(self.model, prompt, self.frames) for prompt in self.prompts]

    def speech(self, number: int, target: AudioClip | None = None) -> Conversation:
        """Return the conversation of a prompt, with its answer if a target is given."""
        references = (Reference(TEXTS[2], self.clips[0]),) if number % 2 else ()
        return speech_conversation(TEXTS[number], id=TEXTS[number], references=references, target=target)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of training."""
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class SpokenCodes:
    """Codes of one prompt, with their log-probabilities and steps."""

    codes: Codes
    log_probs: npt.NDArray[np.float32]
    """Log-probabilities of the codes and of the ends, shape (frames + 1, codebooks)."""
    steps: npt.NDArray[np.int64]
    """Step at which each code was chosen, shape (frames, codebooks)."""
    stopped: bool


def greedy_choices(verified: VerifiedModel) -> list[GreedyChoices]:
    """Generate the answer to each prompt by itself, greedily."""
    if isinstance(verified.family, AnsweringFamily):
        answers = [verified.family.answer(verified.model, [prompt], verified.frames)[0] for prompt in verified.prompts]
        return [(np.array(answer.ids, np.int64).reshape(-1, 1), answer.stopped) for answer in answers]
    spoken = [speak_together(verified, [one], [verified.frames], 1, sampling=GREEDY)[0] for one in verified.prompts]
    return [(one.codes.astype(np.int64), one.stopped) for one in spoken]


def adapter_choices(verified: VerifiedModel, matrices: base.LoraMatrices) -> list[GreedyChoices]:
    """Generate greedily with an adapter in a slot beside the base model, in every second row of a batch."""
    family, _ = verified.speaking
    slots = family.adapter_slots(verified.model, 1, max(len(a) for a, _ in matrices.values()))
    slots.load("adapter", matrices)
    prompts = [prompt for prompt in verified.prompts for _ in range(2)]
    caps, names = [verified.frames] * len(prompts), ["adapter", ""] * len(verified.prompts)
    rows = speak_together(verified, prompts, caps, len(prompts), sampling=GREEDY, slots=slots, adapters=names)
    return [(one.codes.astype(np.int64), one.stopped) for one in rows[::2]]


def speak_together(
    verified: VerifiedModel,
    prompts: Sequence[RenderedSequence],
    caps: Sequence[int],
    rows: int,
    max_frames: int = 0,
    sampling: Sampling | None = None,
    slots: base.AdapterSlots | None = None,
    adapters: Sequence[str] = (),
) -> list[SpokenCodes]:
    """Speak prompts in one batch of a number of rows, with room for `max_frames`; each with its adapter, if named."""
    family, _ = verified.speaking
    positions = max(map(len, verified.prompts)) + max(*caps, max_frames) + SPARE_POSITIONS
    decoder = family.speech_decoder(verified.model, rows, positions, slots, exact=verified.is_exact)
    scheduler = BatchScheduler(decoder)
    generations = [
        scheduler.submit(prompt, sampling or request_sampling(family.sampling, prompt.id), cap, adapter)
        for prompt, cap, adapter in zip(prompts, caps, adapters or [""] * len(prompts), strict=True)
    ]
    while scheduler.busy:
        scheduler.advance()
    spoken = []
    for generation in generations:
        if generation.error is not None:
            raise generation.error
        codes = generation.codes()
        frames, books = codes.shape
        # Undo the delay pattern on the numbers of the steps themselves.
        steps = decoder.undelay([np.full(books, step) for step in range(frames + books)], 0, frames)
        spoken.append(SpokenCodes(codes, generation.log_probs(), steps, generation.finish_reason == "stop"))
    return spoken


def decode_together(codec: Codec, spoken: Sequence[SpokenCodes], piece: int = 9) -> list[Samples]:
    """Decode clips whose frames come a few at a time, with the windows of all clips in one call."""
    streams = [CodeStream(codec) for _ in spoken]
    parts: list[list[Samples]] = [[np.zeros(0, np.float32)] for _ in spoken]
    for start in range(0, max(len(one.codes) for one in spoken), piece):
        for stream, one in zip(streams, spoken, strict=True):
            if not stream.ended:
                stream.push(one.codes[start : start + piece])
                if start + piece >= len(one.codes):
                    stream.end()
        for own, samples in zip(parts, decode_streams(codec, streams)(), strict=True):
            own.append(samples)
    return [np.concatenate(own) for own in parts]
