"""How many seconds each training may take, so that all of them together end in time.

python training/fledgling/plan_seconds.py codec --budget 1400 --gone 260
python training/fledgling/plan_seconds.py sounds --budget 1400 --gone 15 --codec-there

What comes before a stage has taken what it has taken; what comes after it keeps its due. The language model gets at
least nine twentieths of the whole, and whatever nobody needed. Where the codec is there already, its time goes to the
making of natural speech. Prints whole seconds.
"""

from __future__ import annotations

import argparse
from typing import Literal

Stage = Literal["sounds", "codec", "decoder", "learn"]

SPEAKING = 0.45
"""The share of the whole that the language model must have."""
OF_SOUNDS = 0.11
"""The share in which natural speech is made."""
AROUND: dict[str, int] = {
    "before sounds": 15,
    "sounds": 20,
    "codec": 35,
    "encode": 110,
    "trial": 40,
    "learn": 35,
    "ship": 15,
}
"""Seconds beside the work itself: programs start, files are read, speech is shaped, kernels are chosen. By the runs of
2026-11-15 and 16 on an H200 with 16 cores; of sounds and codes, for the 250 hours that are expected next."""
LEAST: dict[Stage, int] = {"sounds": 30, "codec": 60, "decoder": 60, "learn": 30}
"""Below this a stage is not worth its start; a plan that is that late takes a little more than it was given."""


def seconds_for(stage: Stage, budget: float, gone: float, *, codec_there: bool = False) -> int:
    left = budget - gone
    after_codec = sum(AROUND[name] for name in ("encode", "trial", "learn", "ship"))
    match stage:
        case "sounds" if codec_there:
            wanted = left - AROUND["sounds"] - after_codec - SPEAKING * budget
        case "sounds":
            free = left - AROUND["sounds"] - LEAST["codec"] - AROUND["codec"] - after_codec - SPEAKING * budget
            wanted = min(OF_SOUNDS * budget, free)
        case "codec":
            wanted = left - AROUND["codec"] - after_codec - SPEAKING * budget
        case "decoder":  # after which nothing comes
            wanted = left - AROUND["codec"]
        case "learn":
            wanted = left - AROUND["learn"] - AROUND["ship"]
    return max(LEAST[stage], int(wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=LEAST)
    parser.add_argument("--budget", type=float, required=True, help="seconds of everything, from the first stage on")
    parser.add_argument("--gone", type=float, required=True, help="seconds of it that are over")
    parser.add_argument("--codec-there", action="store_true", help="no codec is trained")
    given = parser.parse_args()
    print(seconds_for(given.stage, given.budget, given.gone, codec_there=given.codec_there))


if __name__ == "__main__":
    main()
