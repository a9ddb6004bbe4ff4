"""Our server with a model that needs no checkpoint: random weights of the full size, or a model of no time.

python benchmarks/synthetic_server.py --random --streams 512     prints its address; `benchmarks/serve.py` starts it
python benchmarks/synthetic_server.py --instant --step-ms 10     a decoder and a codec that take no time of a processor
python benchmarks/synthetic_server.py --host-cost                processor time of a step beside the model, no server

Everything else is real: uvicorn, the checks of a request, the pipe between two processes, the running batch with its
streams and windows, the watermark, the encoder of the audio. The weights of the watermark's network are random as well,
and with the instant model it takes no time either.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.encode import make_codec
from benchmarks.synthetic import RandomHiggs

from myna.data.codec import Codes, PendingSamples, Samples
from myna.models.base import RenderedSequence, Sampling, StepResult
from myna.models.higgs_v2 import tiny
from myna.models.higgs_v2.codec import HiggsCodec
from myna.models.higgs_v2.decode import HiggsDecoder
from myna.provenance.watermark import PerthNet
from myna.serve import engine_client
from myna.serve.context import ServerSettings
from myna.serve.messages import AudioPiece, EngineSettings, SpeakMessage
from myna.serve.server import bind, run_server
from myna.speak.engine import Engine
from myna.speak.request import SpeechRequest

RECORDINGS = Path(__file__).parent.parent / "src/myna/demo/recordings"
TOKENS = 4096
"""Size of a tokenizer that is made for the demo's sentences: as few to a sentence as the released one needs."""


def demo_tokenizer() -> Any:
    """Tokenizer with the special tokens of the family, trained on the demo's sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=list(tiny.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rows = (RECORDINGS / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    core.train_from_iterator([json.loads(row)["text"] for row in rows], trainer)
    begin, end, pad = "<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>"
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=begin, eos_token=end, pad_token=pad)


def random_family(size: str, device: torch.device) -> RandomHiggs:
    """The family with a configuration of the full size, or a tiny one, and ids of `demo_tokenizer`."""
    family = RandomHiggs.of(size == "tiny", device)
    family.tokenizer = demo_tokenizer()
    ids = family.tokenizer.convert_tokens_to_ids
    names = tiny.tiny_config(codebook_size=1024) if size == "tiny" else family.config
    names.vocab_size = max(names.vocab_size, len(family.tokenizer))
    names.bos_token_id, names.eos_token_id = ids("<|begin_of_text|>"), ids("<|eot_id|>")
    names.pad_token_id, names.audio_bos_token_id = ids("<|end_of_text|>"), ids("<|audio_out_bos|>")
    names.audio_token_id, names.audio_delay_token_id = ids("<|AUDIO_OUT|>"), ids("<|reserved_special_token_6|>")
    family.config = names
    return family


@cache
def random_perth(device: torch.device) -> PerthNet:
    """The network of the watermark with random weights, whose mark is all but silent."""
    shapes = [(256, 128, 1), *[(256, 256, 7)] * 5, (128, 256, 1)]
    generator, weights = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for part in ("encoder.layers", *(f"decoder.{tempo}_layers" for tempo in ("slow", "normal", "fast"))):
        for number, shape in enumerate(shapes):
            weights[f"{part}.{number}.conv.weight"] = 0.01 * torch.randn(shape, generator=generator)
            weights[f"{part}.{number}.conv.bias"] = torch.zeros(shape[0])
    return PerthNet(weights).to(device).eval().requires_grad_(False)


def random_engine(size: str, device: torch.device) -> Engine:
    """Random weights of model, codec and watermark: in bf16 on a GPU, as a model is served."""
    from myna.provenance import watermark
    from myna.serve import engine_process

    engine_process.check_installed = lambda: None  # type: ignore[attr-defined]  # it need not be there
    watermark.load_perth = random_perth  # type: ignore[attr-defined]
    family = random_family(size, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = family.load_model(dtype=dtype, device=device, text_head=False).requires_grad_(False)
    if size != "tiny":
        return Engine(family, model, make_codec(device, small=False))
    with tempfile.TemporaryDirectory() as folder:
        codec = HiggsCodec.open(tiny.save_tiny_codec(Path(folder), codebook_size=1024), device=device)
    return Engine(family, model, codec)


class InstantDecoder(HiggsDecoder):
    """Decoding batch that has every frame at once, `step_seconds` of waiting after the one before."""

    steps_ahead = 2

    def __init__(self, family: RandomHiggs, rows: int, max_positions: int, step_seconds: float) -> None:
        self.delay, self.rows, self.max_positions = family.delay, rows, max_positions
        self.adapters, self.exact, self.core = None, False, SimpleNamespace(config=family.config)
        self._left = torch.zeros(rows, dtype=torch.int64)
        shape = (rows, family.delay.codebooks)
        self._codes = torch.randint(0, 1024, shape, generator=torch.Generator().manual_seed(0))
        self._log_probs = torch.zeros(shape)
        self._step_seconds, self._ends = step_seconds, 0.0

    def prefill(self, row: int, prompt: RenderedSequence) -> None: ...

    def copy_prompt(self, source: int, target: int, positions: int) -> None: ...

    def begin(self, row: int, positions: int, sampling: Sampling, max_frames: int) -> None:  # noqa: ARG002
        self._left[row] = max_frames + self.delay.codebooks

    def move_row(self, source: int, target: int, positions: int) -> None:  # noqa: ARG002
        self._left[target] = self._left[source]

    def end(self, row: int) -> None: ...

    def step(self, rows: int, longest: int) -> InstantStep:  # noqa: ARG002
        self._left[:rows] -= 1
        self._ends = max(self._ends, time.perf_counter()) + self._step_seconds
        active = (self._left[:rows] > 0).to(torch.int64)
        return InstantStep(StepResult(self._codes[:rows], self._log_probs[:rows], active), self._ends)


class InstantStep:
    """Result of a step that is there at a moment."""

    def __init__(self, result: StepResult, ends: float) -> None:
        self._result, self._ends = result, ends

    def result(self) -> StepResult:
        time.sleep(max(0.0, self._ends - time.perf_counter()))
        return self._result


class ToneCodec:
    """Codec whose every window is a tone."""

    revision, sample_rate, hop, codebooks, codebook_size, frame_rate = "tone", 24_000, 960, 8, 1024, 25.0
    decode_reach, window_independent = 10, True

    def __init__(self) -> None:
        time_axis = np.arange(200 * self.hop) / self.sample_rate
        self._tone = (0.3 * np.sin(2 * np.pi * 220 * time_axis)).astype(np.float32)

    def encode(self, clips: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
        return np.zeros((len(clips), clips.shape[1] // self.hop, self.codebooks), np.uint16)

    def decode_windows(self, windows: Sequence[Codes]) -> PendingSamples:
        return lambda: [self._tone[: len(window) * self.hop] for window in windows]

    def decode(self, codes: Codes) -> Samples:
        return self._tone[: len(codes) * self.hop]


def instant_engine(step_seconds: float) -> Engine:
    from myna.provenance import watermark
    from myna.serve import engine_process

    engine_process.check_installed = lambda: None  # type: ignore[attr-defined]
    watermark._stack_size = lambda device: watermark.MAX_STACKED  # noqa: ARG005
    watermark._mark_frames = lambda samples, *_: torch.zeros(1, 1).expand(samples.shape)
    return tone_engine(partial(InstantDecoder, step_seconds=step_seconds), ToneCodec())


def tone_engine(make_decoder: Callable[[RandomHiggs, int, int], HiggsDecoder], codec: ToneCodec) -> Engine:
    """An engine whose decoder is made for so many rows and positions."""
    family = random_family("tiny", torch.device("cpu"))
    model = family.load_model(dtype=torch.float32, device="cpu", text_head=False).requires_grad_(False)
    family.speech_decoder = lambda _, rows, positions, *__, **___: make_decoder(  # type: ignore[method-assign]
        family, rows, positions
    )
    return Engine(family, model, codec)  # type: ignore[arg-type]


def run_synthetic_engine(kind: str, step_seconds: float, settings: EngineSettings, connection: Connection) -> None:
    """Main function of the engine process."""
    from myna.core.device import pick_device
    from myna.serve import engine_process

    def open_worker(settings: EngineSettings) -> engine_process.SpeechWorker:
        if kind == "instant":
            return engine_process.SpeechWorker(instant_engine(step_seconds), settings)
        return engine_process.SpeechWorker(random_engine(kind, pick_device(settings.device)), settings)

    engine_process.open_worker = open_worker
    engine_process.run_engine(settings, connection)


def host_cost(rows: int, steps: int = 250) -> dict[str, float]:
    """Processor time of a step of so many streams beside the model, from their first frame to their tenth second."""
    from myna.serve.engine_process import SpeechWorker

    worker = SpeechWorker(instant_engine(0.0), EngineSettings("instant", rows=rows, positions=1024, max_waiting=rows))
    request = SpeechRequest("The light is grey. " * 8, max_seconds=steps / 25)
    for number in range(rows):
        worker.handle(SpeakMessage(request, id=f"{number}"))
    worker.step()  # lets all of them in
    start, wall, audio, count = time.process_time(), time.perf_counter(), 0.0, 0
    while worker.busy:
        count += 1
        for event in worker.step():
            audio += len(event.pcm) / 2 / 24_000 if isinstance(event, AudioPiece) else 0.0
    spent, wall = time.process_time() - start, time.perf_counter() - wall
    figures = {"ms_per_step": 1000 * spent / count, "audio_s_per_processor_s": audio / spent, "wall_s": wall}
    return {"streams": rows, **{name: round(value, 3) for name, value in figures.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--instant", dest="kind", action="store_const", const="instant", help="a model of no time")
    kind.add_argument("--random", dest="kind", action="store_const", const="full", help="random weights, full size")
    kind.add_argument("--tiny", dest="kind", action="store_const", const="tiny", help="the same, very small")
    kind.add_argument("--host-cost", action="store_true", help="print the processor time of a step, and end")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--queue", type=int, default=1024)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--step-ms", type=float, default=0.0, help="that a step of the instant model takes")
    parser.add_argument("--no-watermark", action="store_true")
    asked = parser.parse_args()
    if asked.host_cost:
        for rows in (64, 256, 512):
            print(json.dumps(host_cost(rows)), flush=True)
        return
    listener: socket.socket = bind("127.0.0.1", asked.port)
    host, port = listener.getsockname()[:2]
    engine_client._run_engine = partial(run_synthetic_engine, asked.kind, asked.step_ms / 1000)
    engine = EngineSettings(
        "higgs-v2",  # a name that needs no folder
        device=asked.device,
        rows=asked.streams,
        positions=asked.positions,
        max_waiting=asked.queue,
        watermark=not asked.no_watermark,
    )
    settings = ServerSettings(engine, host=host, port=port)
    run_server(settings, listener, lambda _: print(f"http://{host}:{port} Ctrl+C ends it", flush=True))


if __name__ == "__main__":
    main()
