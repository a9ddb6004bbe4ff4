"""Corpus of simulated language learners with pronunciation scores.

PYTHONPATH=training/fledgling python training/pronunciation/learner_corpus.py --out data/learners --speakers 400

writes OUT/train and OUT/test, each with a `scores.jsonl` that `myna prepare` reads, with different speakers and
sentences. espeak-ng synthesizes the phones of each learner; its wrapper is fledgling's, hence the path. One
core makes some 400 hours an hour.
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

from corpus_making.espeak import UTF8, Espeak, EspeakSpeaker, Samples
from corpus_making.process_pool import map_with_restarts
from myna.audio.files import write_audio
from myna.core.errors import MynaError
from myna.core.io import atomic_write
from simulated_learners.learner import Learner, SpokenWord, mispronounce, score_record
from simulated_learners.phones import Phone, format_espeak, parse_espeak
from simulated_learners.sentences import draw_sentence

RATE = 16_000
PHONE_ACCENT, FLUENT_WORDS_PER_MINUTE = "en-us", 145
"""Accent of the canonical phones, and the rate of a fluent speaker. The slowest learner then speaks as slowly as espeak
can, and few phones share the 80 ms of one position of the model."""
PHONEME_INPUT = 0x100
"""espeak flag: text in [[ ]] is phones."""


class PhoneReader(Espeak):
    """eSpeak with phones as input."""

    @cache  # noqa: B019 - there is one to a process
    def phones(self, word: str) -> tuple[Phone, ...]:
        """Canonical phones of a word by itself. A `KeyError` where a phone has no name in ARPAbet."""
        self._voice(PHONE_ACCENT)
        text = ctypes.create_string_buffer(word.encode() + b"\0")
        rest = ctypes.c_void_p(ctypes.addressof(text))
        phonemes: bytes = self._library.espeak_TextToPhonemes(ctypes.byref(rest), UTF8, ord("_") << 8)
        return tuple(parse_espeak(phonemes.decode()))

    def say_phones(self, words: list[list[Phone]]) -> Samples:
        self._chunks.clear()
        text = f"[[{' '.join(map(format_espeak, words))}]]".encode() + b"\0"
        self._library.espeak_Synth(text, len(text), 0, 1, 0, UTF8 | PHONEME_INPUT, None, None)
        if not self._chunks:
            return np.zeros(0, np.float32)
        return np.concatenate(self._chunks).astype(np.float32) / np.float32(32768)


def read_sentence(reader: PhoneReader, words: list[SpokenWord], rng: random.Random) -> Samples:
    """Synthesize the words between two pauses together."""
    parts: list[Samples] = []
    phrase: list[list[Phone]] = []
    for number, word in enumerate(words, start=1):
        phrase.append(word.spoken)
        if word.pause or number == len(words):
            parts += [reader.say_phones(phrase), np.zeros(int(word.pause * reader.sample_rate), np.float32)]
            phrase = []
    sound = np.concatenate(parts)
    sound = sound * np.float32(rng.uniform(0.1, 0.7) / max(float(np.abs(sound).max()), 1e-6))
    resampled: Samples = soxr.resample(sound, reader.sample_rate, RATE).astype(np.float32)
    return resampled


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """Settings of the corpus."""

    out: Path
    speakers: int
    sentences: int
    """Sentences of each speaker."""
    held_out: float
    """Share of the speakers."""
    seed: int

    def members(self) -> dict[str, list[str]]:
        """Speaker names of both parts."""
        names = [f"learner{self.seed}-{number:04d}" for number in range(self.speakers)]
        count = max(1, round(self.speakers * self.held_out))
        return {"test": names[:count], "train": names[count:]}


@cache
def _reader() -> PhoneReader:
    """Return the one reader of this process."""
    return PhoneReader()


def record_learner(config: CorpusConfig, part: str, name: str) -> Iterator[dict[str, Any]]:
    """Synthesize one learner's recordings; a record of scores for each."""
    reader, learner = _reader(), Learner.draw(name, config.seed)
    voice = EspeakSpeaker.draw(name, "en", config.seed)
    manner = replace(
        voice,
        accent=PHONE_ACCENT,
        rate=round(FLUENT_WORDS_PER_MINUTE * learner.pace),
        pitch_range=learner.pitch_range,
        gap=0,
    )
    for number in range(config.sentences):
        rng = random.Random(f"{config.seed}/{name}/{number}")
        text = draw_sentence(rng, held_out=part == "test")
        canonical = [(word, list(reader.phones(word))) for word in text.split()]
        words = mispronounce(canonical, learner, rng)
        reader.set_speaker(manner)  # the phones of a word used another voice
        audio = f"{name}-{number:03d}.wav"
        write_audio(config.out / part / audio, read_sentence(reader, words, rng), RATE)
        yield score_record(audio, learner, words)


def _records_of(config: CorpusConfig, member: tuple[str, str]) -> tuple[str, list[dict[str, Any]]]:
    part, name = member
    return name, list(record_learner(config, part, name))


def make(config: CorpusConfig, jobs: int) -> None:
    """Write the corpus; it does not depend on the number of processes."""
    members = config.members()
    learners = [(part, name) for part, names in members.items() for name in names]
    work = partial(_records_of, config)
    lines = dict(map_with_restarts(work, learners, jobs) if jobs > 1 else map(work, learners))
    for part, names in members.items():
        records = [record for name in names for record in lines[name]]
        with atomic_write(config.out / part / "scores.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        print(f"{config.out / part}: {len(records)} sentences of {len(names)} learners")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--speakers", type=int, default=400)
    parser.add_argument("--sentences", type=int, default=25, help="of each speaker")
    parser.add_argument("--held-out", type=float, default=0.1, help="share of the speakers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    args = parser.parse_args()
    config = CorpusConfig(args.out, args.speakers, args.sentences, args.held_out, args.seed)
    try:
        make(config, args.jobs)
    except MynaError as error:
        sys.exit(f"{error.what}\n  → {error.hint}")


if __name__ == "__main__":
    main()
