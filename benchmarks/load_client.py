"""Load client for servers of OpenAI's /v1/audio/speech: when requests are sent, and what a listener notices of them.

Times are the client's, in seconds, counted from the dispatch of a request: the moment before its first byte is sent.

scheduling lag   dispatch, from the moment that was planned for it: a client that is too busy measures itself
ttfb             first byte of the body
first playable   first whole sample
first audible    first sample that is louder than -40 dB; `leading_silence` is how much audio lies before it
e2e              end of the response
rtf              e2e over the length of the audio
underruns        a player begins with the first sample and plays in real time; it has an underrun where the next sample
                 is not there when it is due, and goes on when it comes
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np

AUDIBLE_LEVEL = 0.01
"""Audible level, of a full scale of 1: -40 dB."""
MIN_UNDERRUN_SECONDS = 0.001
"""Shorter ones are the clock's: a sound card asks for more than that at a time."""
SAMPLE_RATE = 24_000
"""Sample rate of raw audio where no header names another: OpenAI's."""
SAMPLE_RATE_HEADER = "x-sample-rate"
SAMPLE_BYTES = 2
PERCENTILES = (50, 95, 99)
FIGURES = ("scheduling_lag", "ttfb", "first_playable", "first_audible", "leading_silence", "e2e", "rtf")
"""Fields of `RequestFigures` that are told in percentiles."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to be sent `at` so many seconds after the start."""

    at: float
    body: Mapping[str, Any]


@dataclass(eq=False)
class ResponseTrace:
    """Times and bytes that the client saw of one request, in seconds of its clock."""

    planned: float
    dispatched: float
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    """Parts of the body, each with the moment it came."""
    ended: float = 0.0
    status: int = 0
    """HTTP status of the response; 0 where none came."""
    error: str = ""
    """Why it is no whole response."""
    sample_rate: int = SAMPLE_RATE

    @property
    def seconds(self) -> float:
        """Length of the audio."""
        return sum(len(data) for _, data in self.parts) // SAMPLE_BYTES / self.sample_rate

    @property
    def playback_end(self) -> float:
        """Moment at which a player has played all, if it begins with the first sample and waits in every underrun."""
        arrivals = sample_arrivals(self.parts)
        if not arrivals:
            return self.ended
        waited = sum(length for _, length in find_underruns(arrivals, self.sample_rate, 0.0))
        return arrivals[0][0] + self.seconds + waited


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """Figures of one whole response, in seconds."""

    scheduling_lag: float
    ttfb: float
    first_playable: float
    first_audible: float | None
    """Seconds to the first sample louder than -40 dB. None, like `leading_silence`, if all is silent."""
    leading_silence: float | None
    e2e: float
    rtf: float
    seconds: float
    underruns: tuple[float, ...]
    """Length of each underrun."""


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Moments of an open loop: whether earlier requests are answered or not, the next one comes."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return [float(moment) for moment in np.cumsum(gaps)]


def sample_arrivals(parts: Sequence[tuple[float, bytes]]) -> list[tuple[float, int]]:
    """Return each moment at which whole samples arrived, and how many; a sample may come in two parts."""
    arrivals, received, known = [], 0, 0
    for moment, data in parts:
        received += len(data)
        if received // SAMPLE_BYTES > known:
            arrivals.append((moment, received // SAMPLE_BYTES - known))
            known = received // SAMPLE_BYTES
    return arrivals


def find_underruns(
    arrivals: Sequence[tuple[float, int]], sample_rate: int, shortest: float = MIN_UNDERRUN_SECONDS
) -> list[tuple[float, float]]:
    """(moment, seconds) of the underruns of a player that begins with the first sample."""
    underruns: list[tuple[float, float]] = []
    if not arrivals:
        return underruns
    dry = arrivals[0][0]  # when all that is there will have been played
    for moment, samples in arrivals:
        if moment - dry > shortest:
            underruns.append((dry, moment - dry))
        dry = max(dry, moment) + samples / sample_rate
    return underruns


def measure_response(trace: ResponseTrace) -> RequestFigures:
    """Figures of a whole response."""
    arrivals = sample_arrivals(trace.parts)
    assert not trace.error and arrivals, "a whole response with audio"
    content = b"".join(data for _, data in trace.parts)
    samples = np.frombuffer(content[: len(content) // SAMPLE_BYTES * SAMPLE_BYTES], "<i2")
    loud = np.flatnonzero(np.abs(samples.astype(np.int32)) > AUDIBLE_LEVEL * 32768)
    audible = None
    if len(loud):
        known = np.cumsum([count for _, count in arrivals])
        audible = arrivals[int(np.searchsorted(known, loud[0], side="right"))][0] - trace.dispatched
    return RequestFigures(
        scheduling_lag=trace.dispatched - trace.planned,
        ttfb=trace.parts[0][0] - trace.dispatched,
        first_playable=arrivals[0][0] - trace.dispatched,
        first_audible=audible,
        leading_silence=float(loud[0]) / trace.sample_rate if len(loud) else None,
        e2e=trace.ended - trace.dispatched,
        rtf=(trace.ended - trace.dispatched) / trace.seconds,
        seconds=trace.seconds,
        underruns=tuple(length for _, length in find_underruns(arrivals, trace.sample_rate)),
    )


class SpeechClient:
    """Requests to one server, with connections that are kept."""

    def __init__(self, url: str, *, api_key: str = "", timeout: float = 120.0, clock: Callable[[], float]) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=timeout)
        self.clock = clock

    async def models(self) -> list[str]:
        response = await self._http.get("/v1/models")
        response.raise_for_status()
        return [model["id"] for model in response.json()["data"]]

    async def speak(self, body: Mapping[str, Any], planned: float | None = None) -> ResponseTrace:
        """Send a request and read its response as it comes. What goes wrong is in the trace."""
        now = self.clock()
        trace = ResponseTrace(now if planned is None else planned, now)
        try:
            async with self._http.stream("POST", "/v1/audio/speech", json=dict(body)) as response:
                trace.status = response.status_code
                trace.sample_rate = int(response.headers.get(SAMPLE_RATE_HEADER, SAMPLE_RATE))
                async for data in response.aiter_raw():
                    if data:
                        trace.parts.append((self.clock(), data))
                if response.status_code != 200:
                    trace.error = b"".join(data for _, data in trace.parts).decode(errors="replace")[:500]
        except httpx2.HTTPError as error:
            trace.error = f"{type(error).__name__}: {error}"
        trace.ended = self.clock()
        if not trace.error and not trace.seconds:
            trace.error = "the response has no audio"
        return trace

    async def close(self) -> None:
        await self._http.aclose()


@dataclass(eq=False)
class LoadResult:
    """All that a load test saw."""

    traces: list[ResponseTrace]
    dropped: int = 0
    """Arrivals that were not sent, since too many requests were open."""
    max_open: int = 0
    window: float = 0.0
    """Seconds from the start to the end of the last response."""

    def summary(self) -> dict[str, Any]:
        whole = [measure_response(trace) for trace in self.traces if not trace.error]
        underruns = [length for figures in whole for length in figures.underruns]
        errors = [trace for trace in self.traces if trace.error]
        return {
            "requests": len(self.traces) + self.dropped,
            "whole": len(whole),
            "dropped": self.dropped,
            "refused": sum(trace.status not in (0, 200) for trace in errors),
            "failed": sum(trace.status in (0, 200) for trace in errors),
            "first_error": errors[0].error if errors else "",
            "underruns": len(underruns),
            "requests_with_underruns": sum(bool(figures.underruns) for figures in whole),
            "longest_underrun": max(underruns, default=0.0),
            "max_open": self.max_open,
            "audio_s_per_s": sum(figures.seconds for figures in whole) / self.window if self.window else 0.0,
            "clean": bool(whole) and not (underruns or errors or self.dropped),
        } | {name: percentiles([getattr(figures, name) for figures in whole]) for name in FIGURES}


def percentiles(values: Sequence[float | None]) -> dict[str, float] | None:
    """p50, p95 and p99; None where nothing was measured."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {f"p{share}": float(np.percentile(known, share)) for share in PERCENTILES}


async def run_open_loop(
    client: SpeechClient,
    plan: Sequence[PlannedRequest],
    *,
    max_open: int = 4096,
    on_done: Callable[[int], None] = lambda _: None,
) -> LoadResult:
    """Send each request at its moment, whether the others are answered or not."""
    result, start, open_tasks = LoadResult([]), client.clock(), set[asyncio.Task[None]]()

    async def send(request: PlannedRequest) -> None:
        result.traces.append(await client.speak(request.body, start + request.at))
        on_done(len(result.traces))

    for request in plan:
        await _sleep_until(start + request.at, client.clock)
        if len(open_tasks) >= max_open:
            result.dropped += 1
            continue
        task = asyncio.create_task(send(request))
        open_tasks.add(task)
        task.add_done_callback(open_tasks.discard)
        result.max_open = max(result.max_open, len(open_tasks))
    await asyncio.gather(*open_tasks)
    result.window = client.clock() - start
    return result


async def run_listeners(
    client: SpeechClient, next_body: Callable[[], Mapping[str, Any]], listeners: int, seconds: float, seed: int = 0
) -> LoadResult:
    """Run so many listeners at a time: each begins within the first quarter of the test, and asks for the next text
    when the last one has been played to its end. An error ends its listener."""
    result, start = LoadResult([], max_open=listeners), client.clock()
    begins = np.random.default_rng(seed).uniform(0, seconds / 4, listeners)

    async def listen(begin: float) -> None:
        moment = start + begin
        while moment < start + seconds:
            await _sleep_until(moment, client.clock)
            trace = await client.speak(next_body(), moment)
            result.traces.append(trace)
            if trace.error:
                return
            moment = trace.playback_end

    await asyncio.gather(*(listen(float(begin)) for begin in begins))
    result.window = client.clock() - start
    return result


async def largest_passing(
    passes: Callable[[int], Awaitable[bool]], first: int, most: int, resolution: float = 0.05
) -> int:
    """The largest number that passes, to about `resolution` of it: doubled until one fails, then bisected. 0 where the
    first fails already and nothing below it passes."""
    good, bad, number = 0, most + 1, first
    while number < bad:
        if await passes(number):
            good = number
            number = min(2 * number, most)
            if good == most:
                return most
        else:
            bad = number
    while bad - good > max(1, round(resolution * good)):
        middle = (good + bad) // 2
        if await passes(middle):
            good = middle
        else:
            bad = middle
    return good


async def _sleep_until(moment: float, clock: Callable[[], float]) -> None:
    if (left := moment - clock()) > 0:
        await asyncio.sleep(left)


def now() -> float:
    """The clock of all traces."""
    return time.perf_counter()
