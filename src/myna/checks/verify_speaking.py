"""Speech of the model to verify: greedy or sampled, alone, in a batch, or with an adapter in some of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from myna.checks.verify_subject import VerifiedModel
from myna.data.codec import Codec, Codes, Samples
from myna.models.base import AdapterSlots, AnsweringFamily, LoraMatrices, RenderedSequence, Sampling
from myna.speak.scheduler import SPARE_POSITIONS, BatchScheduler, Generation, request_sampling
from myna.speak.streaming import CodeStream, decode_streams

GREEDY = Sampling(temperature=0.0, repetition_window=0)


@dataclass(frozen=True, slots=True, eq=False)
class GreedyChoices:
    """Greedy choices of ours for one prompt, as in `TransformersGeneration`."""

    choices: npt.NDArray[np.int64]
    """(frames or tokens, codebooks or 1), without the end."""
    stopped: bool
    """Whether the end was found; it is the choice after the last."""


@dataclass(frozen=True, slots=True, eq=False)
class SpokenCodes:
    """Codes of one prompt, with what the scheduler knows of them."""

    codes: Codes
    log_probs: npt.NDArray[np.float32]
    """(frames + 1, codebooks): of the codes, and of the ends."""
    steps: npt.NDArray[np.int64]
    """(frames, codebooks): the step at which each code was chosen."""
    stopped: bool

    @property
    def choices(self) -> GreedyChoices:
        return GreedyChoices(self.codes.astype(np.int64), self.stopped)


def greedy_choices(subject: VerifiedModel) -> list[GreedyChoices]:
    """Of each prompt by itself."""
    if isinstance(subject.family, AnsweringFamily):
        answers = [subject.family.greedy_ids(subject.model, prompt, subject.frames) for prompt in subject.prompts]
        return [GreedyChoices(np.array(ids, np.int64).reshape(-1, 1), stopped) for ids, stopped in answers]
    return [
        one.choices
        for prompt in subject.prompts
        for one in speak_together(subject, [prompt], [subject.frames], 1, sampling=GREEDY)
    ]


def adapter_choices(subject: VerifiedModel, matrices: LoraMatrices) -> list[GreedyChoices]:
    """Of each prompt with an adapter in a slot beside the base model, in a batch whose every second row has none."""
    family, _ = subject.speaking
    slots = family.adapter_slots(subject.model, 1, max(len(a) for a, _ in matrices.values()))
    slots.load("adapter", matrices)
    prompts = [prompt for prompt in subject.prompts for _ in range(2)]
    caps, names = [subject.frames] * len(prompts), ["adapter", ""] * len(subject.prompts)
    rows = speak_together(subject, prompts, caps, len(prompts), sampling=GREEDY, slots=slots, adapters=names)
    return [one.choices for one in rows[::2]]


def speak_together(
    subject: VerifiedModel,
    prompts: Sequence[RenderedSequence],
    caps: Sequence[int],
    rows: int,
    max_frames: int = 0,
    sampling: Sampling | None = None,
    slots: AdapterSlots | None = None,
    adapters: Sequence[str] = (),
) -> list[SpokenCodes]:
    """Prompts in one batch of so many rows, with room for `max_frames`; each with its adapter, if any are named."""
    family, _ = subject.speaking
    positions = max(map(len, subject.prompts)) + max(*caps, max_frames) + SPARE_POSITIONS
    decoder = family.speech_decoder(subject.model, rows, positions, slots, exact=subject.is_exact)
    scheduler = BatchScheduler(decoder)
    generations = [
        scheduler.submit(prompt, sampling or request_sampling(family.sampling, prompt.id), cap, adapter)
        for prompt, cap, adapter in zip(prompts, caps, adapters or [""] * len(prompts), strict=True)
    ]
    while scheduler.busy:
        scheduler.advance()
    return [_spoken(scheduler, generation) for generation in generations]


def _spoken(scheduler: BatchScheduler, generation: Generation) -> SpokenCodes:
    codes = generation.codes()
    frames, books = codes.shape
    # The delay undone on the numbers of the steps themselves.
    numbered = [np.full(books, step) for step in range(frames + books)]
    steps = scheduler.decoder.undelay(numbered, 0, frames)
    return SpokenCodes(codes, generation.log_probs(), steps, generation.finish_reason == "stop")


def decode_together(codec: Codec, spoken: Sequence[SpokenCodes], piece: int = 9) -> list[Samples]:
    """Samples of clips whose frames come a few at a time, the windows of all clips in one call."""
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
