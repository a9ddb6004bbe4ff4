"""Augmentation of natural speech: trimmed silence, microphones, levels, poor references, held-out speakers apart.

python training/fledgling/augment_natural.py SOURCE... --out data/fledgling/natural_augmented

Every SOURCE is a parquet file or a folder of them, as `natural_corpus.py` leaves it. Run again, it does what is
missing. Output of `natural_corpus.py --augment` is augmented already, and may be in the same folder.
"""

from __future__ import annotations

import argparse
import io
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import soundfile
import soxr  # type: ignore[import-untyped]

from codec_training.lossy import lossy_round_trip
from corpus_making.channel import REFERENCE, Channel
from corpus_making.corpus_folder import SAMPLE_RATE, CorpusClip, CorpusFolder
from corpus_making.held_out import is_held_out_line
from corpus_making.loudness import Samples, at_level, resample_tract, speaker_level, speaker_tract_factor, trim
from myna.core.errors import DataError, MynaError

SEED = 0
SETTINGS = "augmentation.json"
"""Not `corpus.json`, which is left to `natural_corpus.py`, since both may fill one folder."""

REFERENCE_SHARE, REFERENCE_SECONDS = 0.3, (1.5, 12.0)
"""The share of clips of these lengths that only serve as references, each through a channel of its own. No other
version of them is a target, or a model would learn to copy its reference."""
REFERENCE_LEVEL_DB = 4.0
"""Standard deviation of a reference's level from that of its speaker."""
LOSSY_SHARE = 0.12
"""Share of these references that went through MP3, Opus or another lossy codec."""

RowsByFile = dict[Path, list[int]]
"""Rows by their file."""
EncodedClip = tuple[str, bytes]
"""A text, and the encoded audio of it."""


def augment(sources: Iterable[Path], out: Path, jobs: int, *, channels: bool = True) -> dict[str, int]:
    """Augment all clips; return the number of clips of each part."""
    corpus = CorpusFolder(out)
    corpus.begin({"channels": channels}, SETTINGS)
    shares = [
        {speaker: where for speaker, where in one.items() if not corpus.has(speaker)}
        for one in split_speakers(speakers_of(_files(sources)), jobs)
    ]
    if jobs == 1:
        augment_speakers(shares[0], out, channels=channels)
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            begun = [pool.submit(augment_speakers, share, out, channels=channels) for share in shares if share]
            for done in begun:
                done.result()
    return corpus.finish()


def speakers_of(files: Iterable[Path]) -> dict[str, RowsByFile]:
    """Return the rows of each speaker by file."""
    found: defaultdict[str, defaultdict[Path, list[int]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        for row, speaker in enumerate(pq.read_table(file, columns=["speaker"])["speaker"].to_pylist()):
            found[speaker][file].append(row)
    if not found:
        raise DataError("there is no speech in these sources", hint="name folders of parquet files")
    return {speaker: dict(where) for speaker, where in found.items()}


def split_speakers(speakers: Mapping[str, RowsByFile], jobs: int) -> list[dict[str, RowsByFile]]:
    """Split the speakers into shares of about equally many rows. A speaker is in one of them, since its clips are
    numbered and levelled in one go; speakers of the same file stay together where they can, since who has one of
    them reads the file."""
    rows = sum(len(some) for where in speakers.values() for some in where.values())
    shares: list[dict[str, RowsByFile]] = [{} for _ in range(jobs)]
    before = 0
    for speaker in sorted(speakers, key=lambda name: (min(speakers[name]), name)):
        shares[min(jobs - 1, before * jobs // rows)][speaker] = speakers[speaker]
        before += sum(map(len, speakers[speaker].values()))
    return shares


def augment_speakers(speakers: Mapping[str, RowsByFile], out: Path, *, channels: bool) -> None:
    corpus = CorpusFolder(out)
    wanted: defaultdict[Path, set[int]] = defaultdict(set)
    for where in speakers.values():
        for file, rows in where.items():
            wanted[file].update(rows)
    clips_of = _read_clips(wanted)
    for name in sorted(clips_of):
        clips = ((text, _decode(data)) for text, data in clips_of[name])
        corpus.add(name, "en", augmented_clips(name, clips, channels=channels))


def _files(sources: Iterable[Path]) -> Iterator[Path]:
    for source in sources:
        yield from sorted(source.glob("*.parquet")) if source.is_dir() else [source]


def _read_clips(wanted: Mapping[Path, set[int]]) -> dict[str, list[EncodedClip]]:
    """Return the clips of each speaker of these rows. Pages of a file in which none of them is are not read."""
    found = defaultdict(list)
    for file, rows in wanted.items():
        opened, first = pq.ParquetFile(file), 0
        for group in range(opened.num_row_groups):
            last = first + opened.metadata.row_group(group).num_rows
            inside = sorted(row - first for row in rows if first <= row < last)
            first = last
            if not inside:
                continue
            table = opened.read_row_group(group, columns=["speaker", "text", "audio"]).take(inside)
            for row in table.to_pylist():
                # Held-out lines are never trained on, whoever says them.
                if not is_held_out_line(row["text"]):
                    found[row["speaker"]].append((row["text"], row["audio"]["bytes"]))
    return found


def augmented_clips(speaker: str, clips: Iterable[tuple[str, Samples]], *, channels: bool) -> Iterator[CorpusClip]:
    """Augmented clips of one speaker, in the given order."""
    rng, level = random.Random(f"{SEED}/shape/{speaker}"), speaker_level(speaker, SEED)
    channel, size = (Channel.draw(speaker, SEED), speaker_tract_factor(speaker, SEED)) if channels else (Channel(), 1.0)
    for number, (text, samples) in enumerate(clips):
        # Trim before noise fills the silence.
        recorded = channel.record(trim(resample_tract(samples, size), SAMPLE_RATE, rng))
        name = f"{speaker}/{number}"
        if channels and is_reference(name, len(recorded) / SAMPLE_RATE):
            yield CorpusClip(text, poor_reference(name, recorded, level), reference_only=True)
        else:
            yield CorpusClip(text, at_level(recorded, SAMPLE_RATE, level, rng))


def is_reference(clip: str, seconds: float) -> bool:
    """Whether a clip of that name and length only serves as a reference."""
    shortest, longest = REFERENCE_SECONDS
    return shortest <= seconds <= longest and random.Random(f"{SEED}/reference/{clip}").random() < REFERENCE_SHARE


def poor_reference(clip: str, samples: Samples, level: float) -> Samples:
    """The clip as another microphone in a room, a telephone or a lossy file has it, at another level."""
    rng = random.Random(f"{SEED}/reference channel/{clip}")
    recorded = Channel.draw(clip, SEED, REFERENCE).record(samples)
    if rng.random() < LOSSY_SHARE:
        peak = float(np.abs(recorded).max()) or 1.0
        recorded = lossy_round_trip(np.asarray(recorded * (0.5 / peak), np.float32), SAMPLE_RATE, rng)
    return at_level(recorded, SAMPLE_RATE, level + rng.gauss(0, REFERENCE_LEVEL_DB), rng)


def augmented_unwritten_clips(
    speaker: str, clips: Iterable[tuple[str, Samples]], *, channels: bool
) -> Iterator[CorpusClip]:
    """Augment samples that were never written: identical to what 16-bit files would give."""
    read_back = ((text, _read_back(samples)) for text, samples in clips if not is_held_out_line(text))
    return augmented_clips(speaker, read_back, channels=channels)


def _read_back(samples: Samples) -> Samples:
    """Round samples as libsndfile does when it writes and reads them: it rounds to 32 bits, and cuts off the lower
    half."""
    whole = np.floor(np.rint(samples * np.float32(2**31)) / np.float32(2**16))
    return np.asarray(whole.clip(-(2**15), 2**15 - 1) / np.float32(2**15), np.float32)


def _decode(data: bytes) -> Samples:
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    mono: Samples = np.ascontiguousarray(samples.mean(axis=1))
    return mono if rate == SAMPLE_RATE else soxr.resample(mono, rate, SAMPLE_RATE, quality="HQ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="folder for the corpus")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--clean", action="store_true", help="no channel simulation")
    args = parser.parse_args()
    try:
        for part, count in augment(args.sources, args.out, args.jobs, channels=not args.clean).items():
            print(f"{args.out / part}: {count} clips")
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
