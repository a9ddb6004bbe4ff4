"""Running batch: streams that come and go at any time, decoded together step by step."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from queue import Empty, SimpleQueue
from threading import Lock
from typing import NamedTuple, Protocol

import numpy as np

from myna.core.errors import MynaError, SpeakError
from myna.data.codec import Codes, PendingSamples, Samples
from myna.models.base import RenderedSequence
from myna.provenance.watermark import StreamWatermark, mark_streams
from myna.speak.engine import Engine
from myna.speak.scheduler import BatchScheduler, FinishReason
from myna.speak.segments import SegmentedGeneration, SpeechPlan
from myna.speak.streaming import CodeStream, decode_streams, warm_up

LEAD_SECONDS = 1.0
"""A stream that is further ahead of its playback than this leaves the codec to the others."""
SHORT_LEAD_SECONDS = 0.25
"""While a stream is no further ahead than this, at most one prompt is let in a step."""
FRAME_SECONDS = 0.02
"""That a frame may take to be generated, at the worst: half of its playback is for the codec and the rest."""
FEW_STREAMS, HOLD_SECONDS = 4, 0.1
"""Among no more streams than this, one with more time to spare is left out of steps while another has made no sound yet
or has a short lead: few rows are stepped sooner than many. Of more, those that wait would soon be too many."""
CROWD_STREAMS, CROWD_HOLD_SECONDS = 128, (0.5, 1.5)
"""Of more streams than this, so many are stepped then: that is nearly as much speech in less time. One with more than
the second to spare is left out until it has less than the first."""
START_SECONDS = ((64, 150, 1.0), (16, 100, 0.2))
"""Where so many are spoken, or so many listen, a stream begins with this much: its second window might be late. Who
listens asks again: of so many, few may be spoken at the moment, and many at the next."""


class QueueFullError(SpeakError):
    """As many requests are spoken and waiting as are allowed."""


class SampleFilter(Protocol):
    """What is done to the samples of one stream before they are marked and given out: a change of tempo."""

    def push(self, samples: Samples, /) -> Samples:
        """The next samples in, those that are ready out."""

    def finish(self) -> Samples:
        """The last ones."""


class StreamEnd(NamedTuple):
    """How a stream ended."""

    finish_reason: FinishReason | None
    """None where an error ended it."""
    warnings: tuple[str, ...]
    codes: Codes
    """(frames, codebooks): all that was generated."""
    prompt_tokens: int
    error: MynaError | None = None


class StreamEvent(NamedTuple):
    """What a step has brought for a stream: samples, the end, or both."""

    id: str
    samples: Samples
    end: StreamEnd | None = None


@dataclass(eq=False)
class _Stream:
    id: str
    plan: SpeechPlan
    filters: Sequence[SampleFilter]
    watermark: StreamWatermark | None
    generation: SegmentedGeneration | None = None
    code_stream: CodeStream | None = None
    playback_ends: float | None = None
    """When a client that plays from the first sample on has played all that it was given."""
    generated: bool = False
    """Whether all of its codes are here."""
    held: bool = False
    cancelled: bool = False
    unsent: Samples = field(default_factory=lambda: np.zeros(0, np.float32))
    """First samples, which are not given out before there are more."""

    def lead(self, now: float) -> float:
        """Seconds that it is ahead of its playback; what was not heard yet has none to lose."""
        return self.playback_ends - now if self.playback_ends is not None else 0.0

    def hold(self, held: bool) -> None:
        """Let steps leave it out, or no longer."""
        self.held = held
        assert self.generation is not None
        self.generation.hold(held)

    def spare_seconds(self, now: float, frame_rate: float) -> float:
        """How long it could wait and still have its next window in time; 0 before its first sound."""
        if self.playback_ends is None or self.generation is None:
            return 0.0
        ready, missing = _code_stream(self).outlook(self.generation.frames)
        return self.lead(now) + ready / frame_rate - missing * FRAME_SECONDS

    def filtered(self, samples: Samples, *, last: bool) -> Samples:
        """Samples through the filters, one after another; `last` flushes each into the next."""
        for one in self.filters:
            samples = one.push(samples)
            if last:
                samples = np.concatenate([samples, one.finish()])
        return samples


@dataclass(order=True)
class _Waiting:
    priority: int
    number: int
    stream: _Stream = field(compare=False)


class LiveBatch:
    """Continuously running batch of an engine, with a bounded queue in front of it.

    `submit` and `cancel` may be called from any thread, `step` from one. All that the streams need is allocated at the
    start: `rows` streams are spoken at a time, with prompts and frames of at most `positions` together, and with an
    `adapter_rank` room for adapters up to that rank. The samples of a stream are those of `Engine.speak_plans`, bit for
    bit, whatever else is in the batch.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        rows: int,
        positions: int,
        max_waiting: int,
        adapter_rank: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._clock = engine, clock
        self.rows, self.max_waiting = rows, max_waiting
        with engine._computing():
            if adapter_rank is not None and engine._adapter_slots is None:
                engine._adapter_slots = engine.family.adapter_slots(engine.model, engine.max_adapters, adapter_rank)
            self._scheduler = BatchScheduler(
                engine.family.speech_decoder(engine.model, rows, positions, engine._adapter_slots, exact=engine.exact)
            )
            self._scheduler.decoder.warm_up()
            warm_up(engine.codec, rows)
        self._inbox: SimpleQueue[_Waiting | str] = SimpleQueue()
        self._queue: list[_Waiting] = []
        self._streams: list[_Stream] = []
        self._held: list[_Stream] = []
        self._played_until: list[float] = []
        """A heap: when the playback of streams that were given out to their end is over."""
        self._decoding: tuple[list[_Stream], PendingSamples] | None = None
        self._numbers, self._lock, self._open = itertools.count(), Lock(), 0

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._queue or self._streams or self._scheduler.busy or not self._inbox.empty())

    @property
    def speaking(self) -> int:
        """Streams that have a row."""
        return sum(not stream.generated for stream in self._streams)

    @property
    def waiting(self) -> int:
        """Requests that have none yet."""
        return len(self._queue)

    def fits(self, prompt: RenderedSequence, max_frames: int) -> bool:
        """Whether a prompt and its frames find room in a row."""
        decoder = self._scheduler.decoder
        return decoder.positions(prompt, max_frames) <= decoder.max_positions

    def submit(
        self,
        id: str,
        plan: SpeechPlan,
        *,
        filters: Sequence[SampleFilter] = (),
        watermark: StreamWatermark | None = None,
        priority: int = 0,
        place: int | None = None,
    ) -> None:
        """Queue a request under an id of its own; a lower `priority` comes first, then whoever came first, or has the
        lower `place`. Its samples go through the filters, and are marked last."""
        number = self.reserve() if place is None else place
        self._inbox.put(_Waiting(priority, number, _Stream(id, plan, filters, watermark)))

    def reserve(self) -> int:
        """A place in the queue for a request that has no plan yet; it is submitted with it, or gives it back."""
        with self._lock:
            if self._open >= self.rows + self.max_waiting:
                raise QueueFullError(
                    f"{self._open} requests are spoken or waiting, and no more are taken", hint="try again in a moment"
                )
            self._open += 1
            return next(self._numbers)

    def give_back(self, places: int = 1) -> None:
        """Free places of requests that have ended, or are not submitted after all."""
        with self._lock:
            self._open -= places

    def cancel(self, id: str) -> None:
        """End a request; its row is free with the next step. One that has ended is no concern."""
        self._inbox.put(id)

    def step(self) -> list[StreamEvent]:
        """Advance all streams by one frame; what that has brought."""
        events = self._read_inbox() + self._let_in()
        self._hold()
        if self._scheduler.busy:
            with self._engine._computing():
                has_ended = self._scheduler.advance()
            if has_ended:
                events += self._follow()
        # Where steps run behind the host, so does the codec: the next step is enqueued before its samples are awaited.
        is_behind = self._scheduler.decoder.steps_ahead > 0
        if is_behind:
            events += self._fetch()
        self._decode()
        if not is_behind or not self._scheduler.busy:
            events += self._fetch()
        self.give_back(sum(event.end is not None for event in events))
        return events

    def _read_inbox(self) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return events
            if isinstance(message, _Waiting):
                heapq.heappush(self._queue, message)
                continue
            for waiting in [one for one in self._queue if one.stream.id == message]:
                self._queue.remove(waiting)
                heapq.heapify(self._queue)
                events.append(self._cancelled(waiting.stream))
            for stream in [one for one in self._streams if one.id == message]:
                self._streams.remove(stream)
                events.append(self._cancelled(stream))

    def _cancelled(self, stream: _Stream) -> StreamEvent:
        stream.cancelled = True
        if stream.generation is not None:
            stream.generation.cancel()
        return self._end(stream, "cancelled")

    def _let_in(self) -> list[StreamEvent]:
        """Give free rows to those that wait; one a step while a stream is about to run dry."""
        events: list[StreamEvent] = []
        if not self._queue:
            return events
        now = self._clock()
        leads = [stream.lead(now) for stream in self._streams if stream.playback_ends is not None]
        allowed = 1 if min(leads, default=LEAD_SECONDS) < SHORT_LEAD_SECONDS else self.rows
        while self._queue and self.speaking < self.rows and allowed:
            allowed -= 1
            stream = heapq.heappop(self._queue).stream
            try:
                stream.generation = self._engine._begin(stream.plan, self._scheduler)
            except MynaError as error:
                events.append(self._end(stream, None, error))
                continue
            stream.code_stream = CodeStream(self._engine.codec)
            self._streams.append(stream)
        return events

    def _hold(self) -> None:
        """Leave out of the next step what is well ahead of its playback, while another has made no sound yet or is
        about to run dry. Where others wait for a row, all go on to the end."""
        now, spoken = self._clock(), [stream for stream in self._streams if not stream.generated]
        has_room = len(spoken) < self.rows or not self._queue
        allowed = len(spoken) - (1 if len(spoken) <= FEW_STREAMS else CROWD_STREAMS) if has_room else 0
        ahead: list[tuple[bool, float, _Stream]] = []
        if allowed > 0 and any(stream.lead(now) < SHORT_LEAD_SECONDS for stream in spoken):
            rate = self._engine.codec.frame_rate
            least, most = (HOLD_SECONDS, HOLD_SECONDS) if len(spoken) <= FEW_STREAMS else CROWD_HOLD_SECONDS
            for stream in spoken:
                spare = stream.spare_seconds(now, rate)
                if spare > (least if stream.held else most):
                    ahead.append((not stream.held, -spare, stream))
            # Those that were held stay so for a while: to hold another means to move rows.
            ahead.sort(key=itemgetter(0, 1))
        for stream in self._held:
            stream.hold(False)
        self._held = [stream for _, _, stream in ahead[:allowed]]
        for stream in self._held:
            stream.hold(True)

    def _follow(self) -> list[StreamEvent]:
        """Go on with the next segments of streams, where one has ended."""
        events: list[StreamEvent] = []
        for stream in [stream for stream in self._streams if not stream.generated]:
            assert stream.generation is not None
            try:
                stream.generation.follow()
            except MynaError as error:  # it does not fit
                self._streams.remove(stream)
                stream.generation.cancel()
                stream.cancelled = True
                events.append(self._end(stream, None, error))
            stream.generated = stream.generation.finish_reason is not None
        return events

    def _decode(self) -> None:
        """Start decoding the windows of all streams that are due and have one. Frames are only passed on where they
        make a window: most streams need nothing in most steps."""
        now, due = self._clock(), list[_Stream]()
        for stream in self._streams:
            if not stream.generated and stream.lead(now) >= LEAD_SECONDS:
                continue
            generation, codes = stream.generation, _code_stream(stream)
            assert generation is not None
            frames = generation.frames
            if not stream.generated and frames < codes.next_frames:
                continue
            if frames > codes.frames:
                codes.push(generation.codes(codes.frames))
            if stream.generated:
                codes.end()
            due.append(stream)
        if due:
            with self._engine._threads():
                pending = decode_streams(self._engine.codec, [_code_stream(stream) for stream in due])
            self._decoding = due, pending

    def _fetch(self) -> list[StreamEvent]:
        """Samples that were being decoded."""
        if self._decoding is None:
            return []
        streams, pending = self._decoding
        self._decoding = None
        with self._engine._threads():  # for the watermark too, which computes as little at a time as the model
            decoded = [
                (stream, stream.filtered(samples, last=_code_stream(stream).finished))
                for stream, samples in zip(streams, pending(), strict=True)
                if not stream.cancelled
            ]
            marks = [stream.watermark for stream, _ in decoded if stream.watermark is not None]
            for stream, samples in decoded:
                if stream.watermark is not None:
                    stream.watermark.add(samples, last=_code_stream(stream).finished)
            marked = iter(mark_streams(marks))
        return [
            event
            for stream, samples in decoded
            for event in self._pass_on(stream, samples if stream.watermark is None else next(marked))
        ]

    def _pass_on(self, stream: _Stream, samples: Samples) -> list[StreamEvent]:
        """Give out samples of a stream; the first ones in a crowd when there are enough of them."""
        if len(stream.unsent):
            samples, stream.unsent = np.concatenate([stream.unsent, samples]), stream.unsent[:0]
        now, rate, is_finished = self._clock(), self._engine.codec.sample_rate, _code_stream(stream).finished
        is_early = stream.playback_ends is None and len(samples) < self._start_seconds(now) * rate
        if is_early and not is_finished:
            stream.unsent = samples
            return []
        if len(samples):
            start = stream.playback_ends if stream.playback_ends is not None else now
            stream.playback_ends = start + len(samples) / rate
        if is_finished:
            self._streams.remove(stream)
            if stream.playback_ends is not None:
                heapq.heappush(self._played_until, stream.playback_ends)
            assert stream.generation is not None
            return [self._end(stream, stream.generation.finish_reason, samples=samples)]
        return [StreamEvent(stream.id, samples)] if len(samples) else []

    def _start_seconds(self, now: float) -> float:
        """What a stream begins with at the least."""
        while self._played_until and self._played_until[0] <= now:
            heapq.heappop(self._played_until)
        spoken = len(self._streams)
        listening = spoken + len(self._played_until)
        enough = (seconds for many, crowd, seconds in START_SECONDS if spoken >= many or listening >= crowd)
        return next(enough, 0.0)

    def _end(
        self,
        stream: _Stream,
        reason: FinishReason | None,
        error: MynaError | None = None,
        samples: Samples | None = None,
    ) -> StreamEvent:
        generation = stream.generation
        codes = generation.codes() if generation is not None else np.zeros((0, self._engine.codec.codebooks), np.uint16)
        warnings = tuple(generation.warnings) if generation is not None else ()
        end = StreamEnd(reason, warnings, codes, len(stream.plan.prompt), error)
        return StreamEvent(stream.id, samples if samples is not None else np.zeros(0, np.float32), end)


def _code_stream(stream: _Stream) -> CodeStream:
    assert stream.code_stream is not None
    return stream.code_stream
