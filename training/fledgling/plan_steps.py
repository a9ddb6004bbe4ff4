"""Number of optimizer steps that fit into a time budget, by a short trial on the same machine.

python training/fledgling/plan_steps.py runs/trial --seconds 480

The rate falls over the steps that a recipe names, so their number must be known before the first of them. Prints it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

WARM_UP_STEPS = 20
"""Steps of the trial that are not counted: kernels are loaded and compiled, and the loader has a lead."""
RESERVED_SHARE = 0.06
"""Share of the time for evaluations, checkpoints, and steps that are slower than most."""


def steps_in(metrics: Path, seconds: float) -> int:
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    taken = [row["speed"]["seconds"] for row in rows if "speed" in row][WARM_UP_STEPS:]
    if not taken:
        raise SystemExit(f"{metrics} has no more than {WARM_UP_STEPS} steps: let the trial run longer")
    return max(1, int(seconds * (1 - RESERVED_SHARE) / statistics.median(taken)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder of the trial")
    parser.add_argument("--seconds", type=float, required=True, help="time for training alone")
    args = parser.parse_args()
    print(steps_in(args.run / "metrics.jsonl", args.seconds))


if __name__ == "__main__":
    main()
