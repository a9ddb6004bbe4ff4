"""Learners who do not exist read sentences, and what went wrong is known: speech with scores, as much as is wanted.

PYTHONPATH=training/fledgling python training/pronunciation/learner_corpus.py --out data/learners --speakers 400

makes OUT/train and OUT/test, each with a `scores.jsonl` that `myna prepare` reads. Speakers and sentences of the one
are not those of the other. espeak-ng says what each learner says, phone by phone; its module is fledgling's, hence the
path. One core makes some 400 hours an hour.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import soxr  # type: ignore[import-untyped]

from corpus_making.espeak import UTF8, Espeak, Samples, Speaker
from corpus_making.survivors import done_by_survivors
from learning.learner import Learner, Word, line, read_aloud
from learning.phones import Phone, spoken, written
from learning.sentences import draw
from myna.audio.files import write
from myna.errors import MynaError
from myna.io import replacing

RATE = 16_000
ACCENT, FLUENT = "en-us", 145
"""Whose phones are meant, and the words a minute of a fluent speaker. The slowest learner then speaks as slowly as
espeak can, and few phones have to share the 80 ms behind one position of the model."""
PHONEMES = 0x100
"""Asks espeak to take what stands in [[ ]] for phones."""


class Reader(Espeak):
    """Reads phones aloud."""

    @cache  # noqa: B019 - there is one to a process
    def phones(self, word: str) -> tuple[Phone, ...]:
        """How a word is to be said, by itself. A `KeyError` where a phone has no name in ARPAbet."""
        self._voice(ACCENT)
        text = ctypes.create_string_buffer(word.encode() + b"\0")
        rest = ctypes.c_void_p(ctypes.addressof(text))
        said: bytes = self._library.espeak_TextToPhonemes(ctypes.byref(rest), UTF8, ord("_") << 8)
        return tuple(written(said.decode()))

    def say_phones(self, words: list[list[Phone]]) -> Samples:
        self._heard.clear()
        text = f"[[{' '.join(map(spoken, words))}]]".encode() + b"\0"
        self._library.espeak_Synth(text, len(text), 0, 1, 0, UTF8 | PHONEMES, None, None)
        if not self._heard:
            return np.zeros(0, np.float32)
        return np.concatenate(self._heard).astype(np.float32) / np.float32(32768)


def read_sentence(reader: Reader, words: list[Word], dice: random.Random) -> Samples:
    """What stands between two pauses is said in one breath."""
    parts: list[Samples] = []
    breath: list[list[Phone]] = []
    for number, word in enumerate(words, start=1):
        breath.append(word.said)
        if word.pause or number == len(words):
            parts += [reader.say_phones(breath), np.zeros(int(word.pause * reader.sample_rate), np.float32)]
            breath = []
    sound = np.concatenate(parts)
    sound = sound * np.float32(dice.uniform(0.1, 0.7) / max(float(np.abs(sound).max()), 1e-6))
    heard: Samples = soxr.resample(sound, reader.sample_rate, RATE).astype(np.float32)
    return heard


@dataclass(frozen=True, slots=True)
class Asked:
    out: Path
    speakers: int
    sentences: int
    """Of each speaker."""
    held_out: float
    """Share of the speakers."""
    seed: int

    def members(self) -> dict[str, list[str]]:
        """Who is learned from, and who is not."""
        names = [f"learner{self.seed}-{number:04d}" for number in range(self.speakers)]
        apart = max(1, round(self.speakers * self.held_out))
        return {"test": names[:apart], "train": names[apart:]}


@cache
def _reader() -> Reader:
    """One for each process."""
    return Reader()


def learner_lines(asked: Asked, part: str, name: str) -> Iterator[dict[str, Any]]:
    """One learner's recordings, and a line for each."""
    reader, learner = _reader(), Learner.draw(name, asked.seed)
    voice = Speaker.draw(name, "en", asked.seed)
    manner = replace(voice, accent=ACCENT, rate=round(FLUENT * learner.pace), pitch_range=learner.pitch_range, gap=0)
    for number in range(asked.sentences):
        dice = random.Random(f"{asked.seed}/{name}/{number}")
        text = draw(dice, held_out=part == "test")
        meant = [(word, list(reader.phones(word))) for word in text.split()]
        words = read_aloud(meant, learner, dice)
        reader.meet(manner)  # the phones of a word were asked of another voice
        audio = f"{name}-{number:03d}.wav"
        write(asked.out / part / audio, read_sentence(reader, words, dice), RATE)
        yield line(audio, learner, words)


def _lines_of(asked: Asked, who: tuple[str, str]) -> tuple[str, list[dict[str, Any]]]:
    part, name = who
    return name, list(learner_lines(asked, part, name))


def make(asked: Asked, jobs: int) -> None:
    """In one process, or in many: what is made is the same."""
    members = asked.members()
    everybody = [(part, name) for part, names in members.items() for name in names]
    work = partial(_lines_of, asked)
    lines = dict(done_by_survivors(work, everybody, jobs) if jobs > 1 else map(work, everybody))
    for part, names in members.items():
        made = [one for name in names for one in lines[name]]
        with replacing(asked.out / part / "scores.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(one) + "\n" for one in made), encoding="utf-8")
        print(f"{asked.out / part}: {len(made)} sentences of {len(names)} learners")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--speakers", type=int, default=400)
    parser.add_argument("--sentences", type=int, default=25, help="of each speaker")
    parser.add_argument("--held-out", type=float, default=0.1, help="share of the speakers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    given = parser.parse_args()
    asked = Asked(given.out, given.speakers, given.sentences, given.held_out, given.seed)
    try:
        make(asked, given.jobs)
    except MynaError as error:
        sys.exit(f"{error.what}\n  → {error.hint}")


if __name__ == "__main__":
    main()
