"""The script that teaches the learners' listener, with a stand-in for Python that notes what it was asked for."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "training" / "pronunciation" / "learners.sh"
STAND_IN = """#!/usr/bin/env bash
words="$*"
while [ $# -gt 0 ] && [ "$1" != --out ]; do shift; done
case $words in
  -c*) words=check ;;
  *plan_steps.py*) echo 7 ;;
  *learner_corpus.py*) mkdir -p "$2/train" "$2/test"; echo line | tee "$2/train/scores.jsonl" >"$2/test/scores.jsonl" ;;
  *"myna import"*) mkdir -p "$2"; touch "$2/manifest.jsonl" ;;
  *"myna train"*) mkdir -p "$2/model" ;;
  *"myna listen"*) touch "$2" ;;
  *report.py*) mkdir -p "$2"; touch "$2/pronunciation.json" ;;
  *benchmarks/pronunciation.py*) touch "$2/true_size.json" ;;
esac
echo "$words" >>{asked}
"""
SMALL = ["check", "learner_corpus.py", "make_small.py", "import", "import", "encode.py", "teach_ear.py", "train"]
SMALL += ["plan_steps.py", "train", "listen", "report.py"]


def asked_for(home: Path, stage: str, **settings: str) -> list[list[str]]:
    """What Python was asked for in this stage, one list of words for each time."""
    home.mkdir(exist_ok=True)
    stand_in, asked = home / "python", home / "asked"
    stand_in.write_text(STAND_IN.replace("{asked}", shlex.quote(str(asked))))
    stand_in.chmod(0o755)
    asked.write_text("")
    places = {"PYTHON": stand_in, "DATA": home / "data", "RUNS": home / "runs", "OUT": home / "out"}
    given = {"PATH": os.environ["PATH"], **{name: str(place) for name, place in places.items()}, **settings}
    given |= {"IMPORTS": "1", "JOBS": "1"}
    done = subprocess.run(["bash", SCRIPT, stage], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split() for line in asked.read_text().splitlines()]


def name_of(words: list[str]) -> str:
    return words[2] if words[0] == "-m" else Path(words[0]).name


def test_any_machine_can_teach_the_small_model(tmp_path: Path) -> None:
    asked = asked_for(tmp_path, "small", HEARING="9", HEAR_OPTIONS="--spectra 6000", SET="--set train.ema_decay=0.9")
    # The model is made while recordings are read.
    assert sorted(map(name_of, asked[1:5])) == sorted(SMALL[1:5])
    assert list(map(name_of, asked[5:])) == SMALL[5:] and asked[0] == ["check"]
    by_name = {name_of(words): words for words in asked}
    hearing = str(tmp_path / "data" / "hearing")
    taught = by_name["teach_ear.py"]
    assert taught[-4:] == ["--seconds", "9", "--spectra", "6000"] and taught[taught.index("--out") + 1] == hearing
    learned = by_name["train"]
    assert f"model.source={hearing}" in learned and "train.ema_decay=0.9" in learned and "train.steps=7" in learned
    assert f"{hearing}/hearing.json" in by_name["report.py"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"answers.jsonl", "log.txt", "pronunciation.json"}
    assert asked_for(tmp_path, "small") == [], "typed again, nothing is left to do"


def test_a_card_measures_the_true_size_as_well(tmp_path: Path) -> None:
    asked = asked_for(tmp_path, "all")
    assert sorted(map(name_of, asked)) == sorted([*SMALL, "pronunciation.py"])
    assert (tmp_path / "out" / "true_size.json").is_file()


def test_what_is_no_stage_is_refused(tmp_path: Path) -> None:
    given = {"PATH": os.environ["PATH"], "DATA": str(tmp_path / "data"), "RUNS": str(tmp_path / "runs")}
    done = subprocess.run(["bash", SCRIPT, "learnt"], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "there is no stage learnt" in done.stdout + done.stderr
