"""learners.sh, with a fake Python that records its arguments."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "training" / "pronunciation" / "learners.sh"
FAKE_PYTHON = """#!/usr/bin/env bash
words="$*"
while [ $# -gt 0 ] && [ "$1" != --out ]; do shift; done
case $words in
  -c*) words=check ;;
  *plan_steps.py*) echo 7 ;;
  *learner_corpus.py*) mkdir -p "$2/train" "$2/test"; echo line | tee "$2/train/scores.jsonl" >"$2/test/scores.jsonl" ;;
  *"myna import"*) mkdir -p "$2"; touch "$2/manifest.jsonl" ;;
  *"myna train"*) mkdir -p "$2/model" ;;
  *"myna answer"*) touch "$2" ;;
  *report.py*) mkdir -p "$2"; touch "$2/pronunciation.json" ;;
  *benchmarks/pronunciation.py*) touch "$2/full_size.json" ;;
esac
echo "$words" >>{log}
"""
SMALL = [
    "check",
    "learner_corpus.py",
    "init_small_model.py",
    "import",
    "import",
    "encode.py",
    "train_audio_encoder.py",
    "train",
]
SMALL += ["plan_steps.py", "train", "answer", "report.py"]


def calls_of(home: Path, stage: str, **settings: str) -> list[list[str]]:
    """Arguments of every call of Python in this stage."""
    home.mkdir(exist_ok=True)
    fake_python, log = home / "python", home / "log"
    fake_python.write_text(FAKE_PYTHON.replace("{log}", shlex.quote(str(log))))
    fake_python.chmod(0o755)
    log.write_text("")
    places = {"PYTHON": fake_python, "DATA": home / "data", "RUNS": home / "runs", "OUT": home / "out"}
    env = {"PATH": os.environ["PATH"], **{name: str(place) for name, place in places.items()}, **settings}
    env |= {"IMPORTS": "1", "JOBS": "1"}
    done = subprocess.run(["bash", SCRIPT, stage], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split() for line in log.read_text().splitlines()]


def name_of(words: list[str]) -> str:
    return words[2] if words[0] == "-m" else Path(words[0]).name


def test_any_machine_can_train_the_small_model(tmp_path: Path) -> None:
    calls = calls_of(
        tmp_path, "small", PRETRAIN_SECONDS="9", PRETRAIN_OPTIONS="--batch-frames 6000", SET="--set train.ema_decay=0.9"
    )
    # The model is made while recordings are read.
    assert sorted(map(name_of, calls[1:5])) == sorted(SMALL[1:5])
    assert list(map(name_of, calls[5:])) == SMALL[5:] and calls[0] == ["check"]
    by_name = {name_of(words): words for words in calls}
    encoder = str(tmp_path / "data" / "encoder")
    pretrained = by_name["train_audio_encoder.py"]
    assert pretrained[-4:] == ["--seconds", "9", "--batch-frames", "6000"]
    assert pretrained[pretrained.index("--out") + 1] == encoder
    trained = by_name["train"]
    assert f"model.source={encoder}" in trained and "train.ema_decay=0.9" in trained and "train.steps=7" in trained
    assert f"{encoder}/pretraining.json" in by_name["report.py"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"answers.jsonl", "log.txt", "pronunciation.json"}
    assert calls_of(tmp_path, "small") == [], "typed again, nothing is left to do"


def test_a_gpu_measures_the_full_size_as_well(tmp_path: Path) -> None:
    calls = calls_of(tmp_path, "all")
    assert sorted(map(name_of, calls)) == sorted([*SMALL, "pronunciation.py"])
    assert (tmp_path / "out" / "full_size.json").is_file()


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "DATA": str(tmp_path / "data"), "RUNS": str(tmp_path / "runs")}
    done = subprocess.run(["bash", SCRIPT, "learnt"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "there is no stage learnt" in done.stdout + done.stderr
