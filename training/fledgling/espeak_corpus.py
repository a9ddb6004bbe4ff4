"""Corpus of random eSpeak NG voices: robotic, but cheap, and with any number of speakers.

python training/fledgling/espeak_corpus.py --texts data/fledgling/texts --out data/fledgling/espeak \\
    --hours 100 --speakers 2500

One core makes some 300 hours an hour. Interrupted, it continues when it is run again.
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
from corpus_making.corpus_folder import SAMPLE_RATE, CorpusClip, CorpusFolder
from corpus_making.espeak import ACCENTS, Espeak, EspeakSpeaker
from corpus_making.lines import TextPool
from corpus_making.loudness import at_level, speaker_level, trim
from corpus_making.process_pool import map_with_restarts
from corpus_making.written_forms import spoken_form
from myna.core.errors import MynaError

MIN_CLIPS = 6
"""Minimum number of clips of a speaker: each needs another one as its reference."""
SPEAKERS_PER_TASK = 4
MIN_SECONDS, MAX_SECONDS = 0.25, 14.0
"""Seconds of a clip; others are left out."""


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """Settings of the corpus."""

    texts: str
    hours: float
    speakers: int
    seed: int
    other_language_share: float
    """Share of Arabic speakers, and of Vietnamese ones."""
    channels: bool = True
    """Whether there are microphones, rooms and noise between speakers and files."""
    languages: tuple[str, ...] = ()
    """Languages of which every speaker has one, all as often; none: English, Arabic and Vietnamese."""

    def names(self) -> list[str]:
        return [f"espeak{self.seed}-{number:05d}" for number in range(self.speakers)]

    def language(self, name: str) -> str:
        rng = random.Random(f"{self.seed}/language/{name}")
        if self.languages:
            return rng.choice(self.languages)
        kind = rng.random()
        return "ar" if kind < self.other_language_share else "vi" if kind < 2 * self.other_language_share else "en"


@cache
def _espeak() -> Espeak:
    """Return the one eSpeak of this process."""
    return Espeak()


@cache
def _lines(folder: str) -> TextPool:
    return TextPool.read(Path(folder))


def make_speaker(config: CorpusConfig, out: Path, name: str) -> float:
    """All clips of one speaker, unless they are there; how many seconds were made."""
    corpus = CorpusFolder(out)
    if corpus.has(name):
        return 0.0
    language = config.language(name)
    return corpus.add(name, language, _clips(config, name, language))


def _clips(config: CorpusConfig, name: str, language: str) -> Iterator[CorpusClip]:
    espeak, lines, rng = _espeak(), _lines(config.texts), random.Random(f"{config.seed}/clips/{name}")
    espeak.set_speaker(EspeakSpeaker.draw(name, language, config.seed))
    level, wanted, used = speaker_level(name, config.seed), config.hours * 3600 / config.speakers, set[str]()
    channel = Channel.draw(name, config.seed) if config.channels else Channel()
    seconds, clips = 0.0, 0
    while seconds < wanted or clips < MIN_CLIPS:
        text = lines.draw(language, rng)
        if text in used and len(used) < len(lines.of.get(language, ())):
            continue
        used.add(text)
        spoken = espeak.say(spoken_form(text) if language == "en" else text)
        spoken = soxr.resample(spoken, espeak.sample_rate, SAMPLE_RATE, quality="HQ")
        samples = at_level(channel.record(trim(spoken, SAMPLE_RATE, rng)), SAMPLE_RATE, level, rng)
        if MIN_SECONDS <= len(samples) / SAMPLE_RATE <= MAX_SECONDS:
            seconds, clips = seconds + len(samples) / SAMPLE_RATE, clips + 1
            yield CorpusClip(text, samples)


def _make_speakers(config: CorpusConfig, out: Path, names: Sequence[str]) -> float:
    return sum(make_speaker(config, out, name) for name in names)


def _speaker_batches(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[start : start + SPEAKERS_PER_TASK] for start in range(0, len(names), SPEAKERS_PER_TASK)]


def make(config: CorpusConfig, out: Path, jobs: int) -> None:
    settings = asdict(config) | {"texts": Path(config.texts).name}
    if not config.channels:
        del settings["channels"]  # folders of before are clean, and go on so
    if not config.languages:
        del settings["languages"]
    CorpusFolder(out).begin(settings)
    names, began, seconds = config.names(), time.monotonic(), 0.0
    for number, made_seconds in enumerate(
        map_with_restarts(partial(_make_speakers, config, out), _speaker_batches(names), jobs), start=1
    ):
        seconds += made_seconds
        if number % 50 == 0 or SPEAKERS_PER_TASK * number >= len(names):
            pace, made = seconds / (time.monotonic() - began), min(SPEAKERS_PER_TASK * number, len(names))
            print(f"{made} of {len(names)} speakers, {seconds / 3600:.1f} h now, {pace:.0f} x real time", flush=True)
    for part, count in CorpusFolder(out).finish().items():
        print(f"{out / part}: {count} clips")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="folder made by extract_texts.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the corpus")
    parser.add_argument("--hours", type=float, default=100.0, help="of speech, held-out speakers included")
    parser.add_argument("--speakers", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--other-language-share", type=float, default=0.04, help="share of Arabic, and of Vietnamese speakers"
    )
    parser.add_argument(
        "--languages", nargs="+", default=[], choices=ACCENTS, metavar="LANGUAGE", help="instead: of these, all alike"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--clean", action="store_true", help="no microphones, rooms and noise")
    args = parser.parse_args()
    config = CorpusConfig(
        str(args.texts),
        args.hours,
        args.speakers,
        args.seed,
        args.other_language_share,
        not args.clean,
        tuple(args.languages),
    )
    try:
        make(config, args.out, args.jobs)
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
