"""Load test of a speech server: how soon it is heard, and how many it serves at a time without a gap.

python benchmarks/serve.py --model fledgling --rates 0.5 1 2 --out FOLDER         starts `myna serve`, on any device
python benchmarks/serve.py --url http://HOST:8000 --rates 1 10 --out FOLDER       any server of OpenAI's contract
python benchmarks/serve.py --random --reference --rates 20 10 1 --requests 70 --listeners 400 --stream-seeds 0
    --out docs/benchmarks -- --streams 512         in 8 minutes on an H200, of which the server takes 1.5 to start
python benchmarks/serve.py --instant --rates 50 100 --out FOLDER                  a model of no time: all but the model
python benchmarks/serve.py --merge A/serve.json B/serve.json --out FOLDER         merges results of commands

Requests come as they would from many people: at random moments of a given rate, whether earlier ones are answered or
not, the same moments for the same seed. Each asks for one of the demo's sentences as raw PCM; with `--reference` in the
voice of one of its recordings, sent along; with `--new-references` in one that the server has not seen before.
`benchmarks/load_client.py` defines every figure. A rate is `clean` when
every request was answered, none was dropped, and no player had an underrun. `--streams` then searches for the most
people who can listen at a time, each to one text of four sentences after the other, without an underrun. `--random`
serves random weights of the full size, which find no end: a text is spoken for as long as its recording is. Words
behind `--` go to the server. Writes serve.json and serve.svg after every seed; with `--instant`, serve-http.json and
serve-http.svg.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import io
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil  # type: ignore[import-untyped]
import soundfile

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.figures import plot_file, save_figures
from benchmarks.load_client import (
    FIGURES,
    PlannedRequest,
    SpeechClient,
    largest_passing,
    now,
    poisson_arrivals,
    run_listeners,
    run_open_loop,
)

from myna import __version__
from myna.commands.display import progress_bars
from myna.core.io import save_text
from myna.core.progress import ProgressCallback
from myna.report.page import Curve

RECORDINGS = Path(__file__).parent.parent / "src/myna/demo/recordings"
SYNTHETIC_SERVER = Path(__file__).parent / "synthetic_server.py"
START_SECONDS = 300.0
"""Seconds that a server may take to load its model and to be warm."""
ENGINE_DIED = "the engine process ended with code"
"""Words in the log of a server whose engine cannot start: it would try again for ever."""
REFERENCE_NOISE = 1e-3
"""Level of noise, of a full scale of 1: -60 dB."""
MAX_LAG_SECONDS = 0.02
"""Scheduling lag (p99) above which the client was too busy to measure."""

SHOWN_OF_SEED: tuple[str, ...] = ("seed", "requests", "requests_with_underruns", "clean", "first_audible")
SHOWN_OF_TRIAL: tuple[str, ...] = (
    *("listeners", "seed", "trial_seconds", "requests", "requests_with_underruns"),
    *("clean", "audio_s_per_s", "first_audible", "rtf"),
)


class Sentence(NamedTuple):
    """A sentence of the demo, and how long its recording is."""

    text: str
    seconds: float
    recording: Path


@cache
def demo_sentences() -> tuple[Sentence, ...]:
    rows = [json.loads(line) for line in (RECORDINGS / "manifest.jsonl").read_text(encoding="utf-8").splitlines()]
    files = [RECORDINGS / row["audio"] for row in rows]
    return tuple(
        Sentence(row["text"], soundfile.info(file).duration, file) for row, file in zip(rows, files, strict=True)
    )


def demo_reference() -> dict[str, str]:
    """A recording of about three seconds, as a request carries it."""
    sentence = demo_sentences()[0]
    audio = base64.b64encode(sentence.recording.read_bytes()).decode()
    return {"ref_audio": f"data:audio/ogg;base64,{audio}", "ref_text": sentence.text}


def new_reference(random: np.random.Generator) -> dict[str, str]:
    """Return the recording with some noise, which no server has seen before."""
    sentence, encoded = demo_sentences()[0], io.BytesIO()
    samples, sample_rate = soundfile.read(sentence.recording, dtype="float32")
    noisy = samples + REFERENCE_NOISE * random.standard_normal(len(samples), np.float32)
    soundfile.write(encoded, noisy.clip(-1, 1), sample_rate, format="FLAC")
    audio = base64.b64encode(encoded.getvalue()).decode()
    return {"ref_audio": f"data:audio/flac;base64,{audio}", "ref_text": sentence.text}


class RequestBodies:
    """Bodies of requests: texts of so many sentences, in an order of their own for every seed, and fields that all
    have. With `timed`, no text takes longer than its recording: random weights find no end."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        seed: int,
        *,
        sentences: int = 1,
        timed: bool = False,
        new_references: bool = False,
    ) -> None:
        self._fields, self._sentences, self._timed = fields, sentences, timed
        self._new_references, self._random = new_references, np.random.default_rng(seed)

    def next(self) -> dict[str, Any]:
        known = demo_sentences()
        chosen = [known[index] for index in self._random.integers(len(known), size=self._sentences)]
        limit = {"max_seconds": round(sum(one.seconds for one in chosen), 2)} if self._timed else {}
        reference = new_reference(self._random) if self._new_references else {}
        return {**self._fields, **limit, **reference, "input": " ".join(one.text for one in chosen)}


@contextmanager
def server_process(command: Sequence[str], home: str, log: Path | None = None) -> Iterator[tuple[str, int]]:
    """A server of our own; its address and its process id once it is ready."""
    log, variables = log or Path(home, "server.log"), {**os.environ, "MYNA_HOME": home, "PYTHONUNBUFFERED": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=variables)
    try:
        deadline = time.monotonic() + START_SECONDS
        while "Ctrl+C ends it" not in (output := log.read_text(encoding="utf-8", errors="replace")):
            if process.poll() is not None or ENGINE_DIED in output or time.monotonic() > deadline:
                sys.exit(f"the server did not start:\n{output}")
            time.sleep(0.1)
        address = re.search(r"http://[\w.]+:\d+", output)
        assert address is not None, output
        yield address[0], process.pid
    finally:
        process.terminate()
        process.wait(60)


def rate_row(rate: float, summaries: Sequence[Mapping[str, Any]], reference: str) -> dict[str, Any]:
    """One rate over all seeds: the median of each percentile, and its range."""

    def over_seeds(name: str, share: str) -> list[float]:
        return [summary[name][share] for summary in summaries if summary[name] is not None]

    figures = {
        name: {
            share: {"median": statistics.median(values), "range": [min(values), max(values)]}
            for share in ("p50", "p95", "p99")
            if (values := over_seeds(name, share))
        }
        for name in FIGURES
    }
    return {
        "name": f"{rate:g} requests a second",
        "rate": rate,
        "reference": reference,
        "clean": all(summary["clean"] for summary in summaries),
        "client_kept_up": all(lag <= MAX_LAG_SECONDS for lag in over_seeds("scheduling_lag", "p99")),
        "audio_s_per_s": statistics.median(summary["audio_s_per_s"] for summary in summaries),
        "processor_ms_per_request": {
            name: statistics.median(summary["processor_ms_per_request"][name] for summary in summaries)
            for name in summaries[0]["processor_ms_per_request"]
        },
        **figures,
        "seeds": list(summaries),
    }


async def find_streams(
    client: SpeechClient, asked: argparse.Namespace, fields: Mapping[str, Any], progress: ProgressCallback
) -> dict[str, Any]:
    """The most listeners without an underrun, and every trial."""
    trials: list[dict[str, Any]] = []

    async def passes(listeners: int) -> bool:
        for seed in asked.stream_seeds or asked.seeds:
            progress(f"{listeners} listeners", 0, None)
            timed = asked.synthetic is not None
            bodies = RequestBodies(fields, seed, sentences=asked.listener_sentences, timed=timed)
            result = await run_listeners(client, bodies.next, listeners, asked.trial_seconds, seed)
            trials.append(
                {"listeners": listeners, "seed": seed, "trial_seconds": asked.trial_seconds, **result.summary()}
            )
            if not trials[-1]["clean"]:
                return False
        return True

    if asked.listeners:
        passed = [listeners for listeners in asked.listeners if await passes(listeners)]
        return {"most_listeners": max(passed, default=0), "trials": trials}
    most = await largest_passing(passes, asked.first_streams, asked.max_streams, asked.resolution)
    return {"most_listeners": most, "trials": trials}


def processor_seconds(server: int | None) -> dict[str, float]:
    """Processor time so far: of this client, and of a server of our own, its HTTP process and the others."""
    processes = {"client": [psutil.Process()]}
    if server is not None:
        http = psutil.Process(server)
        processes |= {"http": [http], "engine": http.children(recursive=True)}
    return {
        name: sum(sum(process.cpu_times()[:2]) for process in group if process.is_running())
        for name, group in processes.items()
    }


async def run(
    url: str,
    asked: argparse.Namespace,
    progress: ProgressCallback,
    save: Callable[[dict[str, Any]], None],
    server: int | None = None,
) -> None:
    """All measurements of one server, saved one by one; `server` is the process id of one of our own."""
    client = SpeechClient(url, api_key=asked.api_key, clock=now)
    fields = {
        **{"model": asked.name or (await client.models())[0], "voice": asked.voice, "response_format": "pcm"},
        **(demo_reference() if asked.reference else {}),
    }
    for field in asked.field:
        name, _, value = field.partition("=")
        fields[name] = json.loads(value)
    bodies = RequestBodies(fields, 0, timed=asked.synthetic is not None)
    warm_up = await asyncio.gather(*(client.speak(bodies.next()) for _ in range(asked.warm_up)))
    for trace in warm_up:
        if trace.error:
            sys.exit(f"the server does not speak ({trace.status}): {trace.error}")
    gc.collect()
    gc.freeze()  # the client shall have no pauses of its own
    facts: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "server": asked.model or asked.synthetic or asked.url,
        "settings": {key: value for key, value in fields.items() if key not in ("ref_audio", "ref_text")}
        | {"listener_sentences": asked.listener_sentences}
        | {"serve_options": asked.serve_options},
        "rows": [],
        "streams": None,
    }
    for rate in asked.rates:
        requests, summaries = min(asked.requests, round(rate * asked.max_rate_seconds)), []
        for seed in asked.seeds:
            stage = f"{rate:g} a second, seed {seed}"
            progress(stage, 0, requests)
            on_done = lambda done, stage=stage, total=requests: progress(stage, done, total)  # noqa: E731
            bodies = RequestBodies(fields, seed, timed=asked.synthetic is not None, new_references=asked.new_references)
            moments = poisson_arrivals(rate, requests, seed)
            plan = [PlannedRequest(moment, bodies.next()) for moment in moments]
            before = processor_seconds(server)
            result = await run_open_loop(client, plan, on_done=on_done)
            spent = {name: total - before[name] for name, total in processor_seconds(server).items()}
            cost = {name: 1000 * seconds / requests for name, seconds in spent.items()}
            summaries.append({"seed": seed, **result.summary(), "processor_ms_per_request": cost})
            reference = "new in every request" if asked.new_references else "the same" if asked.reference else "none"
            save({**facts, "rows": [*facts["rows"], rate_row(rate, summaries, reference)]})
        facts["rows"].append(rate_row(rate, summaries, reference))
    if asked.streams or asked.listeners:
        facts["streams"] = await find_streams(client, asked, fields, progress)
        save(facts)
    await client.close()


def merge_facts(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Measurements of several commands as if they were one's: rows of a rate with the seeds of all, and every trial of
    listeners. Where a seed was measured twice, the last one counts. The date is that of the latest."""
    machines = [machine for part in parts for machine in part.get("machines", [part["machine"]])]
    latest = max(part["date"] for part in parts)
    merged: dict[str, Any] = {**parts[0], "date": latest, "machines": machines, "rows": [], "streams": None}
    by_rate: dict[tuple[float, str], dict[int, Any]] = {}
    trials: dict[tuple[int, int], dict[str, Any]] = {}
    for part in parts:
        for row in part["rows"]:
            seeds = by_rate.setdefault((row["rate"], row["reference"]), {})
            seeds |= {summary["seed"]: summary for summary in row["seeds"]}
        for trial in (part["streams"] or {"trials": ()})["trials"]:
            trials[trial["listeners"], trial["seed"]] = trial
    for (rate, reference), seeds in sorted(by_rate.items()):
        merged["rows"].append(rate_row(rate, [summary for _, summary in sorted(seeds.items())], reference))
    if trials:
        failed = [trial["listeners"] for trial in trials.values() if not trial["clean"]]
        passed = [listeners for listeners, _ in trials if listeners < min(failed, default=listeners + 1)]
        every = [trial for _, trial in sorted(trials.items())]
        merged["streams"] = {"most_listeners": max(passed, default=0), "trials": every}
    return merged


def published(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return merged results without the details of single seeds and trials that docs/benchmarks/serve.md leaves out."""
    rows = [{**row, "seeds": [_pick(seed, SHOWN_OF_SEED) for seed in row["seeds"]]} for row in facts["rows"]]
    streams = facts["streams"]
    if streams is not None:
        streams = {**streams, "trials": [_pick(trial, SHOWN_OF_TRIAL) for trial in streams["trials"]]}
    return {**facts, "rows": rows, "streams": streams}


def _pick(summary: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: summary[name] for name in names if name in summary}


def machine() -> dict[str, Any]:
    gpu = ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "gpu": gpu,
        "versions": {"myna": __version__} | {name: version(name) for name in ("torch", "uvicorn", "httpx2")},
    }


def drawing(rows: Sequence[Mapping[str, Any]]) -> str:
    """First audible audio against the rate, as an SVG that stands alone."""
    rows = [row for row in rows if row["reference"] != "new in every request"]
    curves = [
        Curve(share, [(row["rate"], 1000 * row["first_audible"][share]["median"]) for row in rows], "dots", color)
        for color, share in enumerate(("p50", "p95", "p99"))
        if all(share in row["first_audible"] for row in rows)
    ]
    return plot_file(curves, title="First audible audio", x_label="requests a second", y_label="milliseconds")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument("--url", default="", help="address of a server that runs already, without /v1")
    server.add_argument(
        "--merge", type=Path, nargs="+", default=[], help="serve.json of earlier commands, merged and shortened"
    )
    server.add_argument("--model", default="", help="start `myna serve` with this run or model")
    for name, text in (
        ("instant", "a model of no time"),
        ("random", "random weights of the full size"),
        ("tiny", "very small random weights"),
    ):
        server.add_argument(f"--{name}", dest="synthetic", action="store_const", const=name, help=f"serve {text}")
    parser.add_argument("--name", default="", help="model to ask for; by default the first of /v1/models")
    parser.add_argument("--voice", default="default")
    parser.add_argument("--reference", action="store_true", help="send a recording of the demo's voice along")
    parser.add_argument("--new-references", action="store_true", help="send another recording along every time")
    parser.add_argument("--field", action="append", default=[], help="NAME=JSON, in every request; repeatable")
    parser.add_argument("--api-key", default=os.environ.get("MYNA_API_KEY", ""))
    parser.add_argument("--rates", type=float, nargs="*", default=[1.0], help="requests a second")
    parser.add_argument("--requests", type=int, default=200, help="of each rate and seed")
    parser.add_argument("--max-rate-seconds", type=float, default=600.0, help="send fewer where that takes longer")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--warm-up", type=int, default=8, help="requests before anything is measured")
    parser.add_argument("--streams", action="store_true", help="search for the most listeners without an underrun")
    parser.add_argument("--listeners", type=int, nargs="+", default=[], help="try these numbers, and search for none")
    parser.add_argument("--stream-seeds", type=int, nargs="+", help="of the search for listeners; all, if not given")
    parser.add_argument("--resolution", type=float, default=0.05, help="of that search")
    parser.add_argument("--first-streams", type=int, default=8)
    parser.add_argument("--max-streams", type=int, default=1024)
    parser.add_argument("--listener-sentences", type=int, default=4, help="of a text in that search, about 13 s")
    parser.add_argument("--trial-seconds", type=float, default=30.0, help="that each number of listeners is tried")
    parser.add_argument("--server-log", type=Path, help="where a server of our own writes what it says")
    parser.add_argument("--out", type=Path, required=True)
    all_words = list(sys.argv[1:] if words is None else words)
    end = all_words.index("--") if "--" in all_words else len(all_words)
    asked = parser.parse_args(all_words[:end])
    asked.serve_options = all_words[end + 1 :]
    return asked


def main() -> None:
    asked = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # so that our own server ends too
    name = "serve-http" if asked.synthetic == "instant" else "serve"

    def save(facts: dict[str, Any]) -> None:
        save_figures(asked.out / f"{name}.json", facts)
        save_text(asked.out / f"{name}.svg", drawing(facts["rows"]))
        if facts["streams"] is not None:
            print(f"most listeners without an underrun: {facts['streams']['most_listeners']}", flush=True)
            return
        row = facts["rows"][-1]
        figures = [(name, row[name]["p95"]["median"]) for name in ("first_audible", "e2e") if row[name]]
        shown = ", ".join(f"{name} p95 {1000 * value:.1f} ms" for name, value in figures)
        print(f"{row['name']}: {shown}; {'clean' if row['clean'] else 'not clean'}", flush=True)

    if asked.merge:
        save(published(merge_facts([json.loads(path.read_text(encoding="utf-8")) for path in asked.merge])))
        return
    with tempfile.TemporaryDirectory(prefix="myna-load-") as home, progress_bars() as progress:
        if asked.url:
            asyncio.run(run(asked.url, asked, progress, save))
            return
        started = ["-m", "myna", "serve", asked.model, "--port", "0"]
        if asked.synthetic:
            started = [str(SYNTHETIC_SERVER), f"--{asked.synthetic}"]
        with server_process([sys.executable, *started, *asked.serve_options], home, asked.server_log) as (url, server):
            asyncio.run(run(url, asked, progress, save, server))


if __name__ == "__main__":
    main()
