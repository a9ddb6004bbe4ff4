"""Whether the loader keeps up, and what a corpus costs before the first step, against the size of the corpus.

python benchmarks/loader.py --out docs/benchmarks
python benchmarks/loader.py --out FOLDER --sizes 1000 10000         a look at the whole, in a minute

Prepared folders are drawn, of clips as long as speech is (log-normal, 9.7 s on average, 1 to 30 s), a hundred of each
speaker, with codes of the true size in shards as `myna prepare` cuts them: a million utterances take 4.3 GB of disk,
which are given back. Each size is opened and read by a process of its own, with nothing but the CPU: with threads, as a
training on the CPU reads it, and with processes, as one on a card does. What counts is how much of its own time a
training loses to its data, since Python has one lock for both. Writes loader.json and loader.svg.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from myna.config import Recipe, parse_recipe
from myna.data.code_store import FORMAT, INDEX
from myna.data.dataset import DatasetInfo
from myna.data.loader import Shard, start_workers
from myna.data.packing import first_fit_decreasing
from myna.models.higgs_v2.builtin import builtin_config
from myna.models.higgs_v2.family import HiggsV2
from myna.models.higgs_v2.tiny import SPECIAL_TOKENS
from myna.train.loop import make_loader
from myna.train.memory_plan import longest_pass

SIZES = (1_000, 10_000, 100_000, 1_000_000)
ROW_TOKENS, ROWS_PER_STEP = 16_384, 4
BUDGETS = (2_048, 4_096, 8_192, 16_384, 32_768)
BEFORE_READING, READING_SECONDS = 6, 15.0
"""Steps until all workers are awake, and seconds of what is measured."""
CARD_EATS = 60_000
"""Tokens a second that an H200 learns from."""
MEAN_SECONDS, SPREAD, SHORTEST, LONGEST = 9.7, 0.55, 1.0, 30.0
CLIPS_PER_SPEAKER, SHARD_SECONDS = 100, 600.0
WORDS, WORDS_PER_SECOND = 2_000, 2.6
PREPARED = DatasetInfo("d" * 32, sample_rate=24_000, frame_rate=25.0, codebooks=8, codebook_size=1024)
LABEL = {"format": FORMAT, "codec": PREPARED.codec_revision, "sample_rate": str(PREPARED.sample_rate)}


# What is drawn


def lexicon() -> list[str]:
    dice = random.Random(0)
    return ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(2, 9))) for _ in range(WORDS)]


def sentences(dice: np.random.Generator, seconds: npt.NDArray[np.float64]) -> Iterator[str]:
    """As many words as fit into each clip, the common ones more often."""
    words, weights = lexicon(), 1 / np.arange(1, WORDS + 1)
    drawn = dice.choice(WORDS, 200_000, p=weights / weights.sum())
    for length in seconds:
        count = max(2, int(WORDS_PER_SECOND * length))
        start = int(dice.integers(len(drawn) - count))
        yield " ".join(words[number] for number in drawn[start : start + count].tolist())


def draw_family() -> HiggsV2:
    """The released model's prompt, with a tokenizer that has learned the drawn words: 4 tokens a second."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1_600, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(sentences(np.random.default_rng(1), np.full(3_000, MEAN_SECONDS)), trainer)
    family = HiggsV2("drawn", builtin_config("higgs-v2"), None)
    family.__dict__["tokenizer"] = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)
    return family


def draw_corpus(folder: Path, size: int) -> None:
    """A prepared folder of so many utterances, as `myna prepare` would leave it before it has looked at it again."""
    dice = np.random.default_rng(0)
    home = folder / "codes" / PREPARED.codec_revision[:8]
    home.mkdir(parents=True)
    mean = np.log(MEAN_SECONDS) - SPREAD**2 / 2
    seconds = np.clip(dice.lognormal(mean, SPREAD, size), SHORTEST, LONGEST)
    frames = np.round(seconds * PREPARED.frame_rate).astype(np.int32)
    texts = list(sentences(dice, seconds))
    speakers = [f"speaker{number // CLIPS_PER_SPEAKER:05d}" for number in range(size)]
    ids = [f"{speaker}/{number:07d}" for number, speaker in enumerate(speakers)]
    keys = [hashlib.blake2b(id.encode(), digest_size=16).hexdigest() for id in ids]
    noise = dice.integers(0, PREPARED.codebook_size, 4_000_000, dtype=np.uint16)
    cuts = np.flatnonzero(np.diff(np.cumsum(seconds) // SHARD_SECONDS, prepend=-1)).tolist()
    for number, (start, stop) in enumerate(zip(cuts, [*cuts[1:], size], strict=True)):
        count, part = stop - start, slice(start, stop)
        bounds = np.cumsum([0, *(frames[part] * PREPARED.codebooks)], dtype=np.int64)
        begin = int(dice.integers(len(noise) - bounds[-1]))
        codes = pa.LargeListArray.from_arrays(pa.array(bounds), pa.array(noise[begin : begin + int(bounds[-1])]))
        columns = {
            "key": pa.array(keys[part]),
            "codes": codes,
            "frames": pa.array(frames[part]),
            "codebooks": pa.array(np.full(count, PREPARED.codebooks, np.int32)),
            "frame_rate": pa.array(np.full(count, PREPARED.frame_rate)),
            "seconds": pa.array(frames[part] / PREPARED.frame_rate),
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
    write(home / INDEX, index)
    with (folder / "manifest.jsonl").open("w", encoding="utf-8") as file:
        for id, path, text, speaker in zip(ids, audio, texts, speakers, strict=True):
            file.write(json.dumps({"id": id, "audio": path, "text": text, "speaker": speaker, "language": "en"}) + "\n")
    PREPARED.write(folder)


def write(path: Path, columns: dict[str, Any]) -> None:
    batch = pa.record_batch(columns).replace_schema_metadata(LABEL)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


# What is measured


def make_recipe(folder: Path) -> Recipe:
    tree = {
        "model": {"source": "drawn"},
        "data": {"train": str(folder), "row_tokens": ROW_TOKENS, "reference_seconds": [3.0, 10.0]},
        "train": {"epochs": 1, "batch_size": ROWS_PER_STEP},
    }
    return parse_recipe(tree, where="benchmark")


def open_for_training(family: HiggsV2, recipe: Recipe) -> Any:
    """Everything `myna train` asks of its data before the first step."""
    loader = make_loader(recipe, family, recipe.data.train)
    longest_pass(loader, recipe, Shard())
    assert loader.identity and loader.rows_in_first_epoch()
    return loader


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What came of it, seconds on the clock, and seconds of the processor."""
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
    _, seconds, _ = timed(lambda: open_for_training(draw_family(), make_recipe(folder)))
    return {"first_open_seconds": seconds, "first_open_peak_mb": peak_mb()}


def measure(folder: Path) -> dict[str, Any]:
    family, recipe = draw_family(), make_recipe(folder)
    assert family.prompt_revision
    resting = peak_mb()
    loader, seconds, busy = timed(lambda: open_for_training(family, recipe))
    opened = peak_mb()
    rows, size = loader.rows_in_first_epoch(), len(loader.corpus.table)
    references = loader.pairing.draw(loader.pairing.targets.rows, epoch=0)
    lengths = loader.lengths.of(loader.pairing.targets.rows, references)
    by_threads = read(loader)
    with closing(start_workers([loader], recipe.data.workers)):
        by_processes = read(loader)
    return {
        "utterances": size,
        "hours": loader.pairing.hours,
        "open_seconds": seconds,
        "open_cpu_seconds": busy,
        "open_microseconds_per_utterance": 1e6 * seconds / size,
        "resting_mb": resting,
        "peak_mb": opened,
        **by_threads,
        "by_processes": by_processes,
        "rows_in_epoch": rows,
        "tokens_per_sequence": float(lengths.mean()),
        "fill": float(lengths.sum() / (rows * ROW_TOKENS)),
        "fill_by_row_tokens": {budget: fill(lengths, recipe.data.packing_window, budget) for budget in BUDGETS},
    }


def read(loader: Any) -> dict[str, float]:
    """Steps one after another, for a while, by someone who has nothing else to do. Seconds of the processor are this
    process's own."""
    steps = loader.steps(ROWS_PER_STEP, 1, Shard())
    for _ in range(BEFORE_READING):
        next(steps)
    tokens = count = 0
    began, busy = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < READING_SECONDS:
        tokens += sum(batch.tokens for batch in next(steps))
        count += 1
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    steps.close()
    return {
        "seconds_per_step": seconds / count,
        "rows_per_second": count * ROWS_PER_STEP / seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / busy,
        "cpu_seconds_per_million_tokens": 1e6 * busy / tokens,
        "reading_peak_mb": peak_mb(),
    }


def fill(lengths: npt.NDArray[np.int64], window: int, budget: int) -> float:
    """Of up to sixteen windows. These are in the order of the manifest, which is as good as any other here."""
    lengths = lengths[: 16 * window]
    parts = [lengths[at : at + window].tolist() for at in range(0, len(lengths), window)]
    return float(lengths.sum() / (budget * sum(len(first_fit_decreasing(part, budget)) for part in parts)))


def in_process_of_its_own(what: str, folder: Path) -> dict[str, Any]:
    """Memory is only ever a process's own, and the first to import pays for it."""
    command = [sys.executable, __file__, "--measure", what, str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# What is shown


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| utterances | hours | open s (CPU) | per utterance | peak MB (at rest) | s/step | rows/s "
        "| tokens/s (per CPU s) | CPU s per million tokens (with processes) | fill |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['utterances']:,} | {row['hours']:,.1f} | {row['open_seconds']:.2f} ({row['open_cpu_seconds']:.2f}) "
        f"| {row['open_microseconds_per_utterance']:,.1f} µs | {row['peak_mb']:,.0f} ({row['resting_mb']:,.0f}) "
        f"| {row['seconds_per_step']:.3f} | {row['rows_per_second']:.1f} | {row['tokens_per_second']:,.0f} "
        f"({row['tokens_per_cpu_second']:,.0f}) | {row['cpu_seconds_per_million_tokens']:.2f} "
        f"({row['by_processes']['cpu_seconds_per_million_tokens']:.3f}) | {row['fill']:.1%} |"
        for row in rows
    ]
    return "\n".join(lines)


def drawing(rows: list[dict[str, Any]]) -> str:
    """Seconds to open, megabytes at most and tokens a second, each a line over the size of the corpus."""
    panels = (
        ("seconds until the first step can begin; at most 10", "open_seconds", 10.0, "#1f77b4"),
        ("megabytes at most; at most 1,000", "peak_mb", 1_000.0, "#2ca02c"),
        (f"tokens a second; a card eats {CARD_EATS:,}", "tokens_per_second", float(CARD_EATS), "#d62728"),
    )
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 250" font-family="sans-serif" font-size="11">']
    for number, (title, name, limit, colour) in enumerate(panels):
        left, top = 20 + 240 * number, max(limit, *(row[name] for row in rows)) * 1.1
        places = [left + 190 * place / max(1, len(rows) - 1) for place in range(len(rows))]
        heights = [210 - 170 * row[name] / top for row in rows]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(places, heights, strict=True))
        bar = 210 - 170 * limit / top
        parts += [
            f'<text x="{left}" y="16">{title}</text>',
            f'<line x1="{left}" y1="{bar:.1f}" x2="{left + 190}" y2="{bar:.1f}" stroke="#888" stroke-dasharray="4"/>',
            f'<line x1="{left}" y1="210" x2="{left + 190}" y2="210" stroke="#888"/>',
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>',
        ]
        for row, x, y in zip(rows, places, heights, strict=True):
            shown = f"{row[name]:.2f}" if row[name] < 100 else f"{row[name]:,.0f}"
            parts.append(f'<text x="{x:.1f}" y="{y - 6:.1f}" text-anchor="middle">{shown}</text>')
            parts.append(f'<text x="{x:.1f}" y="226" text-anchor="middle">{row["utterances"]:,}</text>')
    return "\n".join([*parts, '<text x="20" y="244">utterances</text>', "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--scratch", type=Path, help="Where there is room for the drawn folders.")
    parser.add_argument("--measure", nargs=2, metavar=("first|open", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.measure:
        what, folder = asked.measure
        print(json.dumps({"first": measure_first, "open": measure}[what](Path(folder))))
        return 0
    if asked.out is None:
        parser.error("--out is missing")
    rows = []
    for size in asked.sizes:
        with tempfile.TemporaryDirectory(dir=asked.scratch) as scratch:
            folder = Path(scratch) / "drawn"
            draw_corpus(folder, size)
            first = in_process_of_its_own("first", folder)
            rows.append({**in_process_of_its_own("open", folder), **first})
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
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "loader.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (asked.out / "loader.svg").write_text(drawing(rows), encoding="utf-8")
    print(table(rows))
    kept_up = all(row["tokens_per_second"] > CARD_EATS for row in rows)
    light = all(row["open_seconds"] < 10 and row["peak_mb"] < 1000 for row in rows)
    return 0 if kept_up and light else 1


if __name__ == "__main__":
    sys.exit(main())
