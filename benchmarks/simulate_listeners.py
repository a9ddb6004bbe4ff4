"""Listeners of the running batch in simulated time: is every playback fed, whatever the host does?

python benchmarks/simulate_listeners.py --listeners 100 200 400 --seeds 0 1 2
python benchmarks/simulate_listeners.py --listeners 200 --pauses 12 14 16 --pause-ms 300     the host stops then

The batch with its streams, windows and rows is the real one, on a clock that the times below move: those of an H200. A
step's were measured (docs/benchmarks/speak.md); the others were chosen so that first audio and whole responses of 100,
200 and 400 listeners were within a fifth of those in docs/benchmarks/serve.json, with the scheduling of that day.
Listeners and figures are those of `benchmarks/serve.py --listeners`. It needs no card, is the same in every run, and
knows nothing of HTTP.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.load_client import LoadResult, ResponseTrace
from benchmarks.serve import RequestBodies
from benchmarks.synthetic import RandomHiggs
from benchmarks.synthetic_server import InstantDecoder, ToneCodec, tone_engine

from myna.audio.files import pcm16
from myna.data.codec import Codes, PendingSamples
from myna.models.base import RenderedSequence, Sampling
from myna.models.speech_decoder import StepResult
from myna.speak.engine import SpeechRequest
from myna.speak.live import LiveBatch

STEP_MS = {1: 1.8, 2: 2.3, 4: 2.4, 8: 2.4, 16: 2.6, 32: 2.8, 64: 3.4, 128: 4.7, 256: 7.5, 512: 13.0}
"""Of the model, by rows."""
PREFILL_SECONDS = 0.0045
DECODE_SECONDS, DECODE_FRAME_SECONDS = 0.0005, 13e-6
"""Of the codec: a call, and every frame of its windows."""
HOST_SECONDS, HOST_STREAM_SECONDS = 0.0004, 5e-6
"""Beside the model: a step, and every stream in it."""
HOST_REQUEST_SECONDS = 0.001
STOP_SHARE = 0.0005
"""Of frames after which random weights find an end."""


class SimulatedClock:
    """Time of the host, and of what it has enqueued on a device."""

    def __init__(self) -> None:
        self.now = self._device = 0.0

    def __call__(self) -> float:
        return self.now

    def enqueue(self, seconds: float) -> float:
        """When it will be done."""
        self._device = max(self._device, self.now) + seconds
        return self._device

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


class SimulatedStep:
    """Result of a step that is there at a moment of the simulated clock."""

    def __init__(self, clock: SimulatedClock, result: StepResult, ends: float) -> None:
        self._clock, self._result, self._ends = clock, result, ends

    def result(self) -> StepResult:
        self._clock.wait_until(self._ends)
        return self._result


class SimulatedDecoder(InstantDecoder):
    """Decoding batch that takes simulated time, and finds an end at random."""

    def __init__(self, family: RandomHiggs, rows: int, positions: int, clock: SimulatedClock, seed: int) -> None:
        super().__init__(family, rows, positions, 0.0)
        self._clock, self._random = clock, np.random.default_rng(seed)

    def bucket(self, rows: int) -> int:
        return min(size for size in STEP_MS if size >= rows)

    def prefill(self, row: int, prompt: RenderedSequence) -> None:  # noqa: ARG002
        self._clock.enqueue(PREFILL_SECONDS)

    def begin(self, row: int, positions: int, sampling: Sampling, max_frames: int) -> None:
        frames = min(max_frames, int(self._random.geometric(STOP_SHARE)))
        super().begin(row, positions, sampling, frames)

    def step(self, rows: int, longest: int) -> SimulatedStep:  # type: ignore[override]
        result = super().step(rows, longest).result()
        return SimulatedStep(self._clock, result, self._clock.enqueue(STEP_MS[self.bucket(rows)] / 1000))


class SimulatedCodec(ToneCodec):
    """Codec whose windows take simulated time."""

    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__()
        self._clock = clock

    def decode_windows(self, windows: Sequence[Codes]) -> PendingSamples:
        frames, fetch = sum(map(len, windows)), super().decode_windows(windows)
        ends = self._clock.enqueue(DECODE_SECONDS + DECODE_FRAME_SECONDS * frames) if frames else 0.0

        def wait() -> list[Any]:
            self._clock.wait_until(ends)
            return fetch()

        return wait


def simulate_listeners(
    listeners: int, seed: int, seconds: float = 30.0, pauses: Sequence[float] = (), pause_seconds: float = 0.0
) -> LoadResult:
    """`load_client.run_listeners` in simulated time. At the moments of `pauses` the host stops for some time."""
    clock = SimulatedClock()

    def make_decoder(family: RandomHiggs, rows: int, positions: int) -> SimulatedDecoder:
        return SimulatedDecoder(family, rows, positions, clock, seed)

    engine = tone_engine(make_decoder, SimulatedCodec(clock))
    batch = LiveBatch(engine, rows=512, positions=1024, max_waiting=1024, clock=clock)
    start, bodies = clock.now, RequestBodies({}, seed, sentences=4, timed=True)
    moments = [start + float(begin) for begin in np.random.default_rng(seed).uniform(0, seconds / 4, listeners)]
    heapq.heapify(moments)
    stops = sorted(pauses, reverse=True)
    traces, result = dict[str, ResponseTrace](), LoadResult([], max_open=listeners)
    while moments or batch.busy:
        while moments and moments[0] <= clock.now:
            moment = heapq.heappop(moments)
            if moment >= start + seconds:
                continue
            body, id = bodies.next(), f"{len(traces)}"
            sampling = Sampling(seed=len(traces), max_seconds=body["max_seconds"])
            batch.submit(id, engine.plan(SpeechRequest(body["input"], id=id), sampling))
            traces[id] = ResponseTrace(moment, moment, status=200)
            clock.now += HOST_REQUEST_SECONDS
        if not batch.busy:
            clock.wait_until(min(moments, default=clock.now))
            continue
        events = batch.step()
        clock.now += HOST_SECONDS + HOST_STREAM_SECONDS * batch.speaking
        if stops and clock.now >= start + stops[-1]:
            stops.pop()
            clock.now += pause_seconds
        for event in events:
            trace = traces[event.id]
            if len(event.samples):
                trace.parts.append((clock.now, pcm16(event.samples)))
            if event.end is not None:
                trace.ended = clock.now
                result.traces.append(trace)
                heapq.heappush(moments, trace.playback_end)
    result.window = clock.now - start
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listeners", type=int, nargs="+", default=[400])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trial-seconds", type=float, default=30.0)
    parser.add_argument("--pauses", type=float, nargs="+", default=[], help="seconds at which the host stops")
    parser.add_argument("--pause-ms", type=float, default=300.0, help="that it stops for")
    asked = parser.parse_args()
    for listeners in asked.listeners:
        for seed in asked.seeds:
            settings = (asked.trial_seconds, asked.pauses, asked.pause_ms / 1000)
            summary = simulate_listeners(listeners, seed, *settings).summary()
            shown = ("requests", "requests_with_underruns", "longest_underrun", "first_audible", "e2e")
            print(json.dumps({"listeners": listeners, "seed": seed} | {name: summary[name] for name in shown}))


if __name__ == "__main__":
    main()
