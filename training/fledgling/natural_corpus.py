"""Natural English of many speakers, out of Kokoro-82M: parquet files like those of the corpus `en-natural`.

python training/fledgling/natural_corpus.py --texts data/fledgling/texts --out data/fledgling/natural \\
    --hours 10 --speakers 600
python training/fledgling/natural_corpus.py --texts data/fledgling/texts --out data/fledgling/natural_shaped --shaped \\
    --hours 150 --speakers 4000 --device cuda --weights data/fledgling/kokoro --jobs 7 --seconds 300

Two cores make about three hours an hour; a card is hundreds of times as fast. Stopped at any moment, it loses at most a
part of some minutes and goes on there when it is run again. Columns: id, text, speaker, language, seconds, audio
{bytes, path}: OGG/Opus, or WAV where a card makes it, since such files stay there and encoding would take longer than
speaking. Held-out speakers are among the others; `shape_natural.py` tells them apart. With `--shaped` no parquet files
are written, but the very folder that `shape_natural.py` would make of them: no sound is written and read twice.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

from corpus_making.folder import CorpusFolder
from corpus_making.held_out import is_held_out
from corpus_making.kokoro import SAMPLE_RATE, Kokoro, OnnxKokoro, Request, Samples, Speaker, joined
from corpus_making.lines import Lines
from myna.errors import ConfigError, MynaError
from myna.io import replacing
from shape_natural import shaped_at_once

FEWEST_CLIPS, PART, HEAP = 6, 2, 8
"""Clips of a speaker, speakers of a file, and speakers that take turns where no file is to be filled."""
SHORT, LONGEST = 3.8, 14.0
"""Seconds of a clip, which has 4.3 in the mean: how many are asked for at once is counted with the first, since a few
too many cost less than another round. What is longer than the second is left out."""
JUDGES = 60
"""Held-out speakers at most: that many tell how well strangers are spoken for, and nothing is learned from more."""
WRITERS = 4
"""Threads of a process that write, since a disk may take its time for every file."""
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

    def names(self) -> list[str]:
        names = [f"kokoro{self.seed}-{number:04d}" for number in range(self.speakers)]
        judges = set(list(filter(is_held_out, names))[:JUDGES])
        return [name for name in names if name in judges or not is_held_out(name)]

    def parts(self) -> Iterator[tuple[str, list[str]]]:
        names = self.names()
        for at in range(0, len(names), PART):
            yield f"part-{at // PART:04d}.parquet", names[at : at + PART]


@dataclass(frozen=True, slots=True)
class Means:
    """What a process makes speech with."""

    texts: Path
    packages: Path
    weights: tuple[Path, ...]
    device: str
    exactly: bool = False
    """In single precision, without kernels of our own."""
    channels: bool = True
    """Whether speech that is shaped at once goes through microphones and rooms."""

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
    return lines, TorchKokoro(means.weights, means.device, means.exactly)


def make_part(asked: Asked, means: Means, until: float, file: Path, names: list[str]) -> float:
    """One parquet file; how many seconds it holds. None is begun after the moment `until`."""
    if time.time() >= until:
        return 0.0
    lines, kokoro = _tools(means)
    rows = rows_of(asked, lines, kokoro, names, "wav" if means.on_card else "opus")
    with replacing(file) as temporary:  # sound is not made smaller by what makes columns smaller
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), temporary, compression="none", use_dictionary=False)
    return float(sum(row["seconds"] for row in rows))


def make_heap(asked: Asked, means: Means, until: float, out: Path, names: list[str]) -> float:
    """Some speakers, shaped; how many seconds they said. None is begun after the moment `until`."""
    if time.time() >= until:
        return 0.0
    lines, kokoro = _tools(means)
    corpus = CorpusFolder(out)

    def write(session: Session) -> float:
        name = session.speaker.name
        return corpus.add(name, "en", shaped_at_once(name, session.clips, channels=means.channels))

    with ThreadPoolExecutor(WRITERS) as pool:
        return sum(pool.map(write, sessions_of(asked, lines, kokoro, names)))


def make(asked: Asked, means: Means, out: Path, jobs: int, seconds: float = math.inf, *, shaped: bool = False) -> float:
    """How many seconds of speech were made, in so many seconds and what it takes to finish what was begun then."""
    corpus = CorpusFolder(out)
    settings = asdict(asked) | ({"shaped": True} if shaped else {"speakers of a part": PART})
    if shaped and means.channels:
        settings["channels"] = True  # not said where there are none: folders of before are clean, and go on so
    corpus.begin(settings)
    if not means.on_card:
        joined(means.packages)  # by one process, before the others look for it
    if shaped:
        lacking = [name for name in asked.names() if not corpus.has(name)]
        missing = [(out, lacking[at : at + HEAP]) for at in range(0, len(lacking), HEAP)]
    else:
        missing = [(out / file, names) for file, names in asked.parts() if not (out / file).is_file()]
    work = make_heap if shaped else make_part
    began, until, made, number = time.monotonic(), time.time() + seconds, 0.0, 0
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        begun = {pool.submit(work, asked, means, until, where, names): names for where, names in missing}
        for done in as_completed(begun):
            length = done.result()
            if length == 0:
                continue
            number, made = number + 1, made + length
            pace = made / (time.monotonic() - began)
            who = f"{begun[done][0]} to {begun[done][-1]}"
            so_far = f"{number} of {len(missing)}; {made / 3600:.2f} h now, {pace:.2f} x real time"
            print(f"{who}: {so_far}", flush=True)
    if shaped:
        for part, count in corpus.finish().items():
            print(f"{out / part}: {count} clips", flush=True)
    return made


@dataclass(slots=True)
class Session:
    """One speaker before the microphone."""

    speaker: Speaker
    dice: random.Random
    wanted: float
    """Seconds."""
    said: set[str] = field(default_factory=set)
    clips: list[tuple[str, Samples]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def enough(self) -> bool:
        return self.seconds >= self.wanted and len(self.clips) >= FEWEST_CLIPS

    def ask(self, lines: Lines, most: int) -> Iterator[Request]:
        """Lines for about what is still wanted, each of them new."""
        count = max(math.ceil((self.wanted - self.seconds) / SHORT), FEWEST_CLIPS - len(self.clips), 1)
        for _ in range(min(count, most)):
            text = lines.draw_natural(self.dice)
            while text in self.said:
                text = lines.draw_natural(self.dice)
            self.said.add(text)
            yield Request(text, self.speaker, self.speaker.speed * self.dice.uniform(0.95, 1.05))

    def hear(self, text: str, samples: Samples) -> None:
        if 0 < len(samples) <= LONGEST * SAMPLE_RATE:
            self.seconds += len(samples) / SAMPLE_RATE
            self.clips.append((text, samples))

    def rows(self, format: str) -> Iterator[dict[str, Any]]:
        name = self.speaker.name
        for number, (text, samples) in enumerate(self.clips):
            id = f"{name}-{number:03d}"
            audio = {"bytes": _encoded(samples, format), "path": f"{id}.{format}"}
            length = len(samples) / SAMPLE_RATE
            yield {"id": id, "text": text, "speaker": name, "language": "en", "seconds": length, "audio": audio}


def sessions_of(asked: Asked, lines: Lines, kokoro: Kokoro, names: Sequence[str]) -> list[Session]:
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
            session.hear(request.text, samples)
    return sessions


def rows_of(
    asked: Asked, lines: Lines, kokoro: Kokoro, names: Sequence[str], format: str = "opus"
) -> list[dict[str, Any]]:
    """The same as rows of a table."""
    return [row for session in sessions_of(asked, lines, kokoro, names) for row in session.rows(format)]


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
    parser.add_argument(
        "--shaped", action="store_true", help="leave what shape_natural.py would make, and nothing else"
    )
    parser.add_argument("--exactly", action="store_true", help="for --device cuda: in fp32, without kernels of our own")
    parser.add_argument("--clean", action="store_true", help="for --shaped: no microphones, rooms and noise")
    given = parser.parse_args()
    asked = Asked(given.hours, given.speakers, given.seed)
    means = Means(given.texts, given.packages, tuple(given.weights), given.device, given.exactly, not given.clean)
    try:
        if means.on_card and not means.weights:
            raise ConfigError("a card wants weights", hint="--weights FOLDER, as kokoro_files.py made it")
        make(asked, means, given.out, given.jobs, given.seconds, shaped=given.shaped)
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
