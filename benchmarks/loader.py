"""Data loader benchmark: throughput, cost to the training process, and start-up, by dataset size and kind of worker.

python benchmarks/loader.py --out docs/benchmarks
python benchmarks/loader.py --out FOLDER --sizes 1000 10000         a look at the whole, in a minute
python benchmarks/loader.py --failures                              what each kind of worker process does when it fails

Prepared folders are synthetic: clips as long as speech is (log-normal, 9.7 s on average, 1 to 30 s), a hundred of each
speaker, with codes of the true size in shards as `myna prepare` writes them: a million utterances take 4.3 GB of disk,
which are given back. Each size is opened and read by a process of its own, on the CPU alone: with threads, as a
training on the CPU reads it; with worker processes of `myna.data.workers`, as one on a GPU does; and with those of
`torch.utils.data.DataLoader` over the same plans. What counts is how much of its own CPU time a training loses to its
data, since Python has one lock for both. Writes loader.json and loader.svg.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.figures import BarColumn, bars_file, save_figures

from myna.core.config import Recipe, parse_recipe
from myna.core.errors import DataError
from myna.data.code_store import FORMAT, INDEX_FILE
from myna.data.dataset import DatasetInfo
from myna.data.loader import PREFETCH_STEPS, Shard, first_fit_decreasing, start_workers
from myna.data.workers import WorkerPool
from myna.models.higgs_v2.family import HiggsV2, builtin_config
from myna.models.higgs_v2.tiny import SPECIAL_TOKENS
from myna.train.loop import make_loader
from myna.train.memory_plan import largest_batch

SIZES = (1_000, 10_000, 100_000, 1_000_000)
ROW_TOKENS, ROWS_PER_STEP = 16_384, 4
BUDGETS = (2_048, 4_096, 8_192, 16_384, 32_768)
WARM_UP_STEPS, READING_SECONDS = 6, 15.0
"""Steps before all workers have started, and seconds that are measured."""
GPU_TOKENS_PER_SECOND = 60_000
"""Tokens a second that an H200 trains on."""
MEAN_SECONDS, SPREAD, SHORTEST, LONGEST = 9.7, 0.55, 1.0, 30.0
CLIPS_PER_SPEAKER, SHARD_SECONDS = 100, 600.0
WORDS, WORDS_PER_SECOND = 2_000, 2.6
INFO = DatasetInfo("d" * 32, sample_rate=24_000, frame_rate=25.0, codebooks=8, codebook_size=1024)
METADATA = {"format": FORMAT, "codec": INFO.codec_revision, "sample_rate": str(INFO.sample_rate)}


# Synthetic data


def lexicon() -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(WORDS)]


def sentences(rng: np.random.Generator, seconds: npt.NDArray[np.float64]) -> Iterator[str]:
    """Draw as many words as fit into each clip, common ones more often."""
    words, weights = lexicon(), 1 / np.arange(1, WORDS + 1)
    drawn = rng.choice(WORDS, 200_000, p=weights / weights.sum())
    for length in seconds:
        count = max(2, int(WORDS_PER_SECOND * length))
        start = int(rng.integers(len(drawn) - count))
        yield " ".join(words[number] for number in drawn[start : start + count].tolist())


def synthetic_family() -> HiggsV2:
    """The released model's prompt, with a tokenizer that has learned its words: 4 tokens a second."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1_600, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(sentences(np.random.default_rng(1), np.full(3_000, MEAN_SECONDS)), trainer)
    family = HiggsV2("synthetic", builtin_config(), None)
    family.__dict__["tokenizer"] = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
    return family


def write_dataset(folder: Path, size: int) -> None:
    """A prepared folder of so many utterances, as `myna prepare` would leave it before it has looked at it again."""
    rng = np.random.default_rng(0)
    home = folder / "codes" / INFO.codec_revision[:8]
    home.mkdir(parents=True)
    mean = np.log(MEAN_SECONDS) - SPREAD**2 / 2
    seconds = np.clip(rng.lognormal(mean, SPREAD, size), SHORTEST, LONGEST)
    frames = np.round(seconds * INFO.frame_rate).astype(np.int32)
    texts = list(sentences(rng, seconds))
    speakers = [f"speaker{number // CLIPS_PER_SPEAKER:05d}" for number in range(size)]
    ids = [f"{speaker}/{number:07d}" for number, speaker in enumerate(speakers)]
    keys = [hashlib.blake2b(id.encode(), digest_size=16).hexdigest() for id in ids]
    noise = rng.integers(0, INFO.codebook_size, 4_000_000, dtype=np.uint16)
    cuts = np.flatnonzero(np.diff(np.cumsum(seconds) // SHARD_SECONDS, prepend=-1)).tolist()
    for number, (start, stop) in enumerate(zip(cuts, [*cuts[1:], size], strict=True)):
        count, part = stop - start, slice(start, stop)
        bounds = np.cumsum([0, *(frames[part] * INFO.codebooks)], dtype=np.int64)
        begin = int(rng.integers(len(noise) - bounds[-1]))
        codes = pa.LargeListArray.from_arrays(pa.array(bounds), pa.array(noise[begin : begin + int(bounds[-1])]))
        columns = {
            "key": pa.array(keys[part]),
            "codes": codes,
            "frames": pa.array(frames[part]),
            "codebooks": pa.array(np.full(count, INFO.codebooks, np.int32)),
            "frame_rate": pa.array(np.full(count, INFO.frame_rate)),
            "seconds": pa.array(frames[part] / INFO.frame_rate),
            "text": pa.array(texts[part]),
        }
        write(home / f"{number:05d}.arrow", columns)
    audio = [f"recordings/{id}.wav" for id in ids]
    index = {
        "id": pa.array(ids),
        "audio": pa.array(audio),
        "start": pa.array(np.zeros(size)),
        "end": pa.nulls(size, pa.float64()),
        "key": pa.array(keys),
        "frames": pa.array(frames),
    }
    write(home / INDEX_FILE, index)
    with (folder / "manifest.jsonl").open("w", encoding="utf-8") as file:
        for id, path, text, speaker in zip(ids, audio, texts, speakers, strict=True):
            file.write(json.dumps({"id": id, "audio": path, "text": text, "speaker": speaker, "language": "en"}) + "\n")
    INFO.write(folder)


def write(path: Path, columns: dict[str, Any]) -> None:
    batch = pa.record_batch(columns).replace_schema_metadata(METADATA)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


# Measurements


def make_recipe(folder: Path) -> Recipe:
    tree = {
        "model": {"source": "synthetic"},
        "data": {"train": str(folder), "row_tokens": ROW_TOKENS, "reference_seconds": [3.0, 10.0]},
        "train": {"epochs": 1, "batch_size": ROWS_PER_STEP},
    }
    return parse_recipe(tree, where="benchmark")


def open_for_training(family: HiggsV2, recipe: Recipe) -> Any:
    """Everything `myna train` asks of its data before the first step."""
    loader = make_loader(recipe, family, recipe.data.train)
    largest_batch(loader, recipe, Shard())
    assert loader.fingerprint and loader.rows_in_first_epoch()
    return loader


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result, wall seconds, and CPU seconds."""
    began, busy = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - began, time.process_time() - busy


def peak_mb() -> float:
    """The most this process had since it began, files that it has mapped and looked at included."""
    # Not what `resource` says, which a process inherits from the one that started it.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure_first(folder: Path) -> dict[str, Any]:
    """The manifest is put into columns and all texts are counted, which `myna prepare` does in its place."""
    _, seconds, _ = timed(lambda: open_for_training(synthetic_family(), make_recipe(folder)))
    return {"first_open_seconds": seconds, "first_open_peak_mb": peak_mb()}


def measure(folder: Path) -> dict[str, Any]:
    family, recipe = synthetic_family(), make_recipe(folder)
    assert family.prompt_revision
    resting = peak_mb()
    loader, seconds, cpu_seconds = timed(lambda: open_for_training(family, recipe))
    opened = peak_mb()
    rows, size = loader.rows_in_first_epoch(), len(loader.dataset.table)
    targets = loader.reference_sampler.targets.indices
    lengths = loader.lengths.of(targets, loader.reference_sampler.sample(targets, epoch=0))
    threads = read(lambda: loader.steps(ROWS_PER_STEP, 1, Shard()))
    began = time.perf_counter()
    with closing(start_workers([loader], recipe.data.workers)):
        processes = read(lambda: loader.steps(ROWS_PER_STEP, 1, Shard()), began)
    dataloader = read(lambda: dataloader_steps(loader, recipe.data.workers))
    return {
        "utterances": size,
        "hours": loader.reference_sampler.hours,
        "open_seconds": seconds,
        "open_cpu_seconds": cpu_seconds,
        "open_microseconds_per_utterance": 1e6 * seconds / size,
        "resting_mb": resting,
        "peak_mb": opened,
        **threads,
        "by_processes": processes,
        "by_torch_dataloader": dataloader,
        "rows_in_epoch": rows,
        "tokens_per_sequence": float(lengths.mean()),
        "fill": float(lengths.sum() / (rows * ROW_TOKENS)),
        "fill_by_row_tokens": {budget: fill(lengths, recipe.data.packing_window, budget) for budget in BUDGETS},
    }


def read(open_steps: Callable[[], Any], began: float | None = None) -> dict[str, float]:
    """Read steps as fast as they come, for a while. CPU seconds are this process's own."""
    began = time.perf_counter() if began is None else began
    steps = open_steps()
    next(steps)
    first_step = time.perf_counter() - began
    for _ in range(WARM_UP_STEPS):
        next(steps)
    tokens = count = 0
    began, busy = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < READING_SECONDS:
        tokens += sum(batch.tokens for batch in next(steps))
        count += 1
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    steps.close()
    return {
        "first_step_seconds": first_step,
        "seconds_per_step": seconds / count,
        "rows_per_second": count * ROWS_PER_STEP / seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / busy,
        "cpu_seconds_per_million_tokens": 1e6 * busy / tokens,
        "reading_peak_mb": peak_mb(),
    }


class BuilderDataset(torch.utils.data.Dataset[Any]):
    """A loader's batch builder as a map-style dataset, whose index is the plan of a micro-batch."""

    def __init__(self, builder: Callable[[Any], Any]) -> None:
        self.builder = builder

    def __getitem__(self, planned: Any) -> Any:
        # Fields and not the batch itself, so that torch moves its tensors through shared memory.
        batch = self.builder(planned)
        return type(batch), [getattr(batch, field.name) for field in fields(batch)]


class PlanSampler(torch.utils.data.Sampler[Any]):
    def __init__(self, plans: Iterator[Any]) -> None:
        self.plans = plans

    def __iter__(self) -> Iterator[Any]:
        return (micro_batch for step in self.plans for micro_batch in step)


def dataloader_steps(loader: Any, workers: int) -> Iterator[list[Any]]:
    """Yield the steps of `loader.steps`, built by the worker processes of torch's DataLoader."""
    batches = iter(
        torch.utils.data.DataLoader(
            BuilderDataset(loader.builder),
            sampler=PlanSampler(loader._plan_steps(ROWS_PER_STEP, 1, Shard(), 0)),
            batch_size=None,
            num_workers=workers,
            multiprocessing_context="spawn",
            persistent_workers=True,
            prefetch_factor=max(2, PREFETCH_STEPS * ROWS_PER_STEP // workers),
            pin_memory=torch.cuda.is_available(),
        )
    )
    while True:
        yield [batch_type(*values) for batch_type, values in (next(batches) for _ in range(ROWS_PER_STEP))]


# Failures


def failing(case: str) -> str:
    """Build batches in a worker process."""
    if case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "error":
        raise DataError("utterance 7 is bad", hint="remove it")
    return case


class FailingDataset(torch.utils.data.Dataset[str]):
    def __getitem__(self, case: str) -> str:
        return failing(case)


def build_with_workers(case: str) -> Any:
    with closing(WorkerPool(1, [failing])) as workers:
        return workers.build(0, case)


def build_with_dataloader(case: str) -> Any:
    sampler: Any = [case]
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn", "batch_size": None}
    return next(iter(torch.utils.data.DataLoader(FailingDataset(), sampler=sampler, **options)))


def failures() -> dict[str, Any]:
    """Report how an error, a killed worker, and a script without `if __name__ == "__main__"` end, by kind of worker."""
    loader = importlib.import_module("loader")  # what is sent to a worker must not belong to `__main__`

    outcomes: dict[str, Any] = {}
    for build in (loader.build_with_workers, loader.build_with_dataloader):
        outcome: dict[str, Any] = {}
        for case in ("error", "killed"):
            began = time.perf_counter()
            try:
                build(case)
            except Exception as error:  # noqa: BLE001 - whichever it is, it is the result
                outcome[case] = {
                    "raised": type(error).__name__,
                    "message": str(error).strip().splitlines()[0],
                    "hint": getattr(error, "hint", None),
                    "seconds": time.perf_counter() - began,
                }
        with tempfile.TemporaryDirectory() as scratch:
            script = Path(scratch) / "script.py"
            path = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); print('started', flush=True)\n"
            script.write_text(f"{path}from loader import {build.__name__} as build\nprint(build('built'))\n")
            done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=120)
        outcome["script without a main guard"] = {
            "exit code": done.returncode,
            "times the script ran": done.stdout.count("started"),
            "last line": (done.stderr or done.stdout).strip().splitlines()[-1],
        }
        outcomes[build.__name__] = outcome
    return outcomes


def fill(lengths: npt.NDArray[np.int64], window: int, budget: int) -> float:
    """Measure up to sixteen windows. These are in the order of the manifest, which is as good as any other here."""
    lengths = lengths[: 16 * window]
    parts = [lengths[at : at + window].tolist() for at in range(0, len(lengths), window)]
    return float(lengths.sum() / (budget * sum(len(first_fit_decreasing(part, budget)) for part in parts)))


def in_subprocess(what: str, folder: Path) -> dict[str, Any]:
    """Memory is only ever a process's own, and the first to import pays for it."""
    command = [sys.executable, __file__, "--measure", what, str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# Report


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| utterances | hours | open s (CPU) | per utterance | peak MB (at rest) | s/step | rows/s "
        "| tokens/s (per CPU s) | CPU s per million tokens: threads, our processes, torch's | tokens/s: ours, torch's "
        "| first step s: ours, torch's | fill |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['utterances']:,} | {row['hours']:,.1f} | {row['open_seconds']:.2f} ({row['open_cpu_seconds']:.2f}) "
        f"| {row['open_microseconds_per_utterance']:,.1f} µs | {row['peak_mb']:,.0f} ({row['resting_mb']:,.0f}) "
        f"| {row['seconds_per_step']:.3f} | {row['rows_per_second']:.1f} | {row['tokens_per_second']:,.0f} "
        f"({row['tokens_per_cpu_second']:,.0f}) | {row['cpu_seconds_per_million_tokens']:.2f}, "
        f"{_pair(row, 'cpu_seconds_per_million_tokens', '.3f')} | {_pair(row, 'tokens_per_second', ',.0f')} "
        f"| {_pair(row, 'first_step_seconds', '.1f')} | {row['fill']:.1%} |"
        for row in rows
    ]
    return "\n".join(lines)


def _pair(row: dict[str, Any], name: str, form: str) -> str:
    return ", ".join(format(row[kind][name], form) for kind in ("by_processes", "by_torch_dataloader"))


def drawing(rows: list[dict[str, Any]]) -> str:
    """Draw seconds to open, megabytes at most and tokens a second, by the size of the dataset."""

    def column(title: str, name: str, limit: float) -> BarColumn:
        values = [row[name] for row in rows]
        return BarColumn(title, values, [f"{one:.2f}" if one < 100 else f"{one:,.0f}" for one in values], limit)

    columns = [
        column("seconds to the first step (line: 10)", "open_seconds", 10.0),
        column("megabytes (line: 1,000)", "peak_mb", 1_000.0),
        column("tokens a second (line: GPU)", "tokens_per_second", float(GPU_TOKENS_PER_SECOND)),
    ]
    return bars_file([f"{row['utterances']:,} utterances" for row in rows], columns)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--scratch", type=Path, help="Where there is room for the synthetic folders.")
    parser.add_argument("--failures", action="store_true", help="Only report how worker processes fail.")
    parser.add_argument("--measure", nargs=2, metavar=("first|open", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.measure:
        what, folder = arguments.measure
        print(json.dumps({"first": measure_first, "open": measure}[what](Path(folder))))
        return 0
    if arguments.failures:
        print(json.dumps(failures(), indent=1))
        return 0
    if arguments.out is None:
        parser.error("--out is missing")
    rows = []
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
            folder = Path(scratch) / "synthetic"
            write_dataset(folder, size)
            first = in_subprocess("first", folder)
            rows.append({**in_subprocess("open", folder), **first})
            rows[-1]["shards"] = len(list(folder.glob("codes/*/[0-9]*.arrow")))
            rows[-1]["manifest_mb"] = (folder / "manifest.jsonl").stat().st_size / 2**20
        print(table(rows[-1:]), flush=True)
    facts = {
        "date": date.today().isoformat(),
        "command": f"python {' '.join(sys.argv)}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "pyarrow": pa.__version__},
        "data": {
            "row_tokens": ROW_TOKENS,
            "batch_size": ROWS_PER_STEP,
            "window": make_recipe(Path()).data.packing_window,
        },
        "rows": rows,
        "failures": failures(),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_figures(arguments.out / "loader.json", facts)
    (arguments.out / "loader.svg").write_text(drawing(rows), encoding="utf-8")
    print(table(rows))
    kept_up = all(row["tokens_per_second"] > GPU_TOKENS_PER_SECOND for row in rows)
    light = all(row["open_seconds"] < 10 and row["peak_mb"] < 1000 for row in rows)
    return 0 if kept_up and light else 1


if __name__ == "__main__":
    sys.exit(main())
