"""Does the demo show what it should? It is run with several seeds, and what its ears say is put side by side.

python training/fledgling/judge_demo.py --out data/fledgling/judged_demo --recogniser .cache/ears/whisper-base

Each seed is a demo of its own in `OUT/seed-N`, whose page can be listened to; one that is there is not run again.
`OUT/judged.json` has the table. It is as it should be if tuning raises the similarity to the real recordings by 0.03
over all seeds, and if no more words are heard wrongly after it than before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from myna.io import replacing

GAIN = 0.03
"""Similarity that tuning should add, as a mean over seeds."""


def judge(scores: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row a seed, and what they come to; a score that no ear gave is None, and nothing is concluded from it."""
    rows = []
    for score in scores:
        before, after, real = (score["systems"][name] for name in ("before", "after", "real"))
        row = {
            "seed": score["seed"],
            "similarity": {"real": real.get("similarity"), "before": before.get("similarity")},
            "word_error_rate": {"real": real.get("word_error_rate"), "before": before.get("word_error_rate")},
            "ended_by_itself": score["ended_by_itself"],
            "seconds": sum(score["seconds"].values()),
        }
        for key in ("similarity", "word_error_rate"):
            row[key] |= {"after": after.get(key), "change": _difference(after.get(key), before.get(key))}
        rows.append(row)
    gain, more = (_mean([row[key]["change"] for row in rows]) for key in ("similarity", "word_error_rate"))
    return {
        "seeds": rows,
        "similarity_gain": gain,
        "similarity_gain_wanted": GAIN,
        "word_error_rate_change": more,
        "as_it_should_be": None if gain is None or more is None else gain >= GAIN and more <= 0,
        "missing": [score["missing"] for score in scores if score["missing"]],
    }


def run(seed: int, out: Path, words: Sequence[str]) -> dict[str, Any]:
    """The scores of one demo, in a process of its own as a user would run it."""
    folder = out / f"seed-{seed}"
    if not (folder / "scores.json").is_file():
        command = [sys.executable, "-m", "myna", "demo", "--out", str(folder), "--seed", str(seed), *words]
        subprocess.run(command, check=True)
    found: dict[str, Any] = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    return found | {"seed": seed}


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


def _mean(numbers: Sequence[float | None]) -> float | None:
    found = [number for number in numbers if number is not None]
    return sum(found) / len(found) if found and len(found) == len(numbers) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the demos and the table")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--model", default="fledgling")
    parser.add_argument("--recogniser", help="folder or name of a Whisper")
    parser.add_argument("--voice", help="recordings, instead of the voice that comes with Myna")
    parser.add_argument("--set", action="append", default=[], help="a setting of the recipe, as `myna demo` takes it")
    given = parser.parse_args()
    words = ["--model", given.model, *(word for setting in given.set for word in ("--set", setting))]
    words += ["--recogniser", given.recogniser] if given.recogniser else []
    words += ["--voice", given.voice] if given.voice else []
    table = judge([run(seed, given.out, words) for seed in given.seeds])
    written = json.dumps(table, indent=2) + "\n"
    with replacing(given.out / "judged.json") as temporary:
        temporary.write_text(written, encoding="utf-8")
    print(written)


if __name__ == "__main__":
    main()
