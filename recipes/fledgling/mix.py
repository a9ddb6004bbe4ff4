"""Several corpora as one manifest: natural speech as often as it takes to be heard beside hours of robots.

python recipes/fledgling/mix.py --natural data/fledgling/natural_shaped --espeak data/fledgling/espeak --repeat 4 \\
    --out data/fledgling/mixed

Leaves OUT/train and OUT/held_out with a manifest each, for `myna prepare`. A line that is repeated has an id of its own
and the codes of the first one; as a reference for itself it never serves. Held-out espeak is left at a few speakers:
it is there to see whether anything breaks, and natural speech is what counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from myna.data.dice import name_of
from myna.data.manifest import read_manifest, write_manifest
from myna.data.utterance import Utterance
from myna.errors import MynaError

ESPEAK_JUDGES = 200
"""Held-out clips of espeak in the evaluation."""


def mixed(natural: Path, espeak: Path | None, repeat: int, alone: float) -> Iterator[Utterance]:
    """Lines to learn from. A share `alone` of the natural ones has no reference: then the voice is the model's own."""
    for utterance in read_manifest(natural / "train" / "manifest.jsonl"):
        for number in range(repeat):
            one = replace(utterance, id=f"{utterance.id}~{number}" if number else utterance.id)
            left_alone = name_of(f"alone {one.id}") < alone * 2**64
            yield replace(one, extras={"references": []}) if left_alone else one
    if espeak is not None:
        yield from read_manifest(espeak / "train" / "manifest.jsonl")


def held_out(natural: Path, espeak: Path | None) -> Iterator[Utterance]:
    yield from read_manifest(natural / "held_out" / "manifest.jsonl")
    if espeak is not None:
        yield from read_manifest(espeak / "held_out" / "manifest.jsonl")[:ESPEAK_JUDGES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--natural", type=Path, required=True, help="folder made by shape_natural.py")
    parser.add_argument("--espeak", type=Path, help="folder made by espeak_corpus.py; natural speech alone without")
    parser.add_argument("--repeat", type=int, default=1, help="how often a natural line comes in one epoch")
    parser.add_argument("--alone", type=float, default=0.1, help="share of natural lines without a reference")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    try:
        for part, lines in (
            ("train", list(mixed(given.natural, given.espeak, given.repeat, given.alone))),
            ("held_out", list(held_out(given.natural, given.espeak))),
        ):
            write_manifest(given.out / part / "manifest.jsonl", lines)
            print(f"{given.out / part}: {len(lines)} lines")
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
