"""A small Phi-4-multimodal with random weights, to be taught by the learners of `learner_corpus.py` alone.

python recipes/pronunciation/make_small.py --out data/learners/model

It reads and writes bytes, so that an answer takes some 150 tokens. Its classes are the true model's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from myna.errors import ModelError, MynaError
from myna.models.phi4.tiny import save_tiny

HIDDEN, LAYERS, BLOCKS, CHANNELS = 384, 6, 6, 64


def make(out: Path, seed: int) -> None:
    if out.exists():
        raise ModelError(f"{out} is there already", hint="name another folder with --out")
    save_tiny(out, seed=seed, hidden=HIDDEN, layers=LAYERS, blocks=BLOCKS, channels=CHANNELS)
    print(f"{out}: {LAYERS} layers of {HIDDEN} that answer, {BLOCKS} of {HIDDEN // 2} that hear, all random")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    try:
        make(asked.out, asked.seed)
    except MynaError as error:
        sys.exit(f"{error.what}\n  → {error.hint}")


if __name__ == "__main__":
    main()
