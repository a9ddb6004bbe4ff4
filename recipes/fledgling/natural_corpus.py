"""Natural English of many speakers, out of Kokoro-82M: parquet files like those of the corpus `en-natural`.

python recipes/fledgling/natural_corpus.py --texts data/fledgling/texts --out data/fledgling/natural \\
    --hours 10 --speakers 600
python recipes/fledgling/natural_corpus.py --texts data/fledgling/texts --out data/fledgling/natural \\
    --hours 60 --speakers 2400 --device cuda --weights data/fledgling/kokoro --jobs 14 --seconds 150

Two cores make about three hours an hour; a card is hundreds of times as fast. Stopped at any moment, it loses at most a
part of some minutes and goes on there when it is run again. Columns: id, text, speaker, language, seconds, audio
{bytes, path}: OGG/Opus, or WAV where a card makes it, since such files stay there and encoding would take longer than
speaking. Held-out speakers are among the others; `shape_natural.py` tells them apart.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

from corpus_making.folder import CorpusFolder
from corpus_making.kokoro import SAMPLE_RATE, Kokoro, OnnxKokoro, Request, Samples, Speaker, joined
from corpus_making.lines import Lines
from myna.audio.files import replacing
from myna.errors import ConfigError, MynaError

FEWEST_CLIPS, PART = 6, 2
"""Clips of a speaker, and speakers of a file."""
TYPICAL, LONGEST = 3.0, 14.0
"""Seconds of a clip: how many are asked for at once is counted with the first, and what is longer is left out."""
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


@dataclass(frozen=True, slots=True)
class Means:
    """What a process makes speech with."""

    texts: Path
    packages: Path
    weights: tuple[Path, ...]
    device: str

    @property
    def on_card(self) -> bool:
        return self.device != "cpu"


@cache
def _tools(means: Means) -> tuple[Lines, Kokoro]:
    """For each process its own, on one thread: two processes get more done than two threads."""
    lines = Lines.read(means.texts)
    if not means.on_card:
        return lines, OnnxKokoro(means.packages, threads=1)
    import torch

    from corpus_making.kokoro_torch import TorchKokoro

    torch.set_num_threads(1)
    return lines, TorchKokoro(means.weights, means.device)


def make_part(asked: Asked, means: Means, until: float, file: Path, names: list[str]) -> float:
    """One parquet file; how many seconds it holds. None is begun after the moment `until`."""
    if time.time() >= until:
        return 0.0
    lines, kokoro = _tools(means)
    rows = rows_of(asked, lines, kokoro, names, "wav" if means.on_card else "opus")
    with replacing(file) as temporary:  # sound is not made smaller by what makes columns smaller
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), temporary, compression="none", use_dictionary=False)
    return float(sum(row["seconds"] for row in rows))


def make(asked: Asked, means: Means, out: Path, jobs: int, seconds: float = math.inf) -> float:
    """How many seconds of speech were made, in so many seconds and what it takes to finish what was begun then."""
    CorpusFolder(out).begin(asdict(asked) | {"speakers of a part": PART})
    if not means.on_card:
        joined(means.packages)  # by one process, before the others look for it
    missing = [(out / file, names) for file, names in asked.parts() if not (out / file).is_file()]
    began, until, made, number = time.monotonic(), time.time() + seconds, 0.0, 0
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        begun = {pool.submit(make_part, asked, means, until, *each): each[0] for each in missing}
        for done in as_completed(begun):
            length = done.result()
            if length == 0:
                continue
            number, made = number + 1, made + length
            pace = made / (time.monotonic() - began)
            print(
                f"{begun[done].name}, {number} of {len(missing)}; {made / 3600:.2f} h now, {pace:.2f} x real time",
                flush=True,
            )
    return made


@dataclass(slots=True)
class Session:
    """One speaker before the microphone."""

    speaker: Speaker
    dice: random.Random
    wanted: float
    """Seconds."""
    said: set[str] = field(default_factory=set)
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def enough(self) -> bool:
        return self.seconds >= self.wanted and len(self.rows) >= FEWEST_CLIPS

    def ask(self, lines: Lines, most: int) -> Iterator[Request]:
        """Lines for about what is still wanted, each of them new."""
        count = max(math.ceil((self.wanted - self.seconds) / TYPICAL), FEWEST_CLIPS - len(self.rows), 1)
        for _ in range(min(count, most)):
            text = lines.draw_natural(self.dice)
            while text in self.said:
                text = lines.draw_natural(self.dice)
            self.said.add(text)
            yield Request(text, self.speaker, self.speaker.speed * self.dice.uniform(0.95, 1.05))

    def hear(self, text: str, samples: Samples, format: str) -> None:
        if not 0 < len(samples) <= LONGEST * SAMPLE_RATE:
            return
        name, length = self.speaker.name, len(samples) / SAMPLE_RATE
        id = f"{name}-{len(self.rows):03d}"
        audio = {"bytes": _encoded(samples, format), "path": f"{id}.{format}"}
        self.seconds += length
        self.rows.append({"id": id, "text": text, "speaker": name, "language": "en", "seconds": length, "audio": audio})


def rows_of(
    asked: Asked, lines: Lines, kokoro: Kokoro, names: Sequence[str], format: str = "opus"
) -> list[dict[str, Any]]:
    """All clips of these speakers, who take turns so that many lines are said at once."""
    sessions = [
        Session(
            Speaker.draw(name, kokoro.voices, asked.seed),
            random.Random(f"{asked.seed}/clips/{name}"),
            asked.hours * 3600 / asked.speakers,
        )
        for name in names
    ]
    while waiting := [session for session in sessions if not session.enough]:
        turns = [(session, request) for session in waiting for request in session.ask(lines, kokoro.at_once)]
        sounds = kokoro.say([request for _, request in turns])
        for (session, request), samples in zip(turns, sounds, strict=True):
            session.hear(request.text, samples, format)
    return [row for session in sessions for row in session.rows]


def _encoded(samples: Samples, format: str) -> bytes:
    """Opus takes about 35 kilobits a second, and is transparent for speech at this rate."""
    file = io.BytesIO()
    container, subtype = {"opus": ("OGG", "OPUS"), "wav": ("WAV", "PCM_16")}[format]
    soundfile.write(file, samples.clip(-1, 1), SAMPLE_RATE, format=container, subtype=subtype)
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
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="onnxruntime, or PyTorch on a card")
    parser.add_argument(
        "--weights", type=Path, nargs="+", default=[], help="for --device cuda: folders with what kokoro_files.py made"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no part after so many")
    given = parser.parse_args()
    asked = Asked(given.hours, given.speakers, given.seed)
    means = Means(given.texts, given.packages, tuple(given.weights), given.device)
    try:
        if means.on_card and not means.weights:
            raise ConfigError("a card wants weights", hint="--weights FOLDER, as kokoro_files.py made it")
        make(asked, means, given.out, given.jobs, given.seconds)
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
