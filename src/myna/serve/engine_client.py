"""Client of the engine process: starts, watches and restarts it, and sends it requests and adapters."""

import asyncio
import contextlib
import logging
import math
import multiprocessing
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Event, Thread
from typing import Any

from myna.serve import messages
from myna.serve.messages import EngineInfo, EngineMessage, EngineSettings, Failure, RequestEnd, StepReport
from myna.serve.schemas import ApiError

MAX_RESTART_SECONDS = 30.0
"""Longest pause in seconds between two attempts to start the engine."""
STOP_SECONDS = 10.0
"""Seconds the engine process gets to exit."""
STALLED_SECONDS = 60.0
"""Seconds without a report while there is work, after which the server counts as unhealthy."""
RETRY_RANGE = (1, 60)
"""Least and most seconds in a Retry-After header."""

log = logging.getLogger("myna.serve")


class EngineJob:
    """One request to the engine: its events as they come. Leaving it early cancels it."""

    def __init__(self, client: "EngineClient", message: messages.AnsweredMessage) -> None:
        self._client, self.id, self.began = client, message.id, time.monotonic()
        self.adapter = message.request.adapter if isinstance(message, messages.SpeakMessage) else ""
        self._events: asyncio.Queue[messages.RequestEvent] = asyncio.Queue()
        self.end: RequestEnd | None = None

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield audio as it comes; raise an error of the engine. The end is in `end` afterwards."""
        while self.end is None:
            event = await self._events.get()
            if isinstance(event, messages.AudioPiece):
                yield event.pcm
                continue
            self.end = event
        if self.end.failure is not None:
            raise ApiError.of_failure(self.end.failure)

    async def result(self) -> tuple[bytes, RequestEnd]:
        """Return all audio, and the end."""
        audio = b"".join([piece async for piece in self.pieces()])
        assert self.end is not None
        return audio, self.end

    def cancel(self) -> None:
        self._client.cancel(self)


class EngineClient:
    """Process of the engine: started, restarted when it dies, and connected with asyncio. All methods belong to the
    event loop; a thread of its own reads the pipe."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.info: EngineInfo | None = None
        """Facts of the loaded model; None while it is being loaded."""
        self.known: EngineInfo | None = None
        """Facts of the last model that was loaded."""
        self.load = messages.WorkerLoad()
        self.load_failure: Failure | None = None
        self.restarts = 0
        self.on_report: Callable[[StepReport], None] = lambda _: None
        self._jobs: dict[str, EngineJob] = {}
        self._unsent: list[EngineMessage] = []
        self._seconds: deque[float] = deque(maxlen=32)
        """Seconds that the last requests took."""
        self._heard = time.monotonic()
        self._connection: Connection | None = None
        self._process: BaseProcess | None = None
        self._closing = Event()
        self._changed = asyncio.Event()
        self._thread: Thread | None = None

    @property
    def capacity(self) -> int:
        """Number of requests that are spoken or wait at a time: the only limit."""
        return self.settings.rows + self.settings.max_waiting

    @property
    def in_flight(self) -> int:
        return len(self._jobs)

    @property
    def adapters_in_use(self) -> set[str]:
        return {job.adapter for job in self._jobs.values()}

    @property
    def ready(self) -> bool:
        return self.info is not None and not self._closing.is_set()

    @property
    def healthy(self) -> bool:
        """Whether the engine works; one that is being loaded counts as healthy."""
        stalled = bool(self._jobs) and self.ready and time.monotonic() - self._heard > STALLED_SECONDS
        return self.load_failure is None and not stalled

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = Thread(target=self._run, name="engine pipe", daemon=True)
        self._thread.start()

    async def wait_until_loaded(self) -> None:
        """Wait until a model has been loaded; raise an error of loading it."""
        while self.known is None and self.load_failure is None:
            await self._changed.wait()
            self._changed.clear()
        self._check_loaded()

    def _check_loaded(self) -> None:
        if self.load_failure is not None:
            raise ApiError(503, f"the model cannot be loaded: {self.load_failure.message}")

    async def close(self) -> None:
        """End the engine process."""
        self._closing.set()
        if self._thread is None:
            return
        if self.info is not None and self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(None)
            await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        if self._thread.is_alive() and self._process is not None:  # it is being loaded, or hangs
            self._process.kill()
            await asyncio.to_thread(self._thread.join, STOP_SECONDS)

    def submit_all(self, requests: Sequence[messages.AnsweredMessage]) -> list[EngineJob]:
        """Send requests, all or none: a queue without room for them refuses."""
        if len(requests) > self.capacity:
            raise ApiError(400, f"at most {self.capacity} takes are spoken at a time", param="takes")
        if self.in_flight + len(requests) > self.capacity:
            # Seconds until about half of the waiting requests will have been spoken.
            mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
            seconds = math.ceil(mean * self.settings.max_waiting / (2 * self.settings.rows))
            raise ApiError(
                429,
                f"{self.in_flight} requests are spoken or waiting, and no more are taken; try again in a moment",
                kind="rate_limit_error",
                code="queue_full",
                headers={"retry-after": str(min(max(seconds, RETRY_RANGE[0]), RETRY_RANGE[1]))},
            )
        return [self.submit(request) for request in requests]

    def submit(self, message: messages.AnsweredMessage) -> EngineJob:
        """Send a message, whether or not the queue is full."""
        self._check_loaded()
        job = self._jobs[message.id] = EngineJob(self, message)
        self.send(message)
        return job

    def send(self, message: EngineMessage) -> None:
        """Send a message, or keep it until the engine is ready."""
        connection = self._connection  # which the thread takes away
        if self.info is None or connection is None:
            self._unsent.append(message)
            return
        with contextlib.suppress(OSError):  # it has just died: the thread that reads from it will tell
            connection.send(message)

    def cancel(self, job: EngineJob) -> None:
        """End a request whose client has gone."""
        if self._jobs.pop(job.id, None) is not None:
            self._unsent = [one for one in self._unsent if getattr(one, "id", "") != job.id]
            self.send(messages.CancelMessage(job.id))

    # In the event loop, called by the thread.

    def _receive(self, message: EngineInfo | Failure | StepReport) -> None:
        self._heard = time.monotonic()
        match message:
            case EngineInfo():
                self.info = self.known = message
                self.load, self.load_failure = messages.WorkerLoad(adapters=message.adapters), None
                unsent, self._unsent = self._unsent, []
                for one in unsent:
                    self.send(one)
            case Failure():
                self.load_failure = message
                self._unsent.clear()
                self._fail_all(replace(message, is_users=False))
            case StepReport():
                self.load = message.load
                for event in message.events:
                    self._deliver(event)
                self.on_report(message)
        self._changed.set()

    def _deliver(self, event: messages.RequestEvent) -> None:
        if (job := self._jobs.get(event.id)) is None:
            return
        job._events.put_nowait(event)
        if isinstance(event, RequestEnd):
            del self._jobs[event.id]
            self._seconds.append(time.monotonic() - job.began)

    def _died(self, exit_code: int | None, is_told: Event) -> None:
        """Fail the requests of an engine process that has ended. Unsent ones wait for the next process."""
        self.info, self.load = None, messages.WorkerLoad(adapters=self.load.adapters)
        self.restarts += 1
        log.error("the engine process ended with code %s; it is started again", exit_code)
        unsent = {getattr(message, "id", "") for message in self._unsent}
        failure = Failure("the engine stopped while it was speaking; it is being started again", is_users=False)
        self._fail_all(failure, keep=unsent)
        is_told.set()

    def _fail_all(self, failure: Failure, keep: set[str] | None = None) -> None:
        for id in [id for id in self._jobs if not keep or id not in keep]:
            self._deliver(RequestEnd(id, failure=failure))

    # In the thread.

    def _run(self) -> None:
        context = multiprocessing.get_context("spawn")
        pause = 0.0
        while not self._closing.wait(pause):
            ours, theirs = context.Pipe()
            settings = replace(self.settings, is_restart=self.known is not None)
            process = context.Process(target=_run_engine, args=(settings, theirs), name="engine", daemon=True)
            process.start()
            theirs.close()
            self._connection, self._process = ours, process
            was_ready = False
            try:
                while True:
                    message: Any = ours.recv()
                    was_ready = was_ready or isinstance(message, EngineInfo)
                    self._loop.call_soon_threadsafe(self._receive, message)
            except (EOFError, OSError):
                pass  # it has died, or is to end
            self._connection = None
            process.join(STOP_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
            ours.close()
            if not self._closing.is_set():
                is_told = Event()
                self._loop.call_soon_threadsafe(self._died, process.exitcode, is_told)
                is_told.wait(STOP_SECONDS)
            pause = 0.0 if was_ready else min(max(1.0, 2 * pause), MAX_RESTART_SECONDS)


def _run_engine(settings: EngineSettings, connection: Connection) -> None:
    """Run the engine process. The HTTP process does without torch, so this import is late."""
    from myna.serve.engine_process import run_engine

    run_engine(settings, connection)


class AdapterCatalog:
    """Names and folders of adapters, of which the engine holds the most recently used. An adapter that is not in the
    engine is loaded when a request asks for it, in the place of the least recently used."""

    def __init__(self, client: EngineClient) -> None:
        self._client, self._capacity = client, client.settings.max_adapters
        self.sources: dict[str, str] = dict(client.settings.adapters)
        self._last_use: dict[str, float] = {}
        self._leaving = ""
        """Adapter that is being unloaded."""
        self._lock = asyncio.Lock()
        first = dict(list(self.sources.items())[: self._capacity])
        client.settings = replace(client.settings, adapters=first)

    async def add(self, name: str, source: str) -> None:
        """Add and load an adapter. One that cannot be loaded stays unknown."""
        self.sources[name] = source
        try:
            await self.load(name)
        except ApiError:
            del self.sources[name]
            raise

    async def remove(self, name: str) -> None:
        """Forget an adapter. Requests that speak with it continue."""
        async with self._lock:
            del self.sources[name]
            if name in self._client.load.adapters:
                await self._change(name, None)

    async def load(self, name: str) -> None:
        """Load an adapter into the engine, unless it is there."""
        self._last_use[name] = time.monotonic()
        if self._is_loaded(name):  # which does not wait while another is loaded
            return
        async with self._lock:
            if self._is_loaded(name):
                return
            loaded = self._client.load.adapters
            if len(loaded) >= self._capacity:
                idle = set(loaded) - self._client.adapters_in_use
                if not idle:
                    message = f"requests speak with {len(loaded)} other adapters, and no more are loaded at a time"
                    raise ApiError(429, message, code="adapters_full", headers={"retry-after": "1"})
                await self._change(min(idle, key=lambda one: self._last_use.get(one, 0.0)), None)
            if (source := self.sources.get(name)) is None:
                raise ApiError(404, f"the adapter {name} has just been unloaded", code="model_not_found")
            await self._change(name, source)

    def _is_loaded(self, name: str) -> bool:
        return name in self._client.load.adapters and name != self._leaving

    async def _change(self, name: str, source: str | None) -> None:
        client = self._client
        self._leaving = name if source is None else ""
        try:
            await client.submit(messages.AdapterMessage(name, source)).result()
        finally:
            self._leaving = ""
        # An engine process that is started again loads them again.
        loaded = {one: self.sources[one] for one in client.load.adapters if one in self.sources}
        client.settings = replace(client.settings, adapters=loaded)
