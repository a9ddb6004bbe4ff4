"""How many optimizer steps fit into the time there is, by short trials on the same machine.

python recipes/fledgling/plan_steps.py runs/trial-true runs/trial-false --seconds 480

The rate falls over the steps that a recipe names, so their number must be known before the first of them. Prints it,
and the quickest of the trials. Trials that failed before they had steps to count are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path

SETTLING = 20
"""Steps of the trial that are not counted: kernels are loaded and compiled, and the loader has a lead."""
RESERVE = 0.06
"""Share of the time for evaluations, checkpoints, and steps that are slower than most."""


def step_seconds(run: Path) -> float | None:
    """Of a usual step; None where the trial was too short to tell."""
    metrics = run / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()] if metrics.is_file() else []
    taken = [row["speed"]["seconds"] for row in rows if "speed" in row][SETTLING:]
    return statistics.median(taken) if taken else None


def steps_in(runs: Iterable[Path], seconds: float) -> tuple[int, Path]:
    usual = {run: taken for run in runs if (taken := step_seconds(run)) is not None}
    if not usual:
        raise SystemExit(f"no trial has more than {SETTLING} steps: let one run longer")
    quickest = min(usual, key=usual.__getitem__)
    return max(1, int(seconds * (1 - RESERVE) / usual[quickest])), quickest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders of trials")
    parser.add_argument("--seconds", type=float, required=True, help="time for training alone")
    given = parser.parse_args()
    print(*steps_in(given.runs, given.seconds))


if __name__ == "__main__":
    main()
