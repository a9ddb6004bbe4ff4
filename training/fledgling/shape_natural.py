"""Parquet files of natural speech as a folder like espeak's: silence cut, channels and levels drawn, held-out
speakers apart.

python training/fledgling/shape_natural.py SOURCE... --out data/fledgling/natural_shaped

Every SOURCE is a parquet file or a folder of them, as `natural_corpus.py` leaves it. Run again, it does what is
missing. What `natural_corpus.py --shaped` makes is shaped already, and may be in the same folder.
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

from corpus_making.channel import Channel
from corpus_making.folder import SAMPLE_RATE, CorpusFolder
from corpus_making.held_out import is_held_out_line
from corpus_making.sound import Samples, at_level, resized, speaker_level, speaker_size, trim
from myna.errors import DataError, MynaError

SEED = 0
SETTINGS = "shaping.json"
"""Not `corpus.json`, which is left to `natural_corpus.py`, since both may fill one folder."""

Where = dict[Path, list[int]]
"""Rows by their file."""
Said = tuple[str, bytes]
"""A text, and the sound that goes with it, still encoded."""


def shape(sources: Iterable[Path], out: Path, jobs: int, *, channels: bool = True) -> dict[str, int]:
    """How many clips there are in each part."""
    corpus = CorpusFolder(out)
    corpus.begin({"channels": channels}, SETTINGS)
    shares = [
        {speaker: where for speaker, where in one.items() if not corpus.has(speaker)}
        for one in shared_out(speakers_of(_files(sources)), jobs)
    ]
    if jobs == 1:
        shape_speakers(shares[0], out, channels=channels)
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            begun = [pool.submit(shape_speakers, share, out, channels=channels) for share in shares if share]
            for done in begun:
                done.result()
    return corpus.finish()


def speakers_of(files: Iterable[Path]) -> dict[str, Where]:
    """Where each speaker's rows are."""
    found: defaultdict[str, defaultdict[Path, list[int]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        for row, speaker in enumerate(pq.read_table(file, columns=["speaker"])["speaker"].to_pylist()):
            found[speaker][file].append(row)
    if not found:
        raise DataError("there is no speech in these sources", hint="name folders of parquet files")
    return {speaker: dict(where) for speaker, where in found.items()}


def shared_out(speakers: Mapping[str, Where], jobs: int) -> list[dict[str, Where]]:
    """So many shares of about equally many rows. A speaker is in one of them, since its clips are numbered and levelled
    in one go; speakers of the same file stay together where they can, since who has one of them reads the file."""
    rows = sum(len(some) for where in speakers.values() for some in where.values())
    shares: list[dict[str, Where]] = [{} for _ in range(jobs)]
    before = 0
    for speaker in sorted(speakers, key=lambda name: (min(speakers[name]), name)):
        shares[min(jobs - 1, before * jobs // rows)][speaker] = speakers[speaker]
        before += sum(map(len, speakers[speaker].values()))
    return shares


def shape_speakers(speakers: Mapping[str, Where], out: Path, *, channels: bool) -> None:
    corpus = CorpusFolder(out)
    wanted: defaultdict[Path, set[int]] = defaultdict(set)
    for where in speakers.values():
        for file, rows in where.items():
            wanted[file].update(rows)
    said = _said(wanted)
    for name in sorted(said):
        clips = ((text, _decoded(data)) for text, data in said[name])
        corpus.add(name, "en", shaped(name, clips, channels=channels))


def _files(sources: Iterable[Path]) -> Iterator[Path]:
    for source in sources:
        yield from sorted(source.glob("*.parquet")) if source.is_dir() else [source]


def _said(wanted: Mapping[Path, set[int]]) -> dict[str, list[Said]]:
    """What each speaker of these rows says. Pages of a file in which none of them is are not read."""
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
                # Lines that are judged with are nobody's to learn, whoever says them.
                if not is_held_out_line(row["text"]):
                    found[row["speaker"]].append((row["text"], row["audio"]["bytes"]))
    return found


def shaped(speaker: str, clips: Iterable[tuple[str, Samples]], *, channels: bool) -> Iterator[tuple[str, Samples]]:
    """Texts and samples of one speaker, in the order in which they were said."""
    dice, level = random.Random(f"{SEED}/shape/{speaker}"), speaker_level(speaker, SEED)
    channel, size = (Channel.draw(speaker, SEED), speaker_size(speaker, SEED)) if channels else (Channel(), 1.0)
    for text, samples in clips:
        # Silence is found where nothing has filled it yet.
        recorded = channel.record(trim(resized(samples, size), SAMPLE_RATE, dice))
        yield text, at_level(recorded, SAMPLE_RATE, level, dice)


def shaped_at_once(
    speaker: str, clips: Iterable[tuple[str, Samples]], *, channels: bool
) -> Iterator[tuple[str, Samples]]:
    """The same of samples that were never written: sample by sample what it would be if they had been, in 16 bits."""
    read_back = ((text, _read_back(samples)) for text, samples in clips if not is_held_out_line(text))
    return shaped(speaker, read_back, channels=channels)


def _read_back(samples: Samples) -> Samples:
    """As libsndfile writes them and reads them again: it rounds to 32 bits, and cuts off the lower half."""
    whole = np.floor(np.rint(samples * np.float32(2**31)) / np.float32(2**16))
    return np.asarray(whole.clip(-(2**15), 2**15 - 1) / np.float32(2**15), np.float32)


def _decoded(data: bytes) -> Samples:
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    mono: Samples = np.ascontiguousarray(samples.mean(axis=1))
    return mono if rate == SAMPLE_RATE else soxr.resample(mono, rate, SAMPLE_RATE, quality="HQ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="folder for the corpus")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--clean", action="store_true", help="as it was made: no microphones, rooms and noise")
    given = parser.parse_args()
    try:
        for part, count in shape(given.sources, given.out, given.jobs, channels=not given.clean).items():
            print(f"{given.out / part}: {count} clips")
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
