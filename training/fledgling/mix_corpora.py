"""Mix of natural, eSpeak and real corpora in one manifest, with repeated lines.

python training/fledgling/mix_corpora.py --natural data/fledgling/natural_augmented \\
    --espeak data/fledgling/espeak --repeat 4 --out data/fledgling/mixed

Writes OUT/train and OUT/held_out with a manifest each, for `myna prepare`. A line that is repeated begins a part of a
frame later, so that it has other codes: of a recording that begins 20 ms later, half a frame, a quarter of the codes of
the first codebook stay the same and hardly any of the others (a throw-away trial with six LibriSpeech readers). A
training that gets the same codes again learns them by heart (docs/decisions/0024-codec-for-real-voices.md). Overlapping
spans are never one another's reference. Held-out eSpeak is cut to a few speakers: natural speech is what counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from pathlib import Path

from augment_natural import SEED
from corpus_making.channel import CLEAN_SHARE, has_clean_channel
from corpus_making.corpus_folder import ManifestLine, manifest_lines, write_manifest_lines
from corpus_making.loudness import RESIZED_SHARE, speaker_tract_factor
from myna.core.errors import MynaError
from myna.core.io import string_hash

ESPEAK_HELD_OUT_CLIPS = 200
"""Held-out clips of espeak in the evaluation."""
UNCHANGED_SHARE = CLEAN_SHARE * (1 - RESIZED_SHARE)
"""Share of speakers who have neither a channel nor another size."""
REFERENCE_ONLY, NO_REFERENCES = b'"extras": {"reference_only": true}', b', "extras": {"references": []}'
SPAN, FRAME_SECONDS = b', "span": {"start": %s, "end": null}', 0.04


def training_lines(natural: Path, others: Sequence[Path], repeat: int, no_reference_share: float) -> Iterator[bytes]:
    """Training lines. A share of the natural ones has no reference, for synthesis without one; such lines are of
    speakers without a channel, of the size they were made."""
    for number, corpus in enumerate((natural, *others)):
        for line in manifest_lines(corpus / "train"):
            share = 0.0
            if number == 0 and REFERENCE_ONLY not in line.rest and _is_unchanged(line.id.rpartition(b"-")[0]):
                share = no_reference_share / UNCHANGED_SHARE
            for shifted in repeated(line, repeat):
                no_reference = string_hash(f"alone {shifted.id.decode()}") < share * 2**64
                yield bytes(shifted._replace(rest=shifted.rest + NO_REFERENCES) if no_reference else shifted)


def repeated(line: ManifestLine, repeat: int) -> Iterator[ManifestLine]:
    """A line so many times, each a part of a frame later."""
    yield line
    for number in range(1, repeat):
        span = SPAN % repr(round(number * FRAME_SECONDS / repeat, 4)).encode()
        yield ManifestLine(b"%s~%d" % (line.id, number), line.audio, line.rest + span)


@cache
def _is_unchanged(speaker: bytes) -> bool:
    return has_clean_channel(speaker.decode(), SEED) and speaker_tract_factor(speaker.decode(), SEED) == 1.0


def held_out_lines(natural: Path, espeak: Path | None, real: Path | None) -> Iterator[bytes]:
    for corpus in (natural, *([real] if real else [])):
        yield from map(bytes, manifest_lines(corpus / "held_out"))
    if espeak is not None:
        yield from map(bytes, islice(manifest_lines(espeak / "held_out"), ESPEAK_HELD_OUT_CLIPS))


def write_mix(
    natural: Path, espeak: Path | None, repeat: int, no_reference_share: float, out: Path, real: Path | None = None
) -> dict[str, int]:
    """Write the mix; return the number of lines of each part."""
    others = [corpus for corpus in (espeak, real) if corpus is not None]
    mix = {
        "train": list(training_lines(natural, others, repeat, no_reference_share)),
        "held_out": list(held_out_lines(natural, espeak, real)),
    }
    for part, lines in mix.items():
        write_manifest_lines(out / part / "manifest.jsonl", lines)
    return {part: len(lines) for part, lines in mix.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--natural", type=Path, required=True, help="folder made by augment_natural.py")
    parser.add_argument("--espeak", type=Path, help="folder made by espeak_corpus.py; natural speech alone without")
    parser.add_argument("--real", type=Path, help="folder made by augment_real.py")
    parser.add_argument("--repeat", type=int, default=1, help="of a line in one epoch, with other codes each time")
    parser.add_argument(
        "--no-reference-share",
        type=float,
        default=0.08,
        help="of natural lines without a reference, 0.13 at most",
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        counts = write_mix(args.natural, args.espeak, args.repeat, args.no_reference_share, args.out, args.real)
        for part, count in counts.items():
            print(f"{args.out / part}: {count} lines")
    except MynaError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
