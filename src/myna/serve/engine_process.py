"""Engine process: holds the model, and turns requests from the pipe into audio, step by step."""

import gc
import hashlib
import signal
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import torch

from myna.audio.files import Samples, pcm16
from myna.core.errors import ConfigError, MynaError, SpeakError
from myna.data.codec import Codec
from myna.data.conversation import AudioClip, Reference
from myna.models.base import AnsweringFamily
from myna.models.ref import ModelRef
from myna.provenance.credentials import check_installed
from myna.provenance.watermark import MARK_NAME, StreamWatermark
from myna.serve import messages
from myna.serve.messages import EngineInfo, EngineMessage, EngineSettings, Failure, RequestEnd, RequestEvent, WorkerLoad
from myna.speak.answering import AnswerModel, AudioQuestion
from myna.speak.batch import MAX_CONTEXT_SECONDS, RunningRequest, SpeechPlan, SpokenSegment
from myna.speak.engine import AdapterFiles, Engine, encode_clip
from myna.speak.loading import load_engine
from myna.speak.request import SpeechRequest
from myna.text.normalization import normalise_text

MAX_CACHED_REFERENCES = 256
"""Maximum number of cached reference encodings; clients often send the same reference again."""


class ReferenceEncoder:
    """Encoder of reference recordings, in a thread beside the batch; on a GPU in a CUDA stream of its own. A recording
    that is known, or being encoded, is not encoded again."""

    def __init__(self, codec: Codec, device: torch.device, *, single_thread: bool) -> None:
        self._codec = codec
        self._clips: OrderedDict[bytes, Future[AudioClip]] = OrderedDict()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        start = partial(torch.set_num_threads, 1) if single_thread else None
        self._thread = ThreadPoolExecutor(1, "reference encoder", start)

    def encode(self, samples: Samples) -> Future[AudioClip]:
        """Return the future codes of a recording. Call it from one thread."""
        if len(samples) < self._codec.hop:
            raise SpeakError("a reference is shorter than one frame", hint="give a few seconds of the voice")
        key = hashlib.blake2b(samples.tobytes(), digest_size=16).digest()
        clip = self._clips.get(key)
        if clip is None or clip.cancelled() or (clip.done() and clip.exception() is not None):
            clip = self._clips[key] = self._thread.submit(self._encode, key.hex(), samples)
            if len(self._clips) > MAX_CACHED_REFERENCES:
                self._clips.popitem(last=False)
        self._clips.move_to_end(key)
        return clip

    def _encode(self, id: str, samples: Samples) -> AudioClip:
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            return AudioClip(id, encode_clip(self._codec, samples))


REPORT_SECONDS = 0.25
"""Seconds between two reports of the load, if no step has brought anything."""
POLL_SECONDS = 0.002
"""Seconds a step waits for references when it has nothing else to do."""
WARM_UP_TEXTS = ("Good morning.", "Good morning, and welcome. " * 4, "Good morning, and welcome. " * 12)


def run_engine(settings: EngineSettings, connection: Connection) -> None:
    """Run the engine process until the other end of the pipe is closed. A terminal or a service manager sends its
    signals to the HTTP process too, which first waits for its requests."""
    for number in signal.valid_signals() & {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", None)}:
        signal.signal(number, signal.SIG_IGN)
    inbox: SimpleQueue[EngineMessage | None] = SimpleQueue()
    Thread(target=_receive, args=(connection, inbox), daemon=True).start()
    try:
        worker = open_worker(settings)
    except MynaError as error:
        connection.send(Failure.of(error))
        return
    gc.collect()
    gc.freeze()  # a full collection would stop all streams for as long as it takes to visit every imported object
    connection.send(worker.info)
    reported = 0.0
    while True:
        received = [] if worker.busy else [inbox.get()]
        with suppress(Empty):
            while True:
                received.append(inbox.get_nowait())
        if None in received:
            return
        began = time.perf_counter()
        events = [
            event
            for message in received
            if message is not None
            for event in _attempt(message, partial(worker.handle, message))
        ]
        if worker.busy:
            events += worker.step()
        now = time.perf_counter()
        if not events and now - reported < REPORT_SECONDS:
            continue
        reported = now
        try:
            connection.send(messages.StepReport(tuple(events), now - began, worker.load))
        except OSError:  # the pipe is closed
            return


def _receive(connection: Connection, inbox: SimpleQueue[EngineMessage | None]) -> None:
    while True:
        try:
            inbox.put(connection.recv())
        except (EOFError, OSError):
            inbox.put(None)
            return


def _attempt(message: EngineMessage, action: Callable[[], list[RequestEvent]]) -> list[RequestEvent]:
    """Do something for a message. An error fails this request alone."""
    id = getattr(message, "id", "")
    try:
        return action()
    except MynaError as error:
        text = message.request.text if isinstance(message, messages.SpeakMessage) else ""
        return [RequestEnd(id, failure=Failure.of(error, text))]
    except Exception:  # noqa: BLE001 - a bug that one request has found must not end all others
        traceback.print_exc(file=sys.stderr)
        return [RequestEnd(id, failure=Failure("the request could not be processed", is_users=False))]


def open_worker(settings: EngineSettings) -> "SpeechWorker | AnswerWorker":
    """Load and warm up the model of the settings: one that speaks, or one that answers."""
    ref = ModelRef.find(settings.source, settings.model)
    if isinstance(ref.open_family(settings.codec), AnsweringFamily):
        if settings.adapters:
            raise ConfigError("a model that answers takes no adapters", hint="serve the run itself: myna serve RUN")
        return AnswerWorker(AnswerModel(ref, device=settings.device))
    engine = load_engine(
        ref,
        codec=settings.codec,
        device=settings.device,
        strength=settings.strength,
        quantization=settings.quantization,
        exact=settings.exact,
    )
    return SpeechWorker(engine, settings)


class _Encoding(NamedTuple):
    """Request whose references are being encoded, with its place in the queue."""

    message: messages.SpeakMessage
    place: int
    clips: tuple[Future[AudioClip], ...]


class SpeechWorker:
    """Worker of a model that speaks, with its running batch."""

    def __init__(self, engine: Engine, settings: EngineSettings) -> None:
        self._engine = engine
        engine.max_adapters = settings.max_adapters
        device = next(engine.model.parameters()).device
        # What is left for the host is tiny, and threads that wait for more of it burn cores.
        single_thread = device.type == "cuda" or engine.single_thread
        if single_thread:
            torch.set_num_threads(1)
        if settings.watermark:
            check_installed()
        self._device, self._marks = device, settings.watermark
        self._batch = engine.open_batch(settings.rows, settings.positions, adapter_rank=settings.adapter_rank)
        for name, source in settings.adapters.items():
            try:
                engine.load_adapter(name, source)
            except MynaError as error:
                if not settings.is_restart:
                    raise
                print(f"the adapter {name} is left out: {error.what}", file=sys.stderr, flush=True)
        self._encoder = ReferenceEncoder(engine.codec, device, single_thread=single_thread)
        self._encoding: dict[str, _Encoding] = {}
        self._running: dict[str, RunningRequest] = {}
        self._loading: list[tuple[messages.AdapterMessage, Future[AdapterFiles]]] = []
        """Adapters that are being read."""
        self._reader = ThreadPoolExecutor(1, "adapter reader")
        self._sessions: dict[str, list[SpokenSegment]] = {}
        self._warm_up()
        self.info = EngineInfo(
            sample_rate=engine.codec.sample_rate,
            adapters=engine.adapters,
            watermark=MARK_NAME if settings.watermark else "",
            device=str(device),
        )

    @property
    def busy(self) -> bool:
        return self._batch.busy or bool(self._encoding or self._loading)

    @property
    def load(self) -> WorkerLoad:
        return WorkerLoad(self._batch.speaking, self._batch.waiting + len(self._encoding), self._engine.adapters)

    def _warm_up(self) -> None:
        """Encode a second, and speak prompts of several lengths in every number of slots, to compile, capture and
        load."""
        self._encoder.encode(np.zeros(self._engine.codec.sample_rate, np.float32)).result()
        batch, frame = self._batch, 1 / self._engine.codec.frame_rate
        for number in range(batch.slots):
            text = WARM_UP_TEXTS[number % len(WARM_UP_TEXTS)]
            request = SpeechRequest(text, max_seconds=(number + 1.5) * frame, watermark=self._marks)
            batch.submit(self._engine.plan(request, split=False), watermark=self._watermark(request))
        while batch.busy:
            batch.step()

    def handle(self, message: EngineMessage) -> list[RequestEvent]:
        match message:
            case messages.SpeakMessage():
                message.request.check()
                recordings = (one.audio for one in message.request.recordings)
                clips = tuple(self._encoder.encode(audio) for audio in recordings if isinstance(audio, np.ndarray))
                self._encoding[message.id] = _Encoding(message, self._batch.reserve(), clips)
            case messages.CancelMessage() if (waiting := self._encoding.pop(message.id, None)) is not None:
                for clip in set(waiting.clips).difference(*(other.clips for other in self._encoding.values())):
                    clip.cancel()
                return [RequestEnd(message.id, "cancelled")]
            case messages.CancelMessage() if (running := self._running.get(message.id)) is not None:
                self._batch.cancel(running)
            case messages.EndSessionMessage():
                self._sessions.pop(message.session, None)
            case messages.AdapterMessage(source=str(source)):  # which is read beside the steps
                read = self._reader.submit(self._engine.read_adapter, message.name, source)
                self._loading.append((message, read))
            case messages.AdapterMessage():
                self._engine.unload_adapter(message.name)
                return [RequestEnd(message.id)]
            case messages.AnswerMessage():
                raise SpeakError("this model speaks, and answers no questions", hint="serve a model that answers")
        return []

    def step(self) -> list[RequestEvent]:
        if not self._batch.busy:
            pending: set[Future[Any]] = {clip for one in self._encoding.values() for clip in one.clips}
            pending |= {read for _, read in self._loading}
            wait({one for one in pending if not one.done()}, POLL_SECONDS, FIRST_COMPLETED)
        events: list[RequestEvent] = []
        while self._loading and self._loading[0][1].done():
            message, read = self._loading.pop(0)
            events += _attempt(message, partial(self._add_adapter, message, read))
        for waiting in [one for one in self._encoding.values() if all(clip.done() for clip in one.clips)]:
            del self._encoding[waiting.message.id]
            events += _attempt(waiting.message, partial(self._submit, waiting))
        return events + [event for running in self._batch.step() for event in self._report(running)]

    def _add_adapter(self, message: messages.AdapterMessage, read: Future[AdapterFiles]) -> list[RequestEvent]:
        self._engine.add_adapter(message.name, read.result())
        return [RequestEnd(message.id)]

    def _submit(self, waiting: _Encoding) -> list[RequestEvent]:
        """Queue a request whose references are encoded, in its place."""
        id, request = waiting.message.id, waiting.message.request
        plan = self._plan(request, [clip.result() for clip in waiting.clips])
        watermark = self._watermark(request)
        self._running[id] = self._batch.submit(plan, id=id, watermark=watermark, place=waiting.place)
        return []

    def _report(self, running: RunningRequest) -> list[RequestEvent]:
        """Turn news of a request into messages."""
        if running.id not in self._running:
            return []
        samples, request = running.take_samples(), running.plan.request
        pieces: list[RequestEvent] = [messages.AudioPiece(running.id, pcm16(samples))] if len(samples) else []
        if not running.ended:
            return pieces
        del self._running[running.id]
        codes = running.codes()
        if request.session and running.finish_reason == "stop" and len(codes):
            segment = " ".join(running.plan.segments), codes
            self._sessions[request.session] = [*self._sessions.get(request.session, [])[:1], segment]
        end = RequestEnd(
            running.id,
            running.finish_reason,
            warnings=tuple(running.warnings),
            input_tokens=len(running.plan.prompt),
            output_tokens=len(codes),
            failure=Failure.of(running.error, request.text) if running.error is not None else None,
        )
        return [*pieces, end]

    def _plan(self, request: SpeechRequest, clips: Sequence[AudioClip]) -> SpeechPlan:
        engine = self._engine
        references = tuple(
            Reference(normalise_text(one.text), clip) for one, clip in zip(request.references, clips, strict=True)
        )
        plan = engine.plan(replace(request, references=references), positions=self._batch.positions)
        context = self._sessions.get(request.session, [])
        # As between the segments of a long text: with a reference, the previous text is enough. A text that does not
        # fit is left out.
        for earlier in (context[-1:] if references else context, context[-1:]):
            if earlier and sum(len(codes) for _, codes in earlier) <= MAX_CONTEXT_SECONDS * engine.codec.frame_rate:
                prompt = engine.render(plan.request, references, plan.segments[0], tuple(earlier))
                if self._batch.fits(prompt, plan.least_frames[0]):
                    return replace(plan, prompt=prompt)
        return plan

    def _watermark(self, request: SpeechRequest) -> StreamWatermark | None:
        return StreamWatermark(self._engine.codec.sample_rate, device=str(self._device)) if request.watermark else None


class AnswerWorker:
    """Worker of a model that answers questions about recordings, as many at a time as its batch holds."""

    def __init__(self, model: AnswerModel) -> None:
        self._model, self._waiting = model, list[messages.AnswerMessage]()
        device = str(next(model.model.parameters()).device)
        self.info = EngineInfo(sample_rate=model.encoder.sample_rate, device=device, answers=True)

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    @property
    def load(self) -> WorkerLoad:
        return WorkerLoad(waiting=len(self._waiting))

    def handle(self, message: EngineMessage) -> list[RequestEvent]:
        match message:
            case messages.AnswerMessage():
                if len(message.samples) < self._model.encoder.hop:
                    raise SpeakError("the recording is shorter than one frame", hint="send a recording of speech")
                self._waiting.append(message)
            case messages.CancelMessage():
                cancelled = [one for one in self._waiting if one.id == message.id]
                self._waiting = [one for one in self._waiting if one.id != message.id]
                return [RequestEnd(one.id, "cancelled") for one in cancelled]
            case messages.SpeakMessage() | messages.AdapterMessage():
                raise SpeakError(
                    "this model answers questions about recordings, and does not speak",
                    hint="send recordings to /v1/audio/assessments, or serve a model that speaks",
                )
        return []

    def step(self) -> list[RequestEvent]:
        """Answer waiting questions that ask for the same kind of answer as the first."""
        first, model = self._waiting[0], self._model
        kind = first.max_tokens, first.constrained
        batch = [one for one in self._waiting if (one.max_tokens, one.constrained) == kind][: model.batch_size]
        ids = {one.id for one in batch}
        self._waiting = [one for one in self._waiting if one.id not in ids]
        try:
            questions = [AudioQuestion(one.id, encode_clip(model.encoder, one.samples), one.question) for one in batch]
            answers = list(model.answer_questions(questions, first.max_tokens, constrained=first.constrained))
        except MynaError as error:
            return [RequestEnd(one.id, failure=Failure.of(error)) for one in batch]
        return [
            RequestEnd(one.id, "stop" if answer.stopped else "length", text=answer.text)
            for one, answer in zip(batch, answers, strict=True)
        ]
