"""Seconds of each stage of `refine`, the work of `myna curate` on one part, and the memory that it took of a GPU.

python benchmarks/curate_stages.py RECORDING --asr WHISPER --device cuda --out stages.json

The part is refined twice: first with everything that is done once in a process (kernels loaded, graphs recorded), then
without. A stage's seconds are its own, without those of stages inside it; the GPU is waited for at both ends of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import torch

from myna.audio.files import probe, read_audio
from myna.curate.models import CurationModels
from myna.curate.recordings import SAMPLE_RATE
from myna.curate.refine import Part, refine
from myna.curate.settings import load_curate_settings

STAGES = (
    *("faster_whisper.feature_extractor:FeatureExtractor.__call__", "faster_whisper:WhisperModel.find_alignment"),
    *(
        f"myna.listen.asr_torch_whisper:TorchWhisperNetwork.{method}"
        for method in ("encode", "detect_language", "generate", "align")
    ),
    *("myna.listen.asr_torch_whisper:time_warping", "myna.listen.asr:as_mono_16khz"),
    *("myna.listen.segmentation:SegmentationNetwork.segment", "myna.listen.ecapa:EcapaEncoder.embed_batch"),
    *("myna.listen.quality:DNSMOSNetwork.score", "myna.listen.noise:DeepFilterNet.snr_db"),
    *("myna.listen.music:SpeechMusicNoiseNetwork.music_share", "myna.curate.refine:release_free_memory"),
    *("myna.listen.measures:narrowest_bandwidth_hz", "myna.listen.measures:integrated_loudness"),
    *("myna.listen.measures:release_free_memory", "myna.curate.refine:resample_pcm"),
    *("myna.curate.refine:measure_text", "myna.curate.refine:cut_clips", "myna.curate.refine:_gap_snr_db"),
    *(f"myna.curate.models:CurationModels.{method}" for method in ("find_speakers", "normalise_text", "fingerprint")),
)
"""Functions by module, where they are looked up."""


class StageTimer:
    """Seconds by stage; those of a stage within another count for the inner one alone."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait, self._stack, self._since = wait, ["rest"], time.perf_counter()
        self.seconds, self.calls = Counter[str](), Counter[str]()

    def switch(self) -> None:
        """Seconds up to now belong to the stage that is running."""
        self._wait()
        now = time.perf_counter()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.switch()
            self._stack.append(stage)
            self.calls[stage] += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.switch()
                self._stack.pop()

        return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--asr", required=True, help="folder of a Whisper for transformers")
    parser.add_argument("--models", default=".cache/curation")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=7.5, help="of the recording, from its beginning, at most")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    on_gpu = arguments.device.startswith("cuda")
    torch.set_num_threads(1)
    options = (f"asr={arguments.asr}", f"models={arguments.models}", f"device={arguments.device}")
    settings = load_curate_settings(None, [f"listen.{option}" for option in options])
    report: dict[str, Any] = {"import_seconds": round(time.time() - psutil.Process().create_time(), 2)}
    began = time.perf_counter()
    models = CurationModels.open(settings.listen, 1)
    report["device"] = torch.cuda.get_device_name() if on_gpu else "cpu"
    report["open_seconds"] = round(time.perf_counter() - began, 2)
    seconds = min(60 * arguments.minutes, probe(arguments.recording).seconds)
    samples = read_audio(arguments.recording, sample_rate=SAMPLE_RATE, span=(0.0, seconds))
    pcm = (np.clip(samples, -1, 1) * 32767).astype(np.int16)
    part = Part("part", "recording", 0, len(samples) * 1000 // SAMPLE_RATE, "part.flac")
    report["audio_seconds"] = part.seconds
    for run in range(arguments.runs):
        timer = StageTimer(torch.cuda.synchronize if on_gpu else lambda: None)
        with ExitStack() as stack:
            for stage in STAGES:
                module, _, path = stage.partition(":")
                *owners, name = path.split(".")
                owner = functools.reduce(getattr, owners, importlib.import_module(module))
                stack.enter_context(mock.patch.object(owner, name, timer.timed(path, getattr(owner, name))))
            timed = dataclasses.replace(models, find_speech=timer.timed("voice_activity", models.find_speech))
            table = refine(part, pcm, timed, settings)
            timer.switch()
        total = timer.seconds.total()
        report[f"run {run}"] = {
            "seconds": round(total, 2),
            "seconds_of_audio_a_second": round(part.seconds / total, 1),
            "clips": table["kind"].to_pylist().count("clip"),
            "stages": {stage: round(seconds, 3) for stage, seconds in timer.seconds.most_common()},
            "calls": dict(timer.calls.most_common()),
        }
    if on_gpu:
        report["gpu_gb_at_most"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
