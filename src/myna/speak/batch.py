"""The batch loop: requests come and go at any time and are spoken together, step by step.

A long text is spoken in segments, one after another: each continues the conversation of those before it. The codes of
all segments are one clip to the codec. Its decoder joins them as it joins any two frames, so a boundary has no click,
and the pause there is what the model has spoken at the end of one segment and the beginning of the next.
"""

from __future__ import annotations

import heapq
import itertools
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from queue import Empty, SimpleQueue
from textwrap import shorten
from typing import TYPE_CHECKING

import numpy as np

from myna.audio.files import join_samples
from myna.core.errors import MynaError
from myna.data.codec import Codes, PendingSamples, Samples
from myna.data.conversation import Reference
from myna.models.base import RenderedSequence, Sampling
from myna.provenance.watermark import StreamWatermark, mark_streams
from myna.speak.request import FinishReason, SpeechRequest
from myna.speak.scheduler import SPARE_POSITIONS, BatchScheduler, Generation, request_sampling
from myna.speak.streaming import CodeStream, TempoFilter, decode_streams, warm_up

if TYPE_CHECKING:
    from myna.speak.engine import Engine

MAX_CONTEXT_SECONDS = 20.0
"""Maximum seconds of earlier segments in a prompt; segments beyond it are left out."""
LEAD_SECONDS = 1.0
"""Seconds that a listener must still have to play for other requests to be decoded first."""
SHORT_LEAD_SECONDS = 0.25
"""Seconds left to play below which a listener is nearly out of speech: only one waiting request is then started in a
step."""
FRAME_SECONDS = 0.02
"""Upper bound in seconds for generating one frame. Half of the 40 ms playback time is left for the codec."""
FEW_REQUESTS, HOLD_SECONDS = 4, 0.1
"""Few requests, and seconds to spare. With at most FEW_REQUESTS requests, a request with more than HOLD_SECONDS to
spare skips steps while another has little or no audio: few slots are stepped faster than many."""
CROWD_REQUESTS, CROWD_HOLD_SECONDS = 128, (0.5, 1.5)
"""Maximum number of requests stepped at a time if there are more than FEW_REQUESTS, which gives nearly as much speech
in less time. A request skips steps once it has more than the second number of seconds to spare, until it has less than
the first."""
START_SECONDS = ((64, 150, 1.0), (16, 100, 0.2))
"""(requests running, listeners, seconds): with at least that many, hold back the first audio until this many seconds
are ready, or its second window might be late. Listeners count because they soon ask for the next text."""

SpokenSegment = tuple[str, Codes]
"""Text and codes of an earlier segment."""


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
    least_frames: tuple[int, ...]
    """Frames that each segment must have room for. Earlier segments that would take this room are left out of its
    prompt."""
    pauses: tuple[int, ...]
    """Frames of silence after each segment."""
    prompt: RenderedSequence
    """Prompt of the first segment. Takes of one request share it, and its prefill."""
    max_positions: int
    """Upper bound for the longest prompt and its frames."""

    def tight(self) -> SpeechPlan:
        """Return the plan with only the positions that its frame budget needs. A plan of several segments stays as it
        is."""
        if len(self.segments) > 1:
            return self
        return replace(self, max_positions=len(self.prompt) + self.max_frames[0] + SPARE_POSITIONS)

    def take(self, number: int) -> SpeechPlan:
        """Return the same plan with another seed. Take 0 is the plan itself."""
        sampling = replace(self.sampling, seed=self.sampling.seed + number)
        return replace(self, request=self.request.take(number), sampling=sampling)


class RunningRequest:
    """One request in the batch: its segments, its codes, and its samples as they are decoded. A prompt holds the
    references and the last segment before it. Without a reference it holds the first segment too, which then sets the
    voice. A segment that failed is in no prompt."""

    def __init__(
        self,
        engine: Engine,
        plan: SpeechPlan,
        *,
        id: str = "",
        streamed: bool = True,
        watermark: StreamWatermark | None = None,
    ) -> None:
        self.plan, self.id, self.watermark = plan, id, watermark
        self.windows = CodeStream(engine.codec) if streamed else None
        """Codes that are not decoded yet; None if only the codes are wanted."""
        self.warnings: list[str] = []
        """Segments that failed, in words."""
        self.error: MynaError | None = None
        self.ended = False
        """Whether no more codes and samples come."""
        self.playback_ends: float | None = None
        """Time at which a client that plays at once has played all that it was given."""
        self._engine, self._codec = engine, engine.codec
        speed = plan.request.speed
        self._tempo = TempoFilter(speed, engine.codec.sample_rate) if streamed and speed != 1.0 else None
        self._scheduler: BatchScheduler | None = None
        self._adapter: str | int = plan.request.adapter
        """Name of its adapter, then its slot."""
        self._finished: list[Codes] = []
        self._context: list[SpokenSegment] = []
        """The first segment that succeeded, and the last."""
        self._was_cut = self.cancelled = False
        self._current: Generation | None = None
        self.samples: list[Samples] = []
        """Samples that `take_samples` has not returned yet."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why the codes ended: `length` if any segment was cut; None before the end, and after an error."""
        if self.cancelled:
            return None if self.error is not None else "cancelled"
        return None if self._current is not None or self._scheduler is None else "length" if self._was_cut else "stop"

    @property
    def generated(self) -> bool:
        """Whether all codes were generated."""
        return self.cancelled or (self._current is None and self._scheduler is not None)

    @property
    def decoded(self) -> bool:
        """Whether the codec was given the last window."""
        return self.windows is not None and self.windows.finished

    @property
    def held(self) -> bool:
        """Whether steps may leave this request out."""
        return self._current is not None and self._current.held

    @held.setter
    def held(self, held: bool) -> None:
        if self._current is not None:
            self._current.held = held

    @property
    def frames(self) -> int:
        """Number of whole frames so far."""
        return sum(map(len, self._finished)) + (self._current.frames if self._current is not None else 0)

    def codes(self, start: int = 0) -> Codes:
        """Return the whole frames from `start` on, shape (frames, codebooks)."""
        parts: list[Codes] = [np.zeros((0, self._codec.codebooks), np.uint16)]
        for codes in self._finished:
            parts.append(codes[start:])
            start = max(0, start - len(codes))
        if self._current is not None:
            parts.append(self._current.codes(start))
        return np.concatenate(parts)

    def take_samples(self) -> Samples:
        """Return the samples that have come since the last call."""
        taken, self.samples = self.samples, []
        return join_samples(taken)

    # For the batch.

    def begin(self, scheduler: BatchScheduler) -> None:
        """Submit the first segment."""
        self._scheduler = scheduler
        self._current = self._submit(self.plan.prompt)

    def follow(self) -> None:
        """Submit the next segment, if one has ended. Call it after every step that ended a generation."""
        if self._current is None or not self._current.finished:
            return
        if self._current.error is not None:
            raise self._current.error
        codes, reason = self._current.codes(), self._current.finish_reason
        text = self.plan.segments[len(self._finished)]
        seconds, quoted = len(codes) / self._codec.frame_rate, f'"{shorten(text, 60, placeholder=" ...")}"'
        if reason == "length":
            self._was_cut = True
            self.warnings.append(f"cut after {seconds:.1f} s without finding its end: {quoted}")
        elif not len(codes):
            self.warnings.append(f"ended at once, nothing was said: {quoted}")
        else:
            self._context = [*self._context[:1], (text, codes)]
        pause = self._engine.silence(self.plan.pauses[len(self._finished)])
        self._finished.append(np.concatenate([codes, pause]))
        self._current = None
        if len(self._finished) < len(self.plan.segments):
            self._current = self._submit(self._next_prompt())

    def cancel(self, error: MynaError | None = None) -> None:
        """Give the slot back with the next step."""
        self.cancelled, self.error = True, error
        if self._current is not None:
            self._current.cancel()
            self._finished.append(self._current.codes())
            self._current = None

    def lead(self, now: float) -> float:
        """Return the seconds of speech that its listener has not heard yet; 0 before the first sound."""
        return self.playback_ends - now if self.playback_ends is not None else 0.0

    def spare_seconds(self, now: float) -> float:
        """Return the seconds it could wait and still have its next window in time; 0 before its first sound."""
        if self.playback_ends is None or self.windows is None:
            return 0.0
        ready, missing = self.windows.outlook(self.frames)
        return self.lead(now) + ready / self._codec.frame_rate - missing * FRAME_SECONDS

    def at_tempo(self, samples: Samples) -> Samples:
        """Return the next samples at the tempo of the request."""
        return samples if self._tempo is None else self._tempo.push(samples, last=self.decoded)

    def _submit(self, prompt: RenderedSequence) -> Generation:
        assert self._scheduler is not None
        number, plan = len(self._finished), self.plan
        sampling = request_sampling(plan.sampling, f"{prompt.id}/{number}" if number else prompt.id)
        frames = max(min(plan.max_frames[number], self._scheduler.room(prompt)), plan.least_frames[number])
        generation = self._scheduler.submit(prompt, sampling, frames, self._adapter, plan.request.strength)
        self._adapter = generation.slot  # keep the slot, even if the adapter loses its name
        return generation

    def _next_prompt(self) -> RenderedSequence:
        assert self._scheduler is not None
        number, plan = len(self._finished), self.plan
        context = tuple(self._context[-1:] if plan.references else self._context)
        limit = MAX_CONTEXT_SECONDS * self._codec.frame_rate
        while True:
            prompt = self._engine.render(plan.request, plan.references, plan.segments[number], context)
            fits = self._scheduler.room(prompt) >= plan.least_frames[number]
            if not context or (fits and sum(len(codes) for _, codes in context) <= limit):
                return prompt
            context = context[1:]


class SpeechBatch:
    """The running batch of an engine: the one loop that drives the scheduler and the codec.

    Requests wait for a free slot (`submit`, from any thread). `step` advances all that have one by one frame. The
    samples of a streamed request are those of its finished clip, bit for bit, whatever else is in the batch.

    A `paced` batch serves listeners: it holds back what is well ahead of its playback, and lets the codec run beside
    the steps. Otherwise every window is decoded as soon as its frames are there.
    """

    def __init__(
        self,
        engine: Engine,
        slots: int,
        positions: int,
        *,
        paced: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine: Engine = weakref.proxy(engine)  # which keeps its batch, and must be freed with its last user
        self._codec, self._paced, self._clock = engine.codec, paced, clock
        with engine.computing():
            loaded = engine.adapter_slots
            decoder = engine.family.speech_decoder(engine.model, slots, positions, loaded, exact=engine.exact)
        self.scheduler = BatchScheduler(decoder)
        self._inbox: SimpleQueue[tuple[int, int, RunningRequest] | RunningRequest] = SimpleQueue()
        """Requests that were submitted, or cancelled, since the last step."""
        self._queue: list[tuple[int, int, RunningRequest]] = []
        """Heap of priority, place and request."""
        self._running: list[RunningRequest] = []
        self._held: list[RunningRequest] = []
        self._unsent: dict[RunningRequest, Samples] = {}
        """First samples in a crowd, held back until there are enough."""
        self._played_until: list[float] = []
        """Heap of the times at which completed requests will have been played to their end."""
        self._decoding: tuple[list[RunningRequest], PendingSamples] | None = None
        self._news: list[RunningRequest] = []
        self._places = itertools.count()

    @property
    def slots(self) -> int:
        """Number of requests that are spoken at a time."""
        return self.scheduler.decoder.rows

    @property
    def positions(self) -> int:
        """Number of positions of a slot, for a prompt and its frames."""
        return self.scheduler.decoder.max_positions

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._queue or self._running or self.scheduler.busy or not self._inbox.empty())

    @property
    def speaking(self) -> int:
        """Number of requests that have a slot."""
        return sum(not running.generated for running in self._running)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._queue)

    def fits(self, prompt: RenderedSequence, frames: int) -> bool:
        """Return whether a prompt and its frames find room in a slot."""
        return self.scheduler.room(prompt) >= frames

    def warm_up(self) -> None:
        """Let model and codec compile, capture and probe what they need."""
        with self._engine.computing():
            self.scheduler.decoder.warm_up()
            warm_up(self._codec, self.slots)

    def reserve(self) -> int:
        """Return the next place in the queue, for a request that has no plan yet."""
        return next(self._places)

    def submit(
        self,
        plan: SpeechPlan,
        *,
        id: str = "",
        watermark: StreamWatermark | None = None,
        place: int | None = None,
        streamed: bool = True,
    ) -> RunningRequest:
        """Queue a request. A lower priority comes first, then a lower place. Its failure ends this request alone. With
        `streamed` off only its codes are generated."""
        running = RunningRequest(self._engine, plan, id=id, watermark=watermark, streamed=streamed)
        self._inbox.put((plan.request.priority, self.reserve() if place is None else place, running))
        return running

    def cancel(self, running: RunningRequest) -> None:
        """End a request; its slot is free with the next step. An ended request stays as it is."""
        if not running.ended:
            running.cancel()
            self._inbox.put(running)

    def release(self) -> None:
        """Free ended requests without a step: an adapter may be unloaded before the next one."""
        with self._engine.computing():
            self.scheduler.release_finished()

    def step(self) -> list[RunningRequest]:
        """Advance all requests by one frame. Return those with new samples, and those that have ended."""
        self._read_inbox()
        self._let_in()
        if self._paced:
            self._hold()
        if self.scheduler.busy:
            with self._engine.computing():
                has_ended = self.scheduler.advance()
            if has_ended:
                self._follow()
        # If the host does not wait for steps, it does not wait for the codec either: the next step is enqueued first.
        is_behind = self._paced and self.scheduler.decoder.steps_ahead > 0
        if is_behind:
            self._fetch()
        self._decode()
        if not is_behind or not self.scheduler.busy:
            self._fetch()
        news, self._news = self._news, []
        return news

    def _end(self, running: RunningRequest) -> None:
        running.ended = True
        self._unsent.pop(running, None)
        self._news.append(running)

    def _read_inbox(self) -> None:
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            if isinstance(message, tuple):
                heapq.heappush(self._queue, message)
            elif not message.ended:  # cancelled
                if message in self._running:
                    self._running.remove(message)
                else:
                    self._queue = [one for one in self._queue if one[2] is not message]
                    heapq.heapify(self._queue)
                self._end(message)

    def _let_in(self) -> None:
        """Give free slots to requests that wait; one a step while a listener has little left to hear."""
        if not self._queue:
            return
        now = self._clock()
        leads = [running.lead(now) for running in self._running if running.playback_ends is not None]
        allowed = 1 if min(leads, default=LEAD_SECONDS) < SHORT_LEAD_SECONDS else self.slots
        while self._queue and self.speaking < self.slots and allowed:
            allowed -= 1
            running = heapq.heappop(self._queue)[2]
            try:
                running.begin(self.scheduler)
            except MynaError as error:
                running.cancel(error)
                self._end(running)
                continue
            self._running.append(running)

    def _hold(self) -> None:
        """Leave requests that are well ahead of their playback out of the next step, while another has made no sound
        yet or has a short lead. While requests wait for a slot, all go on to the end."""
        now, spoken = self._clock(), [running for running in self._running if not running.generated]
        has_room = len(spoken) < self.slots or not self._queue
        allowed = len(spoken) - (1 if len(spoken) <= FEW_REQUESTS else CROWD_REQUESTS) if has_room else 0
        ahead: list[tuple[bool, float, RunningRequest]] = []
        if allowed > 0 and any(running.lead(now) < SHORT_LEAD_SECONDS for running in spoken):
            least, most = (HOLD_SECONDS, HOLD_SECONDS) if len(spoken) <= FEW_REQUESTS else CROWD_HOLD_SECONDS
            for running in spoken:
                held, spare = running.held, running.spare_seconds(now)
                if spare > (least if held else most):
                    ahead.append((not held, -spare, running))
            # Held requests stay held for a while, because holding another one moves slots.
            ahead.sort(key=itemgetter(0, 1))
        for running in self._held:
            running.held = False
        self._held = [running for _, _, running in ahead[:allowed]]
        for running in self._held:
            running.held = True

    def _follow(self) -> None:
        """Continue with the next segments of texts, if one has ended."""
        for running in [running for running in self._running if not running.generated]:
            try:
                running.follow()
            except MynaError as error:  # it does not fit
                running.cancel(error)
            if running.error is not None or (running.generated and running.windows is None):
                self._running.remove(running)
                self._end(running)

    def _decode(self) -> None:
        """Start decoding all windows that are complete, unless their listeners have enough to hear. Frames are only
        passed on when they complete a window: most requests need nothing in most steps."""
        now, due, streams = self._clock(), list[RunningRequest](), list[CodeStream]()
        for running in self._running:
            windows, generated = running.windows, running.generated
            if windows is None or (not generated and running.lead(now) >= LEAD_SECONDS):
                continue
            frames = running.frames
            if not generated and frames < windows.next_frames:
                continue
            if frames > windows.frames:
                windows.push(running.codes(windows.frames))
            if generated:
                windows.end()
            due.append(running)
            streams.append(windows)
        if due:
            with self._engine.threads():
                self._decoding = due, decode_streams(self._codec, streams)

    def _fetch(self) -> None:
        """Give out the samples that were being decoded."""
        if self._decoding is None:
            return
        requests, pending = self._decoding
        self._decoding = None
        with self._engine.threads():  # the watermark also computes too little at a time for several threads
            decoded = [
                (running, running.at_tempo(samples))
                for running, samples in zip(requests, pending(), strict=True)
                if not running.cancelled
            ]
            marks = [running.watermark for running, _ in decoded if running.watermark is not None]
            for running, samples in decoded:
                if running.watermark is not None:
                    running.watermark.add(samples, last=running.decoded)
            marked = iter(mark_streams(marks))
        for running, samples in decoded:
            self._give_out(running, samples if running.watermark is None else next(marked))

    def _give_out(self, running: RunningRequest, samples: Samples) -> None:
        """Give out samples of a request; in a crowd, the first ones only when there are enough of them."""
        if running in self._unsent:
            samples = np.concatenate([self._unsent.pop(running), samples])
        if self._paced:
            now, rate = self._clock(), self._codec.sample_rate
            is_early = running.playback_ends is None and len(samples) < self._start_seconds(now) * rate
            if is_early and not running.decoded:
                self._unsent[running] = samples
                return
            if len(samples):
                start = running.playback_ends if running.playback_ends is not None else now
                running.playback_ends = start + len(samples) / rate
        if len(samples):
            running.samples.append(samples)
        if running.decoded:
            self._running.remove(running)
            if running.playback_ends is not None:
                heapq.heappush(self._played_until, running.playback_ends)
            self._end(running)
        elif len(samples):
            self._news.append(running)

    def _start_seconds(self, now: float) -> float:
        """Return the minimum seconds of speech with which a request begins."""
        while self._played_until and self._played_until[0] <= now:
            heapq.heappop(self._played_until)
        spoken = len(self._running)
        listening = spoken + len(self._played_until)
        enough = (seconds for many, crowd, seconds in START_SECONDS if spoken >= many or listening >= crowd)
        return next(enough, 0.0)
