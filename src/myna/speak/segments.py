"""Segments of a long text, generated one after another: each continues the conversation of those before it.

The codes of all segments are one clip to the codec. Its decoder joins them as it joins any two frames, so a boundary
has no click, and the pause there is what the model has spoken at the end of one segment and the beginning of the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from textwrap import shorten

import numpy as np

from myna.data.codec import Codes
from myna.data.conversation import Reference
from myna.models.base import RenderedSequence, Sampling
from myna.speak.request import SpeechRequest
from myna.speak.scheduler import BatchScheduler, FinishReason, Generation, request_sampling

MAX_CONTEXT_SECONDS = 20.0
"""Of earlier segments in a prompt; what is longer is left out."""

SpokenSegment = tuple[str, Codes]
"""Text and codes of an earlier segment."""
SegmentRenderer = Callable[[SpeechRequest, tuple[Reference, ...], str, tuple[SpokenSegment, ...]], RenderedSequence]
"""Function that renders the prompt of a segment: request, references, the segment's text, and segments before it."""


@dataclass(frozen=True, slots=True, eq=False)
class SpeechPlan:
    """A request as it will be spoken: its segments, and the frames that each may take."""

    request: SpeechRequest
    references: tuple[Reference, ...]
    """Encoded references of the request."""
    sampling: Sampling
    """Complete settings: those of the request, else those of the model."""
    segments: tuple[str, ...]
    max_frames: tuple[int, ...]
    prompt: RenderedSequence
    """Of the first segment. Takes of one request share it, and its prefill."""
    max_positions: int
    """What the longest prompt and its frames may take."""

    def take(self, number: int) -> SpeechPlan:
        """Return the same plan with another seed. Take 0 is the plan itself."""
        sampling = replace(self.sampling, seed=self.sampling.seed + number)
        return replace(self, request=self.request.take(number), sampling=sampling)


class SegmentedGeneration:
    """One request in the batch, segment by segment.

    A prompt holds the references and the last segment before it; where there is no reference, the first segment too,
    which then is the voice of the text. A segment that failed is in no prompt.
    """

    def __init__(self, plan: SpeechPlan, scheduler: BatchScheduler, render: SegmentRenderer, frame_rate: float) -> None:
        self.plan = plan
        self.warnings: list[str] = []
        """Segments that failed, in words."""
        self._scheduler, self._render, self._frame_rate = scheduler, render, frame_rate
        self._finished: list[Codes] = []
        self._context: list[SpokenSegment] = []
        """The first segment that succeeded, and the last."""
        self._was_cut = self._cancelled = False
        self._current: Generation | None = self._submit(plan.prompt)

    @property
    def finish_reason(self) -> FinishReason | None:
        """`length` where any segment was cut."""
        if self._cancelled:
            return "cancelled"
        return None if self._current is not None else "length" if self._was_cut else "stop"

    @property
    def frames(self) -> int:
        """Whole frames that are here."""
        return sum(map(len, self._finished)) + (self._current.frames if self._current is not None else 0)

    def codes(self, start: int = 0) -> Codes:
        """(frames, codebooks): the whole frames from `start` on."""
        parts = []
        for codes in self._finished:
            parts.append(codes[start:])
            start = max(0, start - len(codes))
        if self._current is not None:
            parts.append(self._current.codes(start))
        return np.concatenate(parts)

    def follow(self) -> None:
        """Where a segment has ended since, submit the next. To be called after every step of the scheduler."""
        if self._current is None or not self._current.finished:
            return
        codes, reason = self._current.codes(), self._current.finish_reason
        text = self.plan.segments[len(self._finished)]
        seconds, quoted = len(codes) / self._frame_rate, f'"{shorten(text, 60, placeholder=" ...")}"'
        if reason == "length":
            self._was_cut = True
            self.warnings.append(f"cut after {seconds:.1f} s, where it had found no end: {quoted}")
        elif not len(codes):
            self.warnings.append(f"ended at once, nothing was said: {quoted}")
        else:
            self._context = [*self._context[:1], (text, codes)]
        self._finished.append(codes)
        self._current = None
        if len(self._finished) < len(self.plan.segments):
            self._current = self._submit(self._next_prompt())

    def hold(self, held: bool) -> None:
        """Let steps leave it out, or no longer."""
        if self._current is not None:
            self._current.held = held

    def cancel(self) -> None:
        """Give the row back with the next step."""
        if self._current is not None:
            self._current.cancel()
            self._finished.append(self._current.codes())
            self._current, self._cancelled = None, True

    def _submit(self, prompt: RenderedSequence) -> Generation:
        number, plan = len(self._finished), self.plan
        sampling = request_sampling(plan.sampling, f"{prompt.id}/{number}" if number else prompt.id)
        request = plan.request
        return self._scheduler.submit(prompt, sampling, plan.max_frames[number], request.adapter, request.strength)

    def _next_prompt(self) -> RenderedSequence:
        number, plan = len(self._finished), self.plan
        context = tuple(self._context[-1:] if plan.references else self._context)
        decoder, limit = self._scheduler.decoder, MAX_CONTEXT_SECONDS * self._frame_rate
        while True:
            prompt = self._render(plan.request, plan.references, plan.segments[number], context)
            fits = decoder.positions(prompt, plan.max_frames[number]) <= decoder.max_positions
            if not context or (fits and sum(len(codes) for _, codes in context) <= limit):
                return prompt
            context = context[1:]
