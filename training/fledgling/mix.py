"""Several corpora as one manifest: natural speech as often as it takes to be heard beside hours of robots.

python training/fledgling/mix.py --natural data/fledgling/natural_shaped --espeak data/fledgling/espeak --repeat 4 \\
    --out data/fledgling/mixed

Leaves OUT/train and OUT/held_out with a manifest each, for `myna prepare`. A line that is repeated has an id of its own
and the codes of the first one; as a reference for itself it never serves. Held-out espeak is left at a few speakers:
it is there to see whether anything breaks, and natural speech is what counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path

from corpus_making.channel import CLEAN, has_clean_channel
from corpus_making.folder import Line, lines_of, write_lines
from myna.data.hash_rng import hash_of
from myna.errors import MynaError
from shape_natural import SEED

ESPEAK_JUDGES = 200
"""Held-out clips of espeak in the evaluation."""
ALONE = b', "extras": {"references": []}'


def mixed(natural: Path, espeak: Path | None, repeat: int, alone: float) -> Iterator[bytes]:
    """Lines to learn from. A share `alone` of the natural ones has no reference: then the voice is the model's own, and
    such lines are of speakers without a channel, since nobody asks for a telephone's."""
    for line in lines_of(natural / "train"):
        share = alone / CLEAN if _is_clean(line.id.rpartition(b"-")[0]) else 0.0
        for number in range(repeat):
            id = b"%s~%d" % (line.id, number) if number else line.id
            left_alone = hash_of(f"alone {id.decode()}") < share * 2**64
            yield bytes(Line(id, line.audio, line.rest + ALONE if left_alone else line.rest))
    if espeak is not None:
        yield from map(bytes, lines_of(espeak / "train"))


@cache
def _is_clean(speaker: bytes) -> bool:
    return has_clean_channel(speaker.decode(), SEED)


def held_out(natural: Path, espeak: Path | None) -> Iterator[bytes]:
    yield from map(bytes, lines_of(natural / "held_out"))
    if espeak is not None:
        yield from map(bytes, islice(lines_of(espeak / "held_out"), ESPEAK_JUDGES))


def write_mix(natural: Path, espeak: Path | None, repeat: int, alone: float, out: Path) -> dict[str, int]:
    """How many lines there are in each part."""
    mix = {"train": list(mixed(natural, espeak, repeat, alone)), "held_out": list(held_out(natural, espeak))}
    for part, lines in mix.items():
        write_lines(out / part / "manifest.jsonl", lines)
    return {part: len(lines) for part, lines in mix.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--natural", type=Path, required=True, help="folder made by shape_natural.py")
    parser.add_argument("--espeak", type=Path, help="folder made by espeak_corpus.py; natural speech alone without")
    parser.add_argument("--repeat", type=int, default=1, help="how often a natural line comes in one epoch")
    parser.add_argument(
        "--alone", type=float, default=0.1, help="share of natural lines without a reference, 1/3 at most"
    )
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    try:
        for part, count in write_mix(given.natural, given.espeak, given.repeat, given.alone, given.out).items():
            print(f"{given.out / part}: {count} lines")
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
