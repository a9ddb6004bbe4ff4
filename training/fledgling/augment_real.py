"""Corpus of real speech for the language model: recordings and variants with other voices, poor references among them.

python training/fledgling/augment_real.py --source CORPUS/en-real --words data/fledgling/real_words.json --asr WHISPER
python training/fledgling/augment_real.py --source CORPUS/en-real CROWD/en-commands=3 \\
    --words data/fledgling/real_words.json --out data/fledgling/real_augmented --jobs 16

The first has Whisper write down the words of all recordings with their times, once: two seconds of a core for each half
minute. The second cuts and augments: 12 s of a core for an hour. Both continue when they are run again; speakers whose
words are not known are left out.

English only: the model's texts are, and a few other voices would not be worth letters that it cannot read. Each speaker
is there as recorded, and some times (`--source FOLDER=TIMES`) with another pitch and other formants under another name;
held-out speakers only as recorded. As of natural speech, three clips in ten are references alone, through a channel of
their own (`corpus_making/real_lines.py` says which others).
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import track

from augment_natural import SEED, is_reference, poor_reference
from codec_training.recordings import Recording, recordings
from corpus_making.corpus_folder import SAMPLE_RATE, CorpusClip, CorpusFolder
from corpus_making.held_out import is_held_out, is_held_out_line
from corpus_making.kokoro import move_formants
from corpus_making.loudness import at_level, log_uniform, resample_tract, speaker_level, trim
from corpus_making.real_lines import HeardRecordings, RealLine, real_lines
from myna.core.errors import DataError, MynaError

TRACT_FACTORS, FORMANT_FACTORS = (0.84, 1.18), (0.9, 1.12)
"""Factors of variants: how much slower they are played, and how much higher their formants are."""
VARIANTS = 11
"""Speakers that are made of each, unless a source has its own number."""


class Speaker(NamedTuple):
    """Recordings of a person, and how many other speakers are made of them."""

    recordings: list[Recording]
    variants: int


def read_speakers(sources: Sequence[str]) -> list[Speaker]:
    """The people of `FOLDER` or `FOLDER=VARIANTS`; who is in several has the recordings of all, and the variants of the
    first."""
    found: dict[str, Speaker] = {}
    for source in sources:
        folder, _, count = source.partition("=")
        if count and not count.isdecimal():
            raise DataError(
                f"--source {source}: {count} is no number of variants", hint=f"--source {folder}={VARIANTS}"
            )
        for one in recordings(Path(folder)):
            speaker = found.setdefault(one.speaker, Speaker([], int(count or VARIANTS)))
            speaker.recordings.append(one)
    return list(found.values())


def variant_name(speaker: str, variant: int) -> str:
    """Another speaker's name, and the speaker's own for variant 0. None of them is held out by its hash."""
    if variant == 0:
        return speaker
    names = (f"{speaker}~{variant}{'+' * more}" for more in range(1000))
    return next(name for name in names if not is_held_out(name))


def variant_clips(name: str, lines: Sequence[RealLine], *, changed: bool) -> Iterator[CorpusClip]:
    """Clips of a speaker or, if `changed`, of a variant."""
    rng, level = random.Random(f"{SEED}/real/{name}"), speaker_level(name, SEED)
    size, formants = ((log_uniform(rng, bounds) if changed else 1.0) for bounds in (TRACT_FACTORS, FORMANT_FACTORS))
    for line in lines:
        samples = trim(move_formants(resample_tract(line.samples, size), formants), SAMPLE_RATE, rng)
        clip = f"{name}/{line.id}"
        if is_reference(clip, len(samples) / SAMPLE_RATE):
            yield CorpusClip(line.text, poor_reference(clip, samples, level), reference_only=True)
        else:
            samples = at_level(samples, SAMPLE_RATE, level, rng)
            yield CorpusClip(line.text, samples, reference_only=not line.is_target)


def augment_speaker(speaker: Speaker, words: Path, out: Path) -> None:
    """Write a speaker and the variants; one of whom there is a single clip has no reference, and is left out."""
    corpus, found = CorpusFolder(out), speaker.recordings
    name = found[0].speaker
    count = 1 if is_held_out(name) else 1 + speaker.variants
    missing = [variant for variant in range(count) if not corpus.has(variant_name(name, variant))]
    heard = _read_words(words)
    if not missing or not heard.has(found):
        return
    lines = [line for line in real_lines(found, heard) if not is_held_out_line(line.text)]
    if len(lines) > 1:
        for variant in missing:
            changed = variant_name(name, variant)
            corpus.add(changed, "en", variant_clips(changed, lines, changed=variant > 0))


@cache
def _read_words(file: Path) -> HeardRecordings:
    """Read the file once in each process."""
    return HeardRecordings(file)


def augment(speakers: Sequence[Speaker], words: Path, jobs: int, out: Path) -> dict[str, int]:
    """Write the corpus; return the number of clips of each part."""
    corpus = CorpusFolder(out)
    corpus.begin({"variants": {one.recordings[0].speaker: one.variants for one in speakers}})
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        begun = [pool.submit(augment_speaker, speaker, words, out) for speaker in speakers]
        for done in track(begun, "augmenting"):
            done.result()
    return corpus.finish()


def hear(speakers: Sequence[Speaker], words: Path, asr: str) -> None:
    from myna.listen.asr import ASR

    heard, opened = HeardRecordings(words), ASR.open(asr, threads=1)
    # Who has one recording needs its words most.
    for found in track(sorted((one.recordings for one in speakers), key=len), "hearing"):
        if not heard.has(found):
            heard.hear(found, opened)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--source",
        nargs="+",
        required=True,
        metavar="FOLDER[=VARIANTS]",
        help=f"parquet files of real English, with texts, and speakers that are made of each (default: {VARIANTS})",
    )
    parser.add_argument("--words", type=Path, required=True, help="file with the words of all recordings")
    parser.add_argument("--asr", help="hear what is missing there: a CTranslate2 Whisper model, or a name to download")
    parser.add_argument("--out", type=Path, help="folder for the corpus")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that augment")
    args = parser.parse_args()
    try:
        speakers = read_speakers(args.source)
        if args.asr:
            hear(speakers, args.words, args.asr)
        heard = HeardRecordings(args.words)
        print(f"words of {sum(heard.has(one.recordings) for one in speakers)} of {len(speakers)} speakers are known")
        if args.out:
            for part, count in augment(speakers, args.words, args.jobs, args.out).items():
                print(f"{args.out / part}: {count} clips")
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
