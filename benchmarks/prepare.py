"""Speed of `myna prepare` for many short spans of a few long Opus recordings.

python benchmarks/prepare.py --files 4 --minutes 20 --model fledgling
python benchmarks/prepare.py --files 1 --minutes 1        a look at the whole, in a minute

Recordings are voiced noise at 48 kHz, cut into spans of 4 to 5 s. Prints hours of audio an hour, of the whole command
and of encoding alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

import myna
from myna.audio.files import write_audio
from myna.models.higgs_v2.batched_encoder import synthetic_speech

SAMPLE_RATE = 48_000


def write_source(folder: Path, files: int, minutes: float) -> Path:
    """Write recordings and a table of their spans."""
    lines = ["id\taudio\ttext\tspeaker\tstart\tend"]
    [minute] = synthetic_speech([60 * SAMPLE_RATE], SAMPLE_RATE)
    for number in range(files):
        write_audio(
            folder / f"{number}.opus", np.resize(np.roll(minute, number), int(minutes * len(minute))), SAMPLE_RATE
        )
        edges = np.cumsum(np.random.default_rng(number).uniform(4, 5, int(minutes * 15)))
        for start, end in pairwise(edges):
            if end < 60 * minutes:
                name = f"{number}-{start:.3f}\t{number}.opus\tsome words to be spoken\tspeaker {number}"
                lines.append(f"{name}\t{start:.3f}\t{end:.3f}")
    (folder / "table.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "table.tsv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--model", default="fledgling")
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = write_source(Path(folder), asked.files, asked.minutes)
        began, used = time.perf_counter(), time.process_time()
        prepared = myna.prepare(source, Path(folder) / "out", model=asked.model, device=asked.device)
        seconds, used = time.perf_counter() - began, time.process_time() - used
    hours = asked.files * asked.minutes / 60
    print(*prepared.notes, sep="\n")
    print(f"{3600 * hours / seconds:.1f} x real time as a whole, {used / (60 * hours):.2f} s of CPU time a minute")


if __name__ == "__main__":
    main()
