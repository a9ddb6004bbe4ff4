"""Real English of many people from two public data sets, as parquet files for `augment_real.py`.

    python training/fledgling/crowd_corpora.py --speechocean SPEECHOCEAN762 --known CORPUS/en-real \\
        --speech-commands SPEECH_COMMANDS_V0.01 --out data/fledgling/crowd

SPEECHOCEAN762 is a checkout of github.com/jimbozhang/speechocean762. Of its learners of English those are taken whose
names are in the corpus `en-real`, with the recordings that are not there; others may be kept aside for judging.
SPEECH_COMMANDS_V0.01 is that archive, unpacked: people say single words, several of which make a list, as of
AudioMNIST's digits. Only words that were recorded whole and without noise are taken, so that a list sounds like one
recording.

    OUT/en-learners/part-0.parquet    id, text, speaker, language, seconds, audio {bytes: OGG/Opus at 24 kHz, path},
    OUT/en-commands/...               source, sample_rate
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import soxr  # type: ignore[import-untyped]
from rich.progress import track

from corpus_making.loudness import Samples, speech_bounds
from corpus_making.real_lines import COMMANDS
from myna.audio.files import read_audio
from myna.core.errors import AudioError, DataError, MynaError
from real_corpora import SAMPLE_RATE, Row, opus, write_parts

FILE_RATE = 16_000
"""Sample rate of both data sets."""
LEARNER_PREFIX, COMMANDS_PREFIX = "so762-", "command-"
"""Prefixes of speakers' names; learners have the names of `en-real`."""
SILENCE_DB = -28.0
"""Level below the loudest moment of a word at which it begins and ends."""
WORD_SECONDS, EDGE_SECONDS = (0.2, 0.85), 0.02
"""Seconds of a word, and of the silence around it if the word is whole."""
MIN_SNR_DB = 20.0
MARGINS = (0.06, 0.16)
"""Seconds of a recording that are kept before and behind its word."""
FADE_SECONDS = 0.01
OPUS_BIT_RATE = 32_000
"""Bit rate of speech that ends at 8 kHz; the bundle for a machine without network is limited."""
LIST_WORDS, MAX_LISTS = (4, 6), 6
"""Words of a list, and lists of a speaker: the best recordings are taken first."""


def learners(checkout: Path, known: Path) -> Iterator[Row]:
    """Recordings of the learners of `known` that are not there."""
    table = pq.read_table(known, columns=["id", "speaker"]).to_pylist()
    taken, speakers = {row["id"] for row in table}, {row["speaker"] for row in table}
    for part in ("train", "test"):
        texts, homes = (_two_columns(checkout / part / name) for name in ("text", "wav.scp"))
        for name, speaker in _two_columns(checkout / part / "utt2spk").items():
            clip, person = f"{LEARNER_PREFIX}{name}", f"{LEARNER_PREFIX}{speaker}"
            if person in speakers and clip not in taken:
                samples = read_audio(checkout / homes[name], sample_rate=SAMPLE_RATE)
                yield _row(clip, texts[name].capitalize(), person, samples, "speechocean762")


def _two_columns(file: Path) -> dict[str, str]:
    """A table of Kaldi's: a name, and what it stands for."""
    if not file.is_file():
        raise DataError(f"{file} is not there", hint="name a checkout of github.com/jimbozhang/speechocean762")
    lines = file.read_text(encoding="utf-8").splitlines()
    return {name: value.strip() for name, value in (line.split(maxsplit=1) for line in lines)}


def whole_word(samples: Samples) -> tuple[float, Samples] | None:
    """Return how far the word is above the noise in decibels, and the word with some of the silence around it; None
    where it is cut off, too long or too short, or in noise."""
    first, last = speech_bounds(samples, FILE_RATE, SILENCE_DB)
    edge, seconds = round(EDGE_SECONDS * FILE_RATE), (last - first) / FILE_RATE
    outside = np.concatenate([samples[: max(0, first - edge)], samples[last + edge :]])
    if not WORD_SECONDS[0] <= seconds <= WORD_SECONDS[1] or first < edge or last > len(samples) - edge:
        return None
    noise = np.mean(np.square(outside, dtype=np.float64)) + 1e-10 if len(outside) else np.inf
    snr = float(10 * np.log10(np.mean(np.square(samples[first:last], dtype=np.float64)) / noise))
    before, after = (round(seconds * FILE_RATE) for seconds in MARGINS)
    return (snr, samples[max(0, first - before) : last + after]) if snr >= MIN_SNR_DB else None


def word_lists(speaker: str, files: list[Path]) -> list[Row]:
    """Lists of the words that a speaker said, each word at most once in a list; a single list has no reference."""
    rng = random.Random(f"lists/{speaker}")
    found: list[tuple[float, str, Samples]] = []
    for file in files:
        try:
            whole = whole_word(read_audio(file, sample_rate=FILE_RATE))
        except AudioError as error:
            print(f"left out: {error.what}", flush=True)
            continue
        if whole is not None:
            found.append((whole[0], file.parent.name, whole[1]))
    found.sort(key=lambda one: -one[0])
    waiting, rows = [(word, samples) for _, word, samples in found], list[Row]()
    while len(rows) < MAX_LISTS:
        chosen: dict[str, Samples] = {}
        count = rng.randint(*LIST_WORDS)
        for word, samples in waiting:
            if len(chosen) < count:
                chosen.setdefault(word, samples)
        if len(chosen) < LIST_WORDS[0]:
            break
        waiting = [one for one in waiting if chosen.get(one[0]) is not one[1]]
        words = list(chosen)
        rng.shuffle(words)
        text, joined = f"{', '.join(words).capitalize()}.", np.concatenate([_faded(chosen[word]) for word in words])
        rows.append(_row(f"{speaker}-{len(rows)}", text, speaker, _resampled(joined), "speech_commands_v0.01"))
    return rows if len(rows) > 1 else []


def _faded(samples: Samples) -> Samples:
    ramp = np.linspace(0, 1, round(FADE_SECONDS * FILE_RATE), dtype=np.float32)
    shape = np.ones(len(samples), np.float32)
    shape[: len(ramp)], shape[-len(ramp) :] = ramp, ramp[::-1]
    return np.asarray(samples * shape, np.float32)


def _resampled(samples: Samples) -> Samples:
    return np.asarray(soxr.resample(samples, FILE_RATE, SAMPLE_RATE, quality="VHQ"), np.float32)


def commands(folder: Path, jobs: int) -> Iterator[Row]:
    files_of: defaultdict[str, list[Path]] = defaultdict(list)
    for file in sorted(folder.rglob("*_nohash_*.wav")):
        if file.parent.name in COMMANDS:
            files_of[COMMANDS_PREFIX + file.name.partition("_")[0]].append(file)
    if not files_of:
        raise DataError(f"{folder} has no WORD/SPEAKER_nohash_N.wav", hint="unpack speech_commands_v0.01.tar.gz there")
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        begun = [pool.submit(word_lists, speaker, files) for speaker, files in sorted(files_of.items())]
        for done in track(begun, "words"):
            yield from done.result()


def _row(id: str, text: str, speaker: str, samples: Samples, source: str) -> Row:
    return {
        "id": id,
        "text": text,
        "speaker": speaker,
        "language": "en",
        "seconds": len(samples) / SAMPLE_RATE,
        "audio": {"bytes": opus(samples, OPUS_BIT_RATE), "path": f"{id}.ogg"},
        "source": source,
        "sample_rate": FILE_RATE,
    }


def write_corpus(rows: Iterator[Row], out: Path, name: str) -> str:
    found = list(rows)
    write_parts(out / name, "part", found)
    speakers, hours = len({row["speaker"] for row in found}), sum(row["seconds"] for row in found) / 3600
    return f"{out / name}: {len(found)} recordings, {hours:.2f} h, {speakers} people"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speechocean", type=Path, help="checkout of speechocean762")
    parser.add_argument("--known", type=Path, help="corpus en-real: only its learners are taken")
    parser.add_argument("--speech-commands", type=Path, help="unpacked archive of Speech Commands")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.speechocean and not args.known:
        parser.error("--speechocean needs --known CORPUS/en-real")
    try:
        if args.speechocean:
            print(write_corpus(learners(args.speechocean, args.known), args.out, "en-learners"))
        if args.speech_commands:
            print(write_corpus(commands(args.speech_commands, args.jobs), args.out, "en-commands"))
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
