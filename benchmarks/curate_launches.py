"""Kernel launches of `myna curate` on a GPU for each second of audio, by network; counted without one.

python benchmarks/curate_launches.py RECORDING --asr WHISPER

A part is refined on the CPU with the batch sizes of a GPU, and the operations of torch that are no views are counted:
each is a launch or two; a step of the beam search is a graph, and one. WHISPER is a folder of
tools/whisper_to_transformers.py.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from myna.audio.files import read_audio
from myna.curate.models import CurationModels
from myna.curate.recordings import SAMPLE_RATE
from myna.curate.refine import Part, refine
from myna.curate.settings import load_curate_settings
from myna.listen import asr_transformers, ecapa
from myna.listen.asr_beam_search import BeamSearch
from myna.listen.asr_torch_whisper import TorchWhisperNetwork
from myna.listen.music import SpeechMusicNoiseNetwork
from myna.listen.quality import DNSMOSNetwork
from myna.listen.segmentation import SegmentationNetwork

LAUNCH_SECONDS = 6e-6
"""Of a host, for each kernel launch by PyTorch."""
WATCHED = (
    *((TorchWhisperNetwork, method) for method in ("encode", "detect_language", "generate", "align")),
    (SegmentationNetwork, "segment"),
    (ecapa.EcapaEncoder, "embed_batch"),
    (DNSMOSNetwork, "score"),
    (SpeechMusicNoiseNetwork, "music_share"),
)


class LaunchCounter(TorchDispatchMode):
    """Counts operations that are no views, by the method that they are done in."""

    def __init__(self) -> None:
        super().__init__()
        self.place = "rest"
        self.launches, self.calls = Counter[str](), Counter[str]()
        self.graph_operations, self._in_graph = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._in_graph:
            self.graph_operations += not func.is_view
        else:
            self.launches[self.place] += not func.is_view
        return func(*args, **(kwargs or {}))

    def graph(self, owner: type, method: str) -> Any:
        """The method, which is one launch."""
        original = getattr(owner, method)

        @functools.wraps(original)
        def counted(*args: Any) -> None:
            self.launches[self.place] += 1
            self.calls[method] += 1
            self._in_graph = True
            original(*args)
            self._in_graph = False

        return mock.patch.object(owner, method, counted)

    def watched(self, owner: type, method: str) -> Any:
        """The method, whose operations are counted apart."""
        original, place = getattr(owner, method), f"{owner.__name__}.{method}"

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            before, self.place = self.place, place
            self.calls[place] += 1
            try:
                return original(*args, **kwargs)
            finally:
                self.place = before

        return mock.patch.object(owner, method, counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--asr", required=True, help="folder of a Whisper for transformers")
    parser.add_argument("--models", default=".cache/curation")
    parser.add_argument("--minutes", type=float, default=7.5, help="of the recording, from its beginning")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = load_curate_settings(None, [f"listen.asr={arguments.asr}", f"listen.models={arguments.models}"])
    models = CurationModels.open(settings.listen, 1)
    samples = read_audio(arguments.recording, sample_rate=SAMPLE_RATE, span=(0.0, 60 * arguments.minutes))
    part = Part("part", "recording", 0, len(samples) * 1000 // SAMPLE_RATE, "part.flac")
    counter = LaunchCounter()
    with ExitStack() as stack:
        for owner, method in WATCHED:
            stack.enter_context(counter.watched(owner, method))
        stack.enter_context(counter.graph(BeamSearch, "_step"))
        whisper, encoder = asr_transformers.TransformersWhisper, ecapa.EcapaEncoder
        stack.enter_context(mock.patch.object(whisper, "batch_size", asr_transformers.GPU_BATCH_CLIPS))
        stack.enter_context(mock.patch.object(encoder, "batch_size", ecapa.GPU_BATCH_CLIPS))
        stack.enter_context(counter)
        table = refine(part, (np.clip(samples, -1, 1) * 32767).astype(np.int16), models, settings)
    launches = counter.launches.total() / part.seconds
    report = {
        "audio_seconds": part.seconds,
        "clips": table["kind"].to_pylist().count("clip"),
        "launches_per_audio_second": {
            place: round(count / part.seconds, 1) for place, count in counter.launches.most_common()
        },
        "calls": dict(counter.calls.most_common()),
        "operations_of_a_graph": round(counter.graph_operations / max(1, counter.calls["_step"])),
        "launches_per_audio_second_in_all": round(launches, 1),
        "host_ms_per_audio_second": round(1000 * LAUNCH_SECONDS * launches, 2),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
