"""Hours of speech of speakers that do not exist, out of espeak-ng: robotic, but cheap, and every voice another.

python training/fledgling/espeak_corpus.py --texts data/fledgling/texts --out data/fledgling/espeak \\
    --hours 100 --speakers 2500

One core makes some 300 hours an hour. Stopped at any moment, it goes on where it was when it is run again.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import soxr  # type: ignore[import-untyped]

from corpus_making.channel import Channel
from corpus_making.espeak import Espeak, Speaker
from corpus_making.folder import SAMPLE_RATE, CorpusFolder
from corpus_making.lines import Lines
from corpus_making.sound import Samples, at_level, speaker_level, trim
from corpus_making.survivors import done_by_survivors
from myna.errors import MynaError

FEWEST_CLIPS = 6
"""Of a speaker: each clip wants another one as its reference."""
HEAP = 4
"""Speakers that a process makes before it asks for more."""
SHORTEST, LONGEST = 0.25, 14.0
"""Seconds of a clip; others are left out."""


@dataclass(frozen=True, slots=True)
class Asked:
    texts: str
    hours: float
    speakers: int
    seed: int
    other: float
    """Share of Arabic speakers, and of Vietnamese ones."""
    channels: bool = True
    """Whether there are microphones, rooms and noise between speakers and files."""

    def names(self) -> list[str]:
        return [f"espeak{self.seed}-{number:05d}" for number in range(self.speakers)]

    def language(self, name: str) -> str:
        kind = random.Random(f"{self.seed}/language/{name}").random()
        return "ar" if kind < self.other else "vi" if kind < 2 * self.other else "en"


@cache
def _espeak() -> Espeak:
    """One for each process."""
    return Espeak()


@cache
def _lines(folder: str) -> Lines:
    return Lines.read(Path(folder))


def make_speaker(asked: Asked, out: Path, name: str) -> float:
    """All clips of one speaker, unless they are there; how many seconds were made."""
    corpus = CorpusFolder(out)
    if corpus.has(name):
        return 0.0
    language = asked.language(name)
    return corpus.add(name, language, _clips(asked, name, language))


def _clips(asked: Asked, name: str, language: str) -> Iterator[tuple[str, Samples]]:
    espeak, lines, dice = _espeak(), _lines(asked.texts), random.Random(f"{asked.seed}/clips/{name}")
    espeak.meet(Speaker.draw(name, language, asked.seed))
    level, wanted, said = speaker_level(name, asked.seed), asked.hours * 3600 / asked.speakers, set[str]()
    channel = Channel.draw(name, asked.seed) if asked.channels else Channel()
    seconds, clips = 0.0, 0
    while seconds < wanted or clips < FEWEST_CLIPS:
        text = lines.draw(language, dice)
        if text in said and len(said) < len(lines.of.get(language, ())):
            continue
        said.add(text)
        spoken = soxr.resample(espeak.say(text), espeak.sample_rate, SAMPLE_RATE, quality="HQ")
        samples = at_level(channel.record(trim(spoken, SAMPLE_RATE, dice)), SAMPLE_RATE, level, dice)
        if SHORTEST <= len(samples) / SAMPLE_RATE <= LONGEST:
            seconds, clips = seconds + len(samples) / SAMPLE_RATE, clips + 1
            yield text, samples


def _make_some(asked: Asked, out: Path, names: Sequence[str]) -> float:
    return sum(make_speaker(asked, out, name) for name in names)


def _heaps(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[start : start + HEAP] for start in range(0, len(names), HEAP)]


def make(asked: Asked, out: Path, jobs: int) -> None:
    settings = asdict(asked) | {"texts": Path(asked.texts).name}
    if not asked.channels:
        del settings["channels"]  # folders of before are clean, and go on so
    CorpusFolder(out).begin(settings)
    names, began, seconds = asked.names(), time.monotonic(), 0.0
    for number, one in enumerate(done_by_survivors(partial(_make_some, asked, out), _heaps(names), jobs), start=1):
        seconds += one
        if number % 50 == 0 or HEAP * number >= len(names):
            pace, made = seconds / (time.monotonic() - began), min(HEAP * number, len(names))
            print(f"{made} of {len(names)} speakers, {seconds / 3600:.1f} h now, {pace:.0f} x real time", flush=True)
    for part, count in CorpusFolder(out).finish().items():
        print(f"{out / part}: {count} clips")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="folder made by texts.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the corpus")
    parser.add_argument("--hours", type=float, default=100.0, help="of speech, held-out speakers included")
    parser.add_argument("--speakers", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--other", type=float, default=0.04, help="share of Arabic, and of Vietnamese speakers")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--clean", action="store_true", help="no microphones, rooms and noise")
    given = parser.parse_args()
    asked = Asked(str(given.texts), given.hours, given.speakers, given.seed, given.other, not given.clean)
    try:
        make(asked, given.out, given.jobs)
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
