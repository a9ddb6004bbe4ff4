"""Parquet files of natural speech as a folder like espeak's: silence cut, levels drawn, held-out speakers apart.

python recipes/fledgling/shape_natural.py SOURCE... --out data/fledgling/natural_shaped

Every SOURCE is a parquet file or a folder of them, as `natural_corpus.py` leaves it. Run again, it does what is
missing.
"""

from __future__ import annotations

import argparse
import io
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import soundfile
import soxr  # type: ignore[import-untyped]

from corpus_making.folder import SAMPLE_RATE, CorpusFolder
from corpus_making.held_out import is_held_out_line
from corpus_making.sound import Samples, at_level, speaker_level, trim
from myna.errors import DataError, MynaError

SEED = 0

Said = tuple[str, bytes]
"""A text, and the sound that goes with it, still encoded."""


def shape(sources: Iterable[Path], out: Path) -> dict[str, int]:
    """How many clips there are in each part."""
    corpus = CorpusFolder(out)
    speakers = _speakers(sources)
    if not speakers:
        raise DataError("there is no speech in these sources", hint="name folders of parquet files")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        missing = [name for name in sorted(speakers) if not corpus.has(name)]
        for _ in pool.map(lambda name: corpus.add(name, "en", _clips(name, speakers[name])), missing):
            pass
    return corpus.finish()


def _speakers(sources: Iterable[Path]) -> dict[str, list[Said]]:
    found = defaultdict(list)
    for source in sources:
        for file in sorted(source.glob("*.parquet")) if source.is_dir() else [source]:
            for batch in pq.ParquetFile(file).iter_batches(64, columns=["speaker", "text", "audio"]):
                for row in batch.to_pylist():
                    # Lines that are judged with are nobody's to learn, whoever says them.
                    if not is_held_out_line(row["text"]):
                        found[row["speaker"]].append((row["text"], row["audio"]["bytes"]))
    return found


def _clips(speaker: str, said: list[Said]) -> Iterator[tuple[str, Samples]]:
    dice, level = random.Random(f"{SEED}/shape/{speaker}"), speaker_level(speaker, SEED)
    for text, data in said:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
        mono: Samples = np.ascontiguousarray(samples.mean(axis=1))
        if rate != SAMPLE_RATE:
            mono = soxr.resample(mono, rate, SAMPLE_RATE, quality="HQ")
        yield text, at_level(trim(mono, SAMPLE_RATE, dice), SAMPLE_RATE, level, dice)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="folder for the corpus")
    given = parser.parse_args()
    try:
        for part, count in shape(given.sources, given.out).items():
            print(f"{given.out / part}: {count} clips")
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
