"""Time budget of the stages of fledgling.sh.

python training/fledgling/plan_seconds.py codec --budget 1400 --elapsed 260
python training/fledgling/plan_seconds.py corpora --budget 1400 --elapsed 15 --codec-exists

The language model gets at least nine twentieths of the budget, and whatever the earlier stages leave over. Where a
codec exists already, its time goes to the synthesis of natural speech. Prints whole seconds.
"""

from __future__ import annotations

import argparse
from typing import Literal

Stage = Literal["corpora", "codec", "voices", "decoder", "train"]

LANGUAGE_MODEL_SHARE = 0.45
"""The share of the whole that the language model must have."""
CORPORA_SHARE = 0.11
"""The share in which natural speech is made."""
OVERHEAD_SECONDS: dict[str, int] = {
    "before corpora": 15,
    "corpora": 20,
    "codec": 35,
    "voices": 90,
    "encode": 110,
    "trial": 40,
    "train": 35,
    "export": 15,
}
"""Seconds beside the work itself: programs start, files are read, speech is shaped, kernels are chosen. By the runs of
2026-11-15 and 16 on an H200 with 16 cores; of corpora and codes, for the 250 hours that are expected next."""
MIN_SECONDS: dict[Stage, int] = {"corpora": 30, "codec": 60, "voices": 60, "decoder": 60, "train": 30}
"""Below this a stage is not worth its start; a plan that is that late takes a little more than it was args."""


def seconds_for(stage: Stage, budget: float, elapsed: float, *, codec_exists: bool = False) -> int:
    left = budget - elapsed
    after_codec = sum(OVERHEAD_SECONDS[name] for name in ("encode", "trial", "train", "export"))
    match stage:
        case "corpora" if codec_exists:
            wanted = left - OVERHEAD_SECONDS["corpora"] - after_codec - LANGUAGE_MODEL_SHARE * budget
        case "corpora":
            free = (
                left
                - OVERHEAD_SECONDS["corpora"]
                - MIN_SECONDS["codec"]
                - OVERHEAD_SECONDS["codec"]
                - after_codec
                - LANGUAGE_MODEL_SHARE * budget
            )
            wanted = min(CORPORA_SHARE * budget, free)
        case "codec":
            wanted = left - OVERHEAD_SECONDS["codec"] - after_codec - LANGUAGE_MODEL_SHARE * budget
        case "voices":  # lossy codecs, compilation, and an evaluation at the end
            wanted = left - OVERHEAD_SECONDS["voices"]
        case "decoder":  # after which nothing comes
            wanted = left - OVERHEAD_SECONDS["codec"]
        case "train":
            wanted = left - OVERHEAD_SECONDS["train"] - OVERHEAD_SECONDS["export"]
    return max(MIN_SECONDS[stage], int(wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=MIN_SECONDS)
    parser.add_argument("--budget", type=float, required=True, help="seconds of everything, from the first stage on")
    parser.add_argument("--elapsed", type=float, required=True, help="seconds of it that have passed")
    parser.add_argument("--codec-exists", action="store_true", help="no codec is trained")
    args = parser.parse_args()
    print(seconds_for(args.stage, args.budget, args.elapsed, codec_exists=args.codec_exists))


if __name__ == "__main__":
    main()
