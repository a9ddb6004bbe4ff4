"""Soak test of a server: thousands of requests, many of which are given up, and what is left of them.

    .venv/bin/python benchmarks/soak.py --requests 10000 --watermark --out docs/benchmarks/soak.json
    .venv/bin/python benchmarks/soak.py --instant --requests 40000    a model of no time: the HTTP process alone works

Starts `myna serve`, sends requests of all kinds from several clients at once, and samples anonymous memory, threads and
files of both processes. Requests come in rounds: a sample is taken when all of a round have ended, so that it does not
depend on what is in flight. At the end no row may be taken and no request open, and nothing may have grown since the
warm-up: a line is fitted to each figure over the requests behind it, and its slope told with a 95 % interval. Samples
follow one another closely, so that the interval is by blocks of them. Writes a JSON file and a plot of the memory
beside it. Linux alone tells a process's anonymous memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil  # type: ignore[import-untyped]
from scipy import stats  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.figures import plot_file, save_figures
from benchmarks.serve import SYNTHETIC_SERVER

from myna.commands.display import progress_bars
from myna.core.io import save_text
from myna.core.progress import ProgressCallback
from myna.report.page import Curve

TEXTS = ("Yes.", "Good morning.", "It was a fine day.", "They walked along the river, and on, for a long time.")
WARM_UP_SHARE = 0.2
"""Share of the requests after which growth counts: allocators and caches have their size by then."""
ROUNDS = 40
REST_SECONDS = 1.0
"""Seconds between the end of a round, with all connections closed, and its sample."""
FIT_BLOCKS = 16
"""Parts of the samples behind the warm-up, whose means the line is fitted to."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=600.0, help="End after so long, with fewer requests.")
    parser.add_argument("--max-seconds", type=float, default=4.0, help="Of speech in one request.")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--source", default="fledgling")
    parser.add_argument("--instant", action="store_true", help="Serve a model of no time instead.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--watermark", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def anonymous_mib(process: psutil.Process) -> float:
    """Memory a process has allocated, in RAM or swapped out: no pages of files.

    The pages of a library count as private (USS) from the moment that the last other process with it ends: with torch
    that was 121 MiB at once.
    """
    return float(sum(region.anonymous + region.swap for region in process.memory_maps())) / 2**20


class Server:
    """A server process and its engine process."""

    def __init__(self, arguments: argparse.Namespace, home: str) -> None:
        command = [sys.executable, "-m", "myna", "serve", arguments.source, "--port", "0"]
        if arguments.instant:
            command = [sys.executable, str(SYNTHETIC_SERVER), "--instant"]
        command += ["--device", arguments.device]
        command += ["--streams", str(arguments.streams), "--queue", str(arguments.clients)]
        command += [] if arguments.watermark else ["--no-watermark"]
        variables = {**os.environ, "MYNA_HOME": home, "PYTHONUNBUFFERED": "1"}
        self.log = Path(home, "server.log")
        with self.log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=variables)
        while "Ctrl+C ends it" not in self.log.read_text():
            if self.process.poll() is not None:
                sys.exit(self.log.read_text())
            time.sleep(0.1)
        found = re.search(r"http://[\d.]+:\d+", self.log.read_text())
        assert found is not None
        self.url = found[0]
        self.http = psutil.Process(self.process.pid)
        self.engine = max(self.http.children(), key=lambda child: child.memory_info().rss)

    def sample(self) -> dict[str, Any]:
        """Anonymous memory of each process, its threads and its open files."""
        return {
            name: {
                "anonymous_mib": round(anonymous_mib(process), 1),
                "threads": process.num_threads(),
                "files": process.num_fds(),
            }
            for name, process in (("http", self.http), ("engine", self.engine))
        }

    def metrics(self) -> str:
        return httpx2.get(f"{self.url}/metrics", timeout=30).text

    def metric(self, name: str) -> float:
        lines = self.metrics().splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}(\{{.*\}})? ", line))

    def finish_reasons(self) -> dict[str, int]:
        """Count how requests ended in the engine: a client may give up what was spoken to its end already."""
        pattern = r'^myna_requests_finished_total\{finish_reason="(\w+)"\} (\S+)$'
        return {reason: int(float(count)) for reason, count in re.findall(pattern, self.metrics(), re.MULTILINE)}


async def run_clients(
    server: Server, arguments: argparse.Namespace, samples: list[dict[str, Any]], progress: ProgressCallback
) -> Counter[str]:
    """Send all requests; how they ended."""
    ends, rng, deadline = Counter[str](), random.Random(arguments.seed), time.monotonic() + 60 * arguments.minutes

    async def client(web: httpx2.AsyncClient, numbers: Iterator[int]) -> None:
        for _ in numbers:
            ends[await send_request(web, rng, arguments.max_seconds)] += 1
            progress("requests", ends.total(), arguments.requests)

    samples.append({"request": 0, **server.sample()})
    while ends.total() < arguments.requests and time.monotonic() < deadline:
        left = arguments.requests - ends.total()
        numbers = iter(range(min(left, max(1, arguments.requests // ROUNDS))))
        limits = httpx2.Limits(max_connections=2 * arguments.clients)
        async with httpx2.AsyncClient(base_url=server.url, timeout=300, limits=limits) as web:
            await asyncio.gather(*(client(web, numbers) for _ in range(arguments.clients)))
        while server.metric("myna_requests_in_flight"):
            await asyncio.sleep(0.1)
        await asyncio.sleep(REST_SECONDS)
        samples.append({"request": ends.total(), **server.sample()})
        print(json.dumps(samples[-1]), file=sys.stderr, flush=True)
    return ends


async def send_request(web: httpx2.AsyncClient, rng: random.Random, max_seconds: float) -> str:
    """One request of a random kind; every third is given up after some bytes, or before the first."""
    body = {
        "input": rng.choice(TEXTS),
        "response_format": rng.choice(["mp3", "opus", "aac", "flac", "wav", "pcm"]),
        "stream_format": rng.choice(["audio", "audio", "sse"]),
        "seed": rng.randrange(1000),
        "max_seconds": max_seconds,
    }
    if rng.random() < 0.03:
        body["voice"] = "nobody"
    given_up_after = rng.choice([0, 0, 3000, 20_000]) if rng.random() < 1 / 3 else None
    try:
        if given_up_after == 0:
            whole = await asyncio.wait_for(web.post("/v1/audio/speech", json=body), rng.random() * 0.5)
            return "finished" if whole.status_code == 200 else f"status {whole.status_code}"
        received = 0
        async with web.stream("POST", "/v1/audio/speech", json=body) as response:
            async for piece in response.aiter_raw():
                received += len(piece)
                if given_up_after is not None and received > given_up_after:
                    return "given up"
            return "finished" if response.status_code == 200 else f"status {response.status_code}"
    except TimeoutError:
        return "given up"
    except httpx2.TransportError as error:
        return f"{type(error).__name__}: {error}"


def fitted_growth(samples: list[dict[str, Any]], process: str, figure: str) -> dict[str, Any]:
    """Slope of a figure in 1,000 requests after the warm-up, its 95 % interval, and what that is over all of them."""
    kept = samples[round(WARM_UP_SHARE * len(samples)) :]
    blocks = [block for block in np.array_split(np.arange(len(kept)), FIT_BLOCKS) if len(block)]
    requests = [float(np.mean([kept[index]["request"] / 1000 for index in block])) for block in blocks]
    values = [float(np.mean([kept[index][process][figure] for index in block])) for block in blocks]
    result: Any = stats.linregress(requests, values)
    # All equal: the fit knows no error of that.
    margin = float(stats.t.ppf(0.975, len(blocks) - 2) * result.stderr) if np.ptp(values) else 0.0
    slope, span = float(result.slope), (kept[-1]["request"] - kept[0]["request"]) / 1000
    return {
        "per_1000_requests": round(slope, 4),
        "interval": [round(slope - margin, 4), round(slope + margin, 4)],
        "over_the_run": round(slope * span, 2),
        "mean": round(float(np.mean(values)), 2),
    }


def memory_rows(samples: list[dict[str, Any]]) -> list[list[float]]:
    """Request, memory of the engine process and of the HTTP process, of every sample."""
    return [[sample["request"], *(sample[name]["anonymous_mib"] for name in ("engine", "http"))] for sample in samples]


def drawing(samples: list[dict[str, Any]]) -> str:
    """Memory of both processes against requests, as an SVG that stands alone."""
    curves = [
        Curve(name, [(row[0], row[column]) for row in memory_rows(samples)], "line", column - 1)
        for column, name in ((1, "engine process"), (2, "HTTP process"))
    ]
    return plot_file(curves, title="Anonymous memory in a soak test", x_label="requests", y_label="MiB")


def main() -> None:
    arguments = parse()
    if not psutil.LINUX:
        sys.exit("benchmarks/soak.py counts anonymous memory, which only Linux tells: run it there, or in a container.")
    with tempfile.TemporaryDirectory() as home:
        server = Server(arguments, home)
        samples, began = list[dict[str, Any]](), time.monotonic()
        try:
            with progress_bars() as progress:
                ends = asyncio.run(run_clients(server, arguments, samples, progress))
            seconds = time.monotonic() - began
            time.sleep(2)
            figures = ("anonymous_mib", "threads", "files")
            left = {
                name: server.metric(f"myna_{name}")
                for name in ("streams_speaking", "requests_waiting", "requests_in_flight")
            }
            result = {
                "command": shlex.join(["benchmarks/soak.py", *sys.argv[1:]]),
                "source": "instant" if arguments.instant else arguments.source,
                "requests": ends.total(),
                "clients": arguments.clients,
                "streams": arguments.streams,
                "seconds": round(seconds, 1),
                "audio_seconds": round(server.metric("myna_audio_seconds_total"), 1),
                "ends": dict(ends.most_common()),
                "finish_reasons": server.finish_reasons(),
                "left_open": left,
                "engine_restarts": server.metric("myna_engine_restarts"),
                "growth": {
                    process: {figure: fitted_growth(samples, process, figure) for figure in figures}
                    for process in ("http", "engine")
                },
                "watermark": arguments.watermark,
                "first": samples[0],
                "last": {"request": ends.total(), **server.sample()},
                "tracebacks": server.log.read_text().count("Traceback"),
            }
            server.process.send_signal(signal.SIGTERM)
            result["exit_code"] = server.process.wait(60)
        finally:
            print(server.log.read_text()[-10_000:], file=sys.stderr)
            if server.process.poll() is None:
                server.process.kill()
    print(json.dumps(result, indent=2))
    if arguments.out is not None:
        save_figures(arguments.out, result)
        save_text(arguments.out.with_suffix(".svg"), drawing(samples))


if __name__ == "__main__":
    main()
