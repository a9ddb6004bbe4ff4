"""Speed of the true-size model on one GPU, beside stock transformers, in one run.

python benchmarks/speak.py --out docs/benchmarks
python benchmarks/speak.py --out FOLDER --device cpu --tiny     a look at the whole, in a minute
python benchmarks/speak.py --out docs/benchmarks --adapters     1 and 64 rows, and adapters, alone: half a minute
python benchmarks/speak.py --out docs/benchmarks --fledgling     the shipped small model on this CPU
python benchmarks/speak.py --out docs/benchmarks --evaluate --device cpu     100 lines by `myna evaluate`

Weights are random and of the full size, in bf16. Every row has a context of 450 positions at first and 700 at the end,
10 s of speech, and no early end. `share_of_limit` is the time that memory bandwidth would take for the weights and the
cache of a step, over the time it took. The first audio is counted from a request with a reference of 5 s to the samples
of the first window, which are those of the finished file. Writes speak.json and speak.svg; with `--adapters`,
speak-adapters.json.

With `--fledgling`, speak-fledgling.json: text to samples, prefill and codec included, alone and beside a process that
keeps a core busy. With `--evaluate`, speak-evaluate-DEVICE.json: the lines spoken, decoded and written, not scored.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import soundfile
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.figures import BarColumn, bars_file, save_figures
from benchmarks.synthetic import random_codec

from myna.core.device import supports_triton
from myna.models.base import RenderedSequence, Sampling
from myna.models.higgs_v2 import tiny
from myna.models.higgs_v2.codec import HiggsCodec
from myna.models.higgs_v2.decode import HiggsDecoder
from myna.models.higgs_v2.decode.weights import HiggsAdapterSlots
from myna.models.higgs_v2.family import builtin_config
from myna.models.higgs_v2.render import DelayPattern
from myna.models.quantized import QuantizedLinear, quantize, quantized_linears, supports_fp8
from myna.models.ref import ModelRef
from myna.speak.scheduler import BatchScheduler
from myna.speak.streaming import CodeStream, decode_streams, warm_up

CONTEXT, FRAMES = 450, 250
BANDWIDTH = 4.3e12
"""Bytes a second that an H200's memory was seen to deliver."""
REFERENCE_FRAMES, PROMPT_TEXT = 125, 60
ADAPTER_RANKS = (8, 16)
TRAINING_RANK = 16
CODEC_STEPS = 16
"""Steps between two calls of the codec, which takes the frames of all rows at once."""
WORDS = "the small bird sings early while grey light falls over a garden and nobody walks along the old wall"
SYNC_WARNING = "synchronizing CUDA operation"


class Bench:
    def __init__(self, device: torch.device, small: bool, out: Path, name: str = "speak") -> None:
        self.device, self.small, self.out, self.name = device, small, out, name
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.frames = 20 if small else FRAMES
        start = time.perf_counter()
        torch.manual_seed(0)
        config = tiny.tiny_config(codebook_size=1024) if small else builtin_config()
        config._attn_implementation = "sdpa"
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
        with device:
            model = transformers.HiggsAudioV2ForConditionalGeneration(config, use_text_head=False)
        torch.set_default_dtype(default)
        self.model: Any = model.eval().requires_grad_(False)
        self.config = config
        self.delay = DelayPattern(config.num_codebooks, config.audio_stream_bos_id, config.audio_stream_eos_id)
        self.facts["model_seconds"] = time.perf_counter() - start

    def decoder(
        self, rows: int, positions: int, adapters: HiggsAdapterSlots | None = None, *, exact: bool = False
    ) -> HiggsDecoder:
        if supports_triton(self.model.audio_lm_head.weight):
            from myna.models.higgs_v2.decode.cuda import CudaDecoder

            return CudaDecoder(self.model, self.delay, rows, positions, adapters, exact)
        return HiggsDecoder(self.model, self.delay, rows, positions, adapters, exact)

    def codec(self) -> HiggsCodec:
        if self.small:
            folder = tiny.save_tiny_codec(self.out / "codec", codebook_size=1024)
            return HiggsCodec.open(folder, device=self.device)
        return random_codec(self.device)

    def prompt(self, number: int, audio: int, text: int = PROMPT_TEXT) -> RenderedSequence:
        rng = np.random.default_rng(number)
        ids = np.concatenate([rng.integers(1, 200, text), np.full(audio, self.config.audio_token_id)])
        ids = np.append(ids, self.config.audio_bos_token_id)
        codes = rng.integers(0, 1024, (audio, self.config.num_codebooks))
        nothing = (np.full_like(ids, -100), np.full_like(codes, -100))
        return RenderedSequence(str(number), ids, codes, *nothing, spans=(), target_seconds=0.0)

    def measure(self, name: str, function: Callable[[], dict[str, Any]]) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            row = {"name": name, **function()}
        except Exception:  # noqa: BLE001 - the other rows are measured all the same
            row = {"name": name, "error": traceback.format_exc()[-1500:]}
        if self.device.type == "cuda":
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        self.save()

    def save(self) -> None:
        card = torch.cuda.get_device_name() if self.device.type == "cuda" else platform.processor()
        facts = {
            "date": str(date.today()),
            "device": card,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "context": [CONTEXT, CONTEXT + self.frames],
            "frames": self.frames,
            **self.facts,
        }
        save_figures(self.out / f"{self.name}.json", facts | {"rows": self.rows})

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def speeds(self, rows: int, seconds: float, frames: int) -> dict[str, Any]:
        weights = sum(
            parameter.numel() * parameter.element_size()
            for name, parameter in self.model.named_parameters()
            if ".mlp." not in name and "embed" not in name
        )
        packed = [
            tensor.nbytes
            for name, module in self.model.named_modules()
            if isinstance(module, QuantizedLinear) and ".mlp." not in name
            for tensor in module.buffers(recurse=False)
        ]
        weights += sum(packed)
        config, context = self.config, CONTEXT + frames / 2
        cache = (
            2 * config.num_hidden_layers * config.num_key_value_heads * self.model.model.layers[0].self_attn.head_dim
        )
        limit = (weights + rows * context * cache * 2) / BANDWIDTH
        return {
            "rows": rows,
            "ms_per_frame": seconds / frames * 1e3,
            "rtf": seconds / frames / 0.04,
            "audio_s_per_s": rows * frames * 0.04 / seconds,
            "share_of_limit": limit / (seconds / frames),
        }

    def stock(self, rows: int, frames: int) -> dict[str, Any]:
        """transformers' own `generate`, its sampling settings as they come."""
        prompts = [self.prompt(number, audio=0, text=CONTEXT - 1) for number in range(rows)]
        ids = torch.from_numpy(np.stack([prompt.ids for prompt in prompts])).to(self.device)
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        arguments["do_sample"] = True
        self.model.generate(**arguments, max_new_tokens=4)
        times = []
        for count in (2, frames + 2):  # the difference is free of the prefill
            self.synchronize()
            start = time.perf_counter()
            with torch.no_grad():
                self.model.generate(**arguments, max_new_tokens=count)
            self.synchronize()
            times.append(time.perf_counter() - start)
        return self.speeds(rows, times[1] - times[0], frames)

    def decode(
        self, decoder: HiggsDecoder, rows: int, codec: HiggsCodec | None = None, adapters: int = 0
    ) -> dict[str, Any]:
        """Steps of rows that do not end, results read behind them; with a codec, until all samples are on the host.
        With so many adapters, the rows take turns."""
        sampling = Sampling(temperature=1.0)

        def begin() -> None:
            for row in range(rows):
                decoder.begin(row, CONTEXT, sampling, 10**6)
                decoder.use_adapter(row, row % adapters if adapters else -1, 1.0)

        for cache in (*decoder.keys, *decoder.values):
            cache[:rows, :, :CONTEXT].normal_()
        begin()
        start = time.perf_counter()
        decoder.step(rows, CONTEXT).result()
        self.synchronize()
        capture = time.perf_counter() - start
        begin()
        streams = [CodeStream(codec) for _ in range(rows)] if codec is not None else []
        self.synchronize()
        start = time.perf_counter()
        pending: list[Any] = []
        frames: list[np.ndarray[Any, Any]] = []
        decoding: list[Callable[[], Any]] = []

        def read() -> None:
            frames.append(pending.pop(0).result().codes.numpy())
            if codec is not None and (len(frames) == CODEC_STEPS):
                push()

        def push() -> None:
            assert codec is not None
            stacked = np.stack(frames, axis=1).clip(0, codec.codebook_size - 1).astype(np.uint16)
            frames.clear()
            for stream, codes in zip(streams, stacked, strict=True):
                stream.push(codes)
            while decoding:
                decoding.pop()()
            decoding.append(decode_streams(codec, streams))

        for step in range(self.frames):
            pending.append(decoder.step(rows, CONTEXT + step))
            if len(pending) > decoder.steps_ahead:
                read()
        while pending:
            read()
        if codec is not None:
            if frames:
                push()
            for stream in streams:
                stream.end()
            decoding.append(decode_streams(codec, streams))
            for one in decoding:
                one()
        self.synchronize()
        seconds = time.perf_counter() - start
        return {**self.speeds(rows, seconds, self.frames), "capture_s": capture}

    def change_weights(self, kind: str) -> None:
        """A LoRA of rank 16 inside the model, as in training; or quantized weights. Changes the model: to be measured
        last."""
        names = [name for name, module in self.model.named_modules() if isinstance(module, torch.nn.Linear)]
        names = [name for name in names if ".layers." in name]
        if kind == "adapter":
            config = peft.LoraConfig(r=TRAINING_RANK, target_modules=names, init_lora_weights=False)
            self.model = peft.get_peft_model(self.model, config).base_model.model
        else:
            self.model = quantize(self.model, kind, names, self.device)  # type: ignore[arg-type]
            for linear in quantized_linears(self.model):
                linear.drop_backward()

    def decode_changed(self, kind: str, rows: int) -> dict[str, Any]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=kind == "adapter"):
            return self.decode(self.decoder(rows, CONTEXT + FRAMES + 68), rows)

    def adapter_slots(self, count: int, rank: int) -> tuple[HiggsAdapterSlots, dict[str, Any]]:
        """Adapters on every projection, random; and how long one takes to load."""
        slots = HiggsAdapterSlots(self.model, count, rank)
        linears = {name: module for name, module in self.model.named_modules() if isinstance(module, torch.nn.Linear)}
        generator, seconds = torch.Generator().manual_seed(0), 0.0
        for number in range(count):
            if number < 2:  # the others get the same matrices: to draw them takes longer than all else
                matrices = {
                    name: (
                        torch.randn(rank, linear.in_features, generator=generator) * 0.02,
                        torch.randn(linear.out_features, rank, generator=generator) * 0.02,
                    )
                    for name, linear in linears.items()
                    if ".layers." in name
                }
            start = time.perf_counter()
            slots.load(str(number), matrices)
            self.synchronize()
            seconds = time.perf_counter() - start
        size = sum(group.a.nbytes + group.b.nbytes for layers in slots.groups.values() for group in layers)
        return slots, {"rank": rank, "load_s": seconds, "mib_each": size / count / 2**20}

    def measure_adapters(self, positions: int) -> None:
        """Few and many adapters among many rows, of each rank."""
        all_rows, self.facts["adapters"] = (2 if self.small else 64), []
        for rank in ADAPTER_RANKS:
            slots, facts = self.adapter_slots(2 if self.small else 32, rank)
            self.facts["adapters"].append(facts)
            decoder = self.decoder(all_rows, positions, slots)
            for rows, count in ((1, 1), (all_rows, 0), (all_rows, 1), (all_rows, 8), (all_rows, 32)):
                count = min(count, slots.capacity)
                name = f"ours, {rows} rows, {count} adapters of rank {rank}"
                self.measure(name, partial(self.decode, decoder, rows, adapters=count))
            del decoder, slots

    def first_audio(self, codec: HiggsCodec) -> dict[str, Any]:
        scheduler = BatchScheduler(self.decoder(1, 1024))
        times = []
        for number in range(6):
            prompt = self.prompt(number, audio=REFERENCE_FRAMES + 9)
            stream = CodeStream(codec)
            self.synchronize()
            start = time.perf_counter()
            generation = scheduler.submit(prompt, Sampling(seed=number), 100)
            done = heard = 0
            while not heard and not generation.finished:
                scheduler.advance()
                if generation.frames > done:
                    stream.push(generation.codes(done))
                    heard = len(decode_streams(codec, [stream])()[0])
                    done = generation.frames
            times.append((time.perf_counter() - start) * 1e3)
            generation.cancel()
            while scheduler.busy:
                scheduler.advance()
        return {"first_audio_ms": sorted(times[2:])[len(times[2:]) // 2], "all_ms": times}

    def prefill(self) -> dict[str, Any]:
        """A prompt with a reference of 5 s."""
        decoder, times = self.decoder(1, 1024), []
        for number in range(12):
            prompt = self.prompt(number, audio=REFERENCE_FRAMES + 9)
            self.synchronize()
            start = time.perf_counter()
            decoder.prefill(0, prompt)
            self.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return {"prefill_ms": sorted(times[2:])[len(times[2:]) // 2], "positions": len(prompt)}

    def synchronizations(self) -> dict[str, Any]:
        """Count how often the host waits inside 50 steps and the prefill before them."""
        scheduler = BatchScheduler(self.decoder(1, 1024))
        scheduler.submit(self.prompt(0, audio=100), Sampling(), 20)
        while scheduler.busy:
            scheduler.advance()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler.submit(self.prompt(1, audio=100), Sampling(), 50)
            while scheduler.busy:
                scheduler.advance()
        torch.cuda.set_sync_debug_mode("default")
        found = [warning for warning in caught if SYNC_WARNING in str(warning.message)]
        return {"host_synchronizations": len(found), "where": sorted({f"{w.filename}:{w.lineno}" for w in found})[:5]}


def fledgling(out: Path) -> None:
    """The shipped model on the CPU: real text, real ends."""
    from myna.speak.loading import load_engine
    from myna.speak.request import SpeechRequest

    start = time.perf_counter()
    engine = load_engine(ModelRef.find_model("fledgling"), device="cpu")
    rows: list[dict[str, Any]] = [{"name": "load", "seconds": time.perf_counter() - start}]
    text = "The birds sing early in the morning, when the light is grey and the garden is still asleep."

    def measure(name: str, lines: int) -> None:
        requests = [SpeechRequest(text, id=str(number), max_seconds=10.0) for number in range(lines)]
        times = []
        for _ in range(3):
            start = time.perf_counter()
            speeches = engine.speak(requests)
            times.append(time.perf_counter() - start)
        seconds = sum(speech.seconds for speech in speeches)
        row = {"name": name, "lines": lines, "speech_s": seconds, "wall_s": min(times)}
        rows.append(row | {"audio_s_per_s": seconds / min(times), "stopped": sum(one.stopped for one in speeches)})
        print(json.dumps(rows[-1]), flush=True)

    measure("one line", 1)
    measure("16 lines", 16)
    times = []
    for number in range(4):
        start = time.perf_counter()
        next(iter(engine.stream(SpeechRequest(text, id=f"first {number}", max_seconds=10.0))))
        times.append(time.perf_counter() - start)
    rows.append({"name": "first sound", "seconds": min(times)})
    print(json.dumps(rows[-1]), flush=True)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    measure("one line, one core busy", 1)
    busy.kill()
    facts = {"date": str(date.today()), "cores": os.cpu_count(), "processor": processor(), "torch": torch.__version__}
    save_figures(out / "speak-fledgling.json", facts | {"rows": rows})


def evaluate_lines(out: Path, device: str, lines: int = 100) -> None:
    """Measure what `myna evaluate` has spoken by the shipped model: lines of 3 to 40 words."""
    from myna.evaluate.evaluation import Subject
    from myna.evaluate.items import EvalItem, EvalSet
    from myna.evaluate.pipeline import score_systems
    from myna.evaluate.scoring import Scorers

    words, rng = WORDS.split(), np.random.default_rng(0)
    texts = [" ".join(rng.choice(words, 3 + 37 * number // lines)).capitalize() + "." for number in range(lines)]
    items = tuple(EvalItem(f"line-{number:04d}", text, language="en") for number, text in enumerate(texts))
    system = Subject.parse("fledgling").system(seed=0, device=device)
    system.engine  # noqa: B018 - loaded, as it is before the first line
    with tempfile.TemporaryDirectory() as folder:
        start, used = time.perf_counter(), time.process_time()
        rows = score_systems(EvalSet(items, {}), [system], Scorers(), Path(folder))["fledgling"]
        wall, used = time.perf_counter() - start, time.process_time() - used
        seconds = sum(soundfile.info(Path(folder, row.audio)).duration for row in rows if row.audio)
    card = torch.cuda.get_device_name() if device == "cuda" else processor()
    facts = {
        **{"date": str(date.today()), "device": card, "cores": os.cpu_count(), "torch": torch.__version__},
        **{"lines": lines, "speech_s": seconds, "stopped": sum(bool(row.stopped) for row in rows)},
        **{"wall_s": wall, "cpu_s": used, "load": os.getloadavg()[0]},
    }
    print(json.dumps(facts), flush=True)
    save_figures(out / f"speak-evaluate-{device}.json", facts)


def processor() -> str:
    names = Path("/proc/cpuinfo")
    lines = names.read_text(encoding="utf-8").splitlines() if names.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def drawing(rows: list[dict[str, Any]]) -> str:
    """Draw the seconds of speech made in a second, as bars on a logarithmic scale."""
    shown = [row for row in rows if "audio_s_per_s" in row]
    labels = [f"{row['audio_s_per_s']:,.1f} ({row['ms_per_frame']:.2f} ms a frame)" for row in shown]
    title = "seconds of speech made in a second, on a logarithmic scale"
    column = BarColumn(title, [row["audio_s_per_s"] for row in shown], labels, is_logarithmic=True)
    faint = [row["name"].startswith("transformers") for row in shown]
    return bars_file([row["name"] for row in shown], [column], faint=faint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--adapters", action="store_true")
    parser.add_argument("--fledgling", action="store_true")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.fledgling:
        fledgling(arguments.out)
        return
    if arguments.evaluate:
        evaluate_lines(arguments.out, arguments.device)
        return
    name = "speak-adapters" if arguments.adapters else "speak"
    bench = Bench(torch.device(arguments.device), arguments.tiny, arguments.out, name)
    counts = [1, 2] if arguments.tiny else [1, 64] if arguments.adapters else arguments.rows
    positions = CONTEXT + FRAMES + 68
    decoder = bench.decoder(max(counts), positions)
    for rows in counts:
        bench.measure(f"ours, {rows} rows", partial(bench.decode, decoder, rows))
    bench.measure_adapters(positions)
    if arguments.adapters:
        return
    adapter_rows = 2 if arguments.tiny else 64
    exact = bench.decoder(adapter_rows, positions, exact=True)
    for rows in (1, adapter_rows):
        bench.measure(f"ours, exact, {rows} rows", partial(bench.decode, exact, rows))
    del exact
    codec = bench.codec()
    start = time.perf_counter()
    warm_up(codec, max(counts))
    bench.facts["codec_warm_up_s"] = time.perf_counter() - start
    for rows in counts[-3:]:
        bench.measure(f"ours with codec, {rows} rows", partial(bench.decode, decoder, rows, codec))
    bench.measure("prefill", bench.prefill)
    bench.measure("first audio", partial(bench.first_audio, codec))
    if bench.device.type == "cuda":
        bench.measure("synchronizations", bench.synchronizations)
    for rows in (1, 8):
        bench.measure(f"transformers generate, {rows} rows", partial(bench.stock, rows, 8 if bench.small else 40))
    del decoder
    small, device, out = bench.small, bench.device, bench.out
    for kind in ("fp8", "int8", "nf4", "adapter"):
        measured, facts = bench.rows, bench.facts
        bench.model = None
        bench = Bench(device, small, out)  # the last kind has changed its model
        bench.rows, bench.facts = measured, facts
        if kind == "fp8" and not supports_fp8(device):
            continue
        bench.change_weights(kind)
        for rows in (1, adapter_rows):
            name = "in training" if kind == "adapter" else kind
            bench.measure(f"ours, {name}, {rows} rows", partial(bench.decode_changed, kind, rows))
    (arguments.out / "speak.svg").write_text(drawing(bench.rows), encoding="utf-8")


if __name__ == "__main__":
    main()
