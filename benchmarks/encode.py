"""Speed of encoding on one GPU, and the share of codes that a faster way has in common with fp32.

python benchmarks/encode.py --out docs/benchmarks
python benchmarks/encode.py --out FOLDER --device cpu --tiny     a look at the whole, in a minute

The codec has its true size and random weights, made to let sound through; no checkpoint and no recording is needed.
Clips are voiced noise of log-normal length, in shards as `myna prepare` cuts them. Time is counted from samples in the
host's memory to codes in the host's memory. The first pass pays for every new shape and for compiling; rates are those
of the passes after it. Writes encode.json and encode.svg.
"""

from __future__ import annotations

import argparse
import gc
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.figures import BarColumn, bars_file, save_figures

from myna.core.device import supports_triton
from myna.data.codec import Codes, EncodedBatch, Samples, encode_equal_lengths
from myna.models.higgs_v2 import tiny
from myna.models.higgs_v2.batched_encoder import BatchedCodec, synthetic_speech
from myna.models.higgs_v2.codec import HiggsCodec, codec_classes, sinc_resample

MEDIAN_SECONDS, SPREAD, SHORTEST, LONGEST = 8.3, 0.55, 1.0, 30.0
SHARD_SECONDS, BATCH_SECONDS = 600.0, 60.0
"""Batches as `encode_corpus` has them."""
WANTED, EQUAL = 1_000, 0.999
"""Seconds of audio a second, and the share of codes that must be those of fp32."""
PASSES, ENOUGH_SECONDS = 3, 3.0
"""Passes that are timed, unless one takes so long that it will do."""
Way = Callable[[Sequence[Samples]], Iterable[tuple[list[int], list[Codes] | None]]]
"""A shard's clips -> their codes, with their places."""


class CoarseCodec(HiggsCodec):
    """transformers' forward pass in TF32, and under autocast to bf16 where that is asked for."""

    half = False

    @contextmanager
    def _exactly(self) -> Iterator[None]:
        matmul = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            with (
                torch.inference_mode(),
                torch.autocast(self._device.type, torch.bfloat16, enabled=self.half),
                torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=True),
            ):
                yield
        finally:
            torch.set_float32_matmul_precision(matmul)


def true_config() -> Any:
    """The released codec's own sizes, which are not its configuration class's defaults."""
    return codec_classes()[0](
        target_bandwidths=[0.5, 1, 1.5, 2],
        acoustic_model_config={
            "model_type": "dac",
            "encoder_hidden_size": 64,
            "downsampling_ratios": [8, 5, 4, 2, 3],
            "decoder_hidden_size": 1024,
            "upsampling_ratios": [8, 5, 4, 2, 3],
            "hidden_size": 256,
        },
        semantic_model_config={"model_type": "hubert", "mask_time_prob": 0.0},
    )


def make_codec(device: torch.device, small: bool) -> HiggsCodec:
    """Random weights: of the true size, or those of the tiny codec."""
    if small:
        with tempfile.TemporaryDirectory() as folder:
            return HiggsCodec.open(tiny.save_tiny_codec(Path(folder)), device=device)
    torch.manual_seed(0)
    with device:
        model = codec_classes()[1](true_config()).to(device).eval()
        tiny._calibrate(model)
    return HiggsCodec(model, "random", device)


def draw_clips(count: int, codec: HiggsCodec, pace: float) -> list[Samples]:
    drawn = np.exp(SPREAD * np.random.default_rng(0).standard_normal(count))
    seconds = pace * np.clip(MEDIAN_SECONDS * drawn, SHORTEST, LONGEST)
    frames = np.maximum(1, seconds * codec.sample_rate // codec.hop).astype(int)
    return synthetic_speech([int(count) * codec.hop for count in frames], codec.sample_rate)


class Bench:
    """One codec, one set of clips, and the rows that come of them."""

    def __init__(self, codec: HiggsCodec, clips: list[Samples]) -> None:
        self.codec, self.clips, self.device = codec, clips, codec._device
        self.rows: list[dict[str, Any]] = []
        self.exact: list[Codes] = []

    def seconds(self, count: int | None = None) -> float:
        """Seconds of audio in the first so many clips."""
        return sum(map(len, self.clips[:count])) / self.codec.sample_rate

    def shards(self, count: int | None) -> Iterator[list[int]]:
        shard: list[int] = []
        for number in range(len(self.clips[:count])):
            shard.append(number)
            if sum(len(self.clips[one]) for one in shard) >= SHARD_SECONDS * self.codec.sample_rate:
                yield shard
                shard = []
        if shard:
            yield shard

    def one_pass(self, way: Way, count: int | None) -> tuple[float, int, list[Codes]]:
        """Measure seconds and batches of one pass; return them with the codes."""
        codes: dict[int, Codes] = {}
        batches = 0
        began = time.perf_counter()
        for shard in self.shards(count):
            for places, found in way([self.clips[number] for number in shard]):
                assert found is not None, "an activation was beyond fp16"
                codes |= zip((shard[place] for place in places), found, strict=True)
                batches += 1
        return time.perf_counter() - began, batches, [codes[number] for number in range(len(codes))]

    def row(self, name: str, way: Way, count: int | None = None) -> None:
        """Measure rows over the first so many clips. The first row is what the others are held to."""
        print(f"{name} ...", flush=True)
        on_card = self.device.type == "cuda"
        gc.collect()
        if on_card:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        audio = self.seconds(count)
        row: dict[str, Any] = {"name": name, "clips": len(self.clips[:count]), "audio_seconds": audio}
        try:
            first, batches, codes = self.one_pass(way, count)
            times: list[float] = []
            while len(times) < PASSES and sum(times) < ENOUGH_SECONDS:
                times.append(self.one_pass(way, count)[0])
        except Exception as error:  # noqa: BLE001 - a way that fails is a finding; the others still count
            traceback.print_exc()
            self.rows.append(row | {"error": f"{type(error).__name__}: {error}"[:600]})
            return
        self.exact = self.exact or codes
        equal = np.concatenate([one == due for one, due in zip(codes, self.exact[:count], strict=True)])
        rate = audio / sorted(times)[len(times) // 2]
        self.rows.append(
            row
            | {
                "times_real_time": rate,
                "hours_per_minute": rate / 60,
                "equal": float(equal.mean()),
                "equal_by_codebook": [float(share) for share in equal.mean(0)],
                "batches": batches,
                "first_pass_seconds": first,
                "pass_seconds": times,
                "peak_gib": torch.cuda.max_memory_allocated(self.device) / 2**30 if on_card else None,
            }
        )
        print(line(self.rows[-1]), flush=True)


def measure(bench: Bench, some: int, batch_seconds: Sequence[float]) -> None:
    codec = bench.codec
    bench.row("exact fp32, equal lengths", lambda clips: encode_equal_lengths(codec, clips, BATCH_SECONDS))
    for name, half in (("tf32, equal lengths", False), ("bf16, equal lengths", True)):
        coarse = CoarseCodec(codec._model, name, codec._device)
        coarse.half = half
        bench.row(name, lambda clips, coarse=coarse: encode_equal_lengths(coarse, clips, BATCH_SECONDS), some)  # type: ignore[misc]
    batched = BatchedCodec(codec._model, codec._device, sinc_resample)
    for size in batch_seconds:
        bench.row(f"ours, mixed lengths, {size:g} s", lambda clips, size=size: batched.encode(clips, size))  # type: ignore[misc]

    def prepare(clips: Sequence[Samples]) -> Iterator[EncodedBatch]:
        return codec.encode_batches(clips, BATCH_SECONDS, lambda said: print(f"  {said}", flush=True))

    bench.row("as `myna prepare` encodes", prepare)
    bench.rows[-1]["batched"] = codec._batched is not None


HEAD = (
    "| way | hours/minute | x real time | equal to fp32 | first ... last codebook | batches | first pass s "
    "| peak GiB |\n|---|---|---|---|---|---|---|---|"
)


def line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['name']} | failed: {row['error'][:80]} |"
    peak = "n/a" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
    books = row["equal_by_codebook"]
    return (
        f"| {row['name']} | {row['hours_per_minute']:.2f} | {row['times_real_time']:,.0f} | {row['equal']:.3%} "
        f"| {books[0]:.2%} ... {books[-1]:.2%} | {row['batches']} | {row['first_pass_seconds']:.1f} | {peak} |"
    )


def drawing(rows: list[dict[str, Any]]) -> str:
    """Draw the speed of each way; blue if enough codes are equal to those of fp32."""
    rows = [row for row in rows if "error" not in row]
    title = "seconds of audio encoded in a second (line: wanted), and share of codes equal to those of fp32"
    speeds = [row["times_real_time"] for row in rows]
    labels = [f"{row['times_real_time']:,.0f} ({row['equal']:.2%})" for row in rows]
    column = BarColumn(title, speeds, labels, WANTED)
    return bars_file([row["name"] for row in rows], [column], faint=[row["equal"] < EQUAL for row in rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny codec and few clips")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    device, began = torch.device(asked.device), time.perf_counter()
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        codec = make_codec(device, asked.tiny)
        bench = Bench(codec, draw_clips(12 if asked.tiny else 160, codec, 0.2 if asked.tiny else 1.0))
        print(f"{len(bench.clips)} clips, {bench.seconds():.0f} s, ready after {time.perf_counter() - began:.0f} s")
        measure(bench, 4 if asked.tiny else 24, (5.0,) if asked.tiny else (60.0, 120.0))
    facts: dict[str, Any] = {
        "date": date.today().isoformat(),
        "command": f"python {' '.join(sys.argv)}",
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "kernels": supports_triton(codec._model.fc.weight),
        "versions": {
            "python": platform.python_version(),
            **{module.__name__: module.__version__ for module in (torch, transformers)},
            "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,  # type: ignore[no-untyped-call]
        },
        "weights": "random" + (", tiny" if asked.tiny else ", of the true size"),
        "data": {"clips": len(bench.clips), "seconds": bench.seconds(), "sound": "voiced noise of log-normal length"},
        "rows": bench.rows,
    }
    save_figures(asked.out / "encode.json", facts)
    (asked.out / "encode.svg").write_text(drawing(bench.rows), encoding="utf-8")
    print(HEAD, *map(line, bench.rows), sep="\n")
    print(f"took {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
