"""Natural English of many speakers, out of Kokoro-82M: parquet files like those of the corpus `en-natural`.

python recipes/fledgling/natural_corpus.py --texts data/fledgling/texts --out data/fledgling/natural \\
    --hours 10 --speakers 600

Two cores make about three hours an hour. Stopped at any moment, it loses at most a part of some minutes and goes on
there when it is run again. Columns: id, text, speaker, language, seconds, audio {bytes: OGG/Opus, path}. Held-out
speakers are among the others; `shape_natural.py` tells them apart.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

from corpus_making.folder import CorpusFolder
from corpus_making.kokoro import SAMPLE_RATE, Kokoro, Samples, Speaker, joined
from corpus_making.lines import Lines
from myna.audio.files import replacing
from myna.errors import MynaError

FEWEST_CLIPS, PART = 6, 4
"""Clips of a speaker, and speakers of a file."""
LONGEST = 14.0
"""Seconds of a clip; others are left out."""
SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "text", "speaker", "language")),
        ("seconds", pa.float32()),
        ("audio", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
    ]
)


@dataclass(frozen=True, slots=True)
class Asked:
    hours: float
    speakers: int
    seed: int

    def parts(self) -> Iterator[tuple[str, list[str]]]:
        names = [f"kokoro{self.seed}-{number:04d}" for number in range(self.speakers)]
        for at in range(0, len(names), PART):
            yield f"part-{at // PART:04d}.parquet", names[at : at + PART]


@cache
def _tools(texts: Path, packages: Path) -> tuple[Lines, Kokoro]:
    """For each process its own, on one thread: two processes get more done than two threads."""
    return Lines.read(texts), Kokoro(packages, threads=1)


def make_part(asked: Asked, texts: Path, packages: Path, file: Path, names: list[str]) -> float:
    """One parquet file; how many seconds it holds."""
    lines, kokoro = _tools(texts, packages)
    rows = [row for name in names for row in _rows(asked, lines, kokoro, name)]
    with replacing(file) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), temporary)
    return float(sum(row["seconds"] for row in rows))


def make(asked: Asked, texts: Path, packages: Path, out: Path, jobs: int) -> None:
    CorpusFolder(out).begin(asdict(asked))
    joined(packages)  # by one process, before the others look for it
    missing = [(out / file, names) for file, names in asked.parts() if not (out / file).is_file()]
    began, seconds = time.monotonic(), 0.0
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        begun = {pool.submit(make_part, asked, texts, packages, *each): each[0] for each in missing}
        for number, done in enumerate(as_completed(begun), start=1):
            seconds += done.result()
            pace = seconds / (time.monotonic() - began)
            print(
                f"{begun[done]}, {number} of {len(missing)}; {seconds / 3600:.2f} h now, {pace:.2f} x real time",
                flush=True,
            )


def _rows(asked: Asked, lines: Lines, kokoro: Kokoro, name: str) -> Iterator[dict[str, Any]]:
    dice, speaker = random.Random(f"{asked.seed}/clips/{name}"), Speaker.draw(name, kokoro.voices, asked.seed)
    wanted, said, seconds, clips = asked.hours * 3600 / asked.speakers, set[str](), 0.0, 0
    while seconds < wanted or clips < FEWEST_CLIPS:
        text = lines.draw_natural(dice)
        samples = kokoro.say(text, speaker, speaker.speed * dice.uniform(0.95, 1.05))
        if text in said or not 0 < len(samples) <= LONGEST * SAMPLE_RATE:
            continue
        said.add(text)
        id, length = f"{name}-{clips:03d}", len(samples) / SAMPLE_RATE
        seconds, clips = seconds + length, clips + 1
        audio = {"bytes": _opus(samples), "path": f"{id}.opus"}
        yield {"id": id, "text": text, "speaker": name, "language": "en", "seconds": length, "audio": audio}


def _opus(samples: Samples) -> bytes:
    """About 35 kilobits a second: transparent for speech at this rate."""
    file = io.BytesIO()
    soundfile.write(file, samples.clip(-1, 1), SAMPLE_RATE, format="OGG", subtype="OPUS")
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="folder made by texts.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument(
        "--packages", type=Path, default=Path("data/fledgling/packages"), help="where archives are kept"
    )
    parser.add_argument("--hours", type=float, default=10.0)
    parser.add_argument("--speakers", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    given = parser.parse_args()
    asked = Asked(given.hours, given.speakers, given.seed)
    try:
        make(asked, given.texts, given.packages, given.out, given.jobs)
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
