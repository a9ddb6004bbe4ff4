"""The load client against a server of known timing: every figure is what its definition says."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from benchmarks.load_client import (
    MIN_UNDERRUN_SECONDS,
    LoadResult,
    PlannedRequest,
    RequestFigures,
    ResponseTrace,
    SpeechClient,
    find_underruns,
    largest_passing,
    measure_response,
    now,
    percentiles,
    poisson_arrivals,
    run_listeners,
    run_open_loop,
    sample_arrivals,
)
from hypothesis import given, settings
from hypothesis import strategies as st

RATE = 24_000
TOLERANCE = 1.0
"""Seconds by which a busy machine may be late."""


def tone(seconds: float, level: float = 0.3) -> bytes:
    return np.full(round(seconds * RATE), round(level * 32767), "<i2").tobytes()


def trace(*parts: tuple[float, bytes], dispatched: float = 0.0, ended: float | None = None) -> ResponseTrace:
    end = parts[-1][0] if ended is None else ended
    return ResponseTrace(dispatched, dispatched, list(parts), end, status=200)


# Definitions, on times that are given


def test_a_stalled_part_is_one_underrun_of_its_length() -> None:
    figures = measure_response(trace((1.0, tone(0.5)), (1.4, tone(0.5)), (2.25, tone(0.5)), dispatched=0.9, ended=2.3))
    # A second of audio is played from 1.0 to 2.0; the next comes at 2.25.
    assert figures.underruns == pytest.approx((0.25,))
    assert figures.ttfb == figures.first_playable == figures.first_audible == pytest.approx(0.1)
    assert figures.e2e == pytest.approx(1.4) and figures.seconds == 1.5 and figures.rtf == pytest.approx(1.4 / 1.5)


def test_after_an_underrun_the_player_goes_on_from_there() -> None:
    arrivals = [(0.0, RATE), (2.0, RATE), (2.9, RATE), (4.5, RATE)]
    # Dry at 1, waits till 2; plays 2 s till 4, waits till 4.5.
    assert np.allclose(find_underruns(arrivals, RATE), [(1.0, 1.0), (4.0, 0.5)])
    assert find_underruns([], RATE) == [] == find_underruns([(5.0, 1)], RATE)


def test_less_than_the_clock_can_tell_is_no_underrun() -> None:
    assert find_underruns([(0.0, RATE), (1 + 0.9 * MIN_UNDERRUN_SECONDS, RATE)], RATE) == []
    assert len(find_underruns([(0.0, RATE), (1 + 1.1 * MIN_UNDERRUN_SECONDS, RATE)], RATE)) == 1


def test_half_a_sample_is_not_playable_and_silence_is_not_audible() -> None:
    silence = bytes(2 * RATE // 10)
    figures = measure_response(
        trace((0.1, silence[:1]), (0.2, silence[1:]), (0.3, b"\x01"), (0.4, b"\x40" + tone(0.2)))
    )
    assert figures.ttfb == 0.1 and figures.first_playable == 0.2
    assert figures.first_audible == 0.4, "the sample that came in two parts"
    assert figures.leading_silence == pytest.approx(0.1)
    silent = measure_response(trace((0.1, silence)))
    assert silent.first_audible is None and silent.leading_silence is None


def test_quiet_is_silent_up_to_minus_40_decibels() -> None:
    quiet, loud = measure_response(trace((0, tone(0.1, 0.0099)))), measure_response(trace((0, tone(0.1, 0.0102))))
    assert quiet.first_audible is None and loud.first_audible == 0


def test_the_scheduling_lag_is_not_in_the_latency() -> None:
    late = ResponseTrace(1.0, 1.5, [(1.7, tone(0.1))], 1.8, status=200)
    figures = measure_response(late)
    assert figures.scheduling_lag == pytest.approx(0.5) and figures.ttfb == pytest.approx(0.2)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 40_000)), min_size=1, max_size=12),
    st.lists(st.integers(1, 10_000), max_size=20),
)
def test_how_the_bytes_are_cut_changes_no_sum(gaps: list[tuple[float, int]], cuts: list[int]) -> None:
    """All samples arrive once; a player waits exactly as long as it plays later than it could have."""
    moments = np.cumsum([gap for gap, _ in gaps]).tolist()
    parts = [(moment, bytes(2 * count)) for moment, (_, count) in zip(moments, gaps, strict=True)]
    whole = trace(*parts)
    total = sum(count for _, count in gaps)
    assert sum(count for _, count in sample_arrivals(parts)) == total
    waited = sum(length for _, length in find_underruns(sample_arrivals(parts), RATE, 0.0))
    # By another way: the player may never be ahead of what has come.
    before = np.cumsum([0, *(count for _, count in gaps)])[:-1] / RATE
    latest = max(moment - played for moment, played in zip(moments, before, strict=True))
    assert waited == pytest.approx(latest - moments[0], abs=1e-6)
    assert whole.playback_end == pytest.approx(latest + total / RATE, abs=1e-6)
    # Cut anywhere, at the same moments.
    split = [
        (moment, data[start : start + size])
        for moment, data in parts
        for size in [max(cuts, default=len(data))]
        for start in range(0, len(data), size)
    ]
    assert measure_response(trace(*split)).underruns == pytest.approx(measure_response(whole).underruns)


def test_arrivals_are_poisson_and_the_same_for_a_seed() -> None:
    arrivals = poisson_arrivals(20.0, 4_000, seed=1)
    assert arrivals == poisson_arrivals(20.0, 4_000, seed=1) != poisson_arrivals(20.0, 4_000, seed=2)
    gaps = np.diff(arrivals)
    assert gaps.min() >= 0 and gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.08), "of an exponential distribution"
    counts = np.bincount(np.floor(arrivals).astype(int))[:-1]
    assert counts.var() == pytest.approx(counts.mean(), rel=0.25), "as many bursts as chance makes"


def test_percentiles_leave_out_what_was_not_measured() -> None:
    found = percentiles([*(float(n) for n in range(101)), None])
    assert found == {"p50": 50.0, "p95": 95.0, "p99": 99.0} and percentiles([None]) is None


@settings(max_examples=60, deadline=None)
@given(limit=st.integers(0, 700), first=st.integers(1, 64))
def test_the_search_finds_the_limit(limit: int, first: int) -> None:
    tried: list[int] = []

    async def passes(number: int) -> bool:
        tried.append(number)
        return number <= limit

    found = asyncio.run(largest_passing(passes, first, 512))
    assert found <= min(limit, 512)
    assert found == 512 or limit - found <= max(1, 0.05 * limit)
    assert len(tried) <= 2 * math.log2(1024) and len(tried) == len(set(tried))


# A server of known timing


Script = Sequence[tuple[float, bytes | None]]
"""Pauses, each with what is sent behind it; None breaks the connection."""


@asynccontextmanager
async def toy_server(script: Callable[[], Script], status: int = 200) -> AsyncIterator[str]:
    """Answers every request by a script, as a chunked response."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                json.loads(await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0])))
                fields = (f"HTTP/1.1 {status} x", f"x-sample-rate: {RATE}", "transfer-encoding: chunked", "", "")
                writer.write("\r\n".join(fields).encode())
                for pause, data in script():
                    await asyncio.sleep(pause)
                    if data is None:
                        writer.close()
                        return
                    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def with_server(script: Callable[[], Script], use: Callable[[SpeechClient], Awaitable[Any]], status: int = 200) -> Any:
    async def run() -> Any:
        async with toy_server(script, status) as url:
            client = SpeechClient(url, clock=now)
            try:
                return await use(client)
            finally:
                await client.close()

    return asyncio.run(run())


def test_the_client_sees_what_the_server_does() -> None:
    """A tenth of a second, then a stall of 1.2 seconds, of which a tenth is bridged."""
    script = lambda: [(0.3, bytes(2400)), (0.0, tone(0.05)), (1.2, tone(0.2))]  # noqa: E731
    seen = with_server(script, lambda client: client.speak({"input": "hi"}))
    figures = measure_response(seen)
    assert seen.status == 200 and seen.seconds == pytest.approx(0.3)
    assert 0.3 <= figures.ttfb < 0.3 + TOLERANCE and figures.leading_silence == pytest.approx(0.05)
    assert figures.first_audible is not None and figures.first_audible - figures.ttfb < TOLERANCE
    assert len(figures.underruns) == 1 and 1.05 <= figures.underruns[0] < 1.1 + TOLERANCE
    assert 1.5 <= figures.e2e < 1.5 + TOLERANCE


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Each answer takes a second; all ten requests are sent within the first half."""
    plan = [PlannedRequest(0.05 * number, {"input": str(number)}) for number in range(10)]
    result: LoadResult = with_server(lambda: [(1.0, tone(0.1))], lambda client: run_open_loop(client, plan))
    assert len(result.traces) == 10 and result.max_open == 10 and not result.dropped
    lags = [one.dispatched - one.planned for one in result.traces]
    assert min(lags) >= 0 and float(np.median(lags)) < TOLERANCE
    assert 1.45 <= result.window < 1.45 + 3 * TOLERANCE
    summary = result.summary()
    assert summary["clean"] and summary["ttfb"]["p50"] >= 1.0
    assert summary["audio_s_per_s"] == pytest.approx(1.0 / result.window)


def test_more_than_may_be_open_are_dropped_and_told() -> None:
    plan = [PlannedRequest(0.01 * number, {"input": "hi"}) for number in range(8)]
    result: LoadResult = with_server(lambda: [(1.0, tone(0.1))], lambda client: run_open_loop(client, plan, max_open=5))
    summary = result.summary()
    assert (summary["dropped"], summary["whole"], summary["requests"]) == (3, 5, 8) and not summary["clean"]


def test_refusals_broken_and_empty_responses_are_no_speech() -> None:
    refused = with_server(lambda: [(0, b'{"error": {}}')], lambda client: client.speak({}), status=429)
    broken = with_server(lambda: [(0, tone(0.1)), (0, None)], lambda client: client.speak({}))
    empty = with_server(lambda: [], lambda client: client.speak({}))
    assert refused.error.startswith('{"error"') and refused.status == 429
    assert "RemoteProtocolError" in broken.error and empty.error == "the response has no audio"

    async def nobody() -> Any:
        return await SpeechClient("http://127.0.0.1:1", clock=now).speak({})

    unreachable = asyncio.run(nobody())
    assert unreachable.status == 0 and "ConnectError" in unreachable.error
    summary = LoadResult([refused, broken, empty, unreachable], window=1.0).summary()
    assert (summary["refused"], summary["failed"], summary["whole"]) == (1, 3, 0) and not summary["clean"]
    assert summary["ttfb"] is None


def test_listeners_hear_one_text_after_the_other_in_real_time() -> None:
    """Half a second of audio comes at once: a listener asks about twice a second, not as fast as it is answered."""
    result: LoadResult = with_server(
        lambda: [(0, tone(0.5))],
        lambda client: run_listeners(client, lambda: {"input": "hi"}, listeners=3, seconds=2.0),
    )
    assert 3 <= len(result.traces) <= 3 * 4 and result.summary()["clean"]
    assert result.summary()["underruns"] == 0


def test_a_slow_server_fails_its_listeners() -> None:
    slow = lambda: [(0, tone(0.1)), (0.5, tone(0.1))]  # noqa: E731
    result: LoadResult = with_server(
        slow, lambda client: run_listeners(client, lambda: {"input": "hi"}, listeners=2, seconds=1.0)
    )
    summary = result.summary()
    assert not summary["clean"] and summary["requests_with_underruns"] == summary["whole"] > 0
    assert 0.35 < summary["longest_underrun"] < 0.4 + TOLERANCE


def test_the_figures_are_those_that_are_published() -> None:
    from benchmarks.load_client import FIGURES

    assert set(FIGURES) | {"seconds", "underruns"} == set(RequestFigures.__dataclass_fields__)
