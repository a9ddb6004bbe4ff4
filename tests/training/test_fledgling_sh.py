"""fledgling.sh, with a fake Python that records its arguments."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "training" / "fledgling" / "fledgling.sh"
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$@" >>{log}
while [ $# -gt 0 ]; do [ "$1" = --out ] && mkdir -p "$2/codec" && touch "$2/manifest.jsonl" "$2/progress.json" \\
  "$2/codec/model.safetensors" "$2/codec/config.json"; shift; done
exit 0
"""


def calls_of(home: Path, *stages: str, fake: str = FAKE_PYTHON, **settings: str) -> list[list[str]]:
    """Arguments of every call of Python in these stages."""
    for folder in ("bundle/0/texts", "bundle/0/kokoro", "bundle/1/natural"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    fake_python, log = home / "python", home / "log"
    fake_python.write_text(fake.format(python=shlex.quote(sys.executable), log=shlex.quote(str(log))))
    fake_python.chmod(0o755)
    log.write_text("")
    places = {"PYTHON": fake_python, "DATA": home / "data", "BUNDLE": home / "bundle", "RUNS": home / "runs"}
    places["OUT"] = home / "out"
    env = {"PATH": os.environ["PATH"], **{name: str(place) for name, place in places.items()}, **settings}
    done = subprocess.run(["bash", SCRIPT, *stages], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split() for line in log.read_text().splitlines()]


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_channels_may_be_left_out_of_all_corpora(tmp_path: Path) -> None:
    for channels, clean in (({}, False), ({"CHANNELS": ""}, True)):
        (tmp_path / str(clean)).mkdir()
        calls = calls_of(tmp_path / str(clean), "corpora", **channels)
        assert len(calls) == 4 and all(("--clean" in words) == clean for words in calls), calls


def test_the_manifest_of_all_natural_speech_is_written_last(tmp_path: Path) -> None:
    calls = [Path(words[0]).name for words in calls_of(tmp_path, "corpora") if "natural" in words[0]]
    assert calls == ["augment_natural.py", "natural_corpus.py"]


def with_trial(home: Path) -> str:
    """A fake Python under which a language model's trial takes 0.1 s a step, from which steps are planned."""
    trial = 'case "$*" in *runs/language/trial*) mkdir -p {trial}; cp {metrics} {trial}/metrics.jsonl;; esac\n'
    metrics, run = home / "metrics", home / "runs/language"
    metrics.write_text("".join(f'{{"speed": {{"seconds": 0.1}}, "step": {step}}}\n' for step in range(60)))
    fake = FAKE_PYTHON.replace("echo", '[ "$(basename "$1")" = plan_steps.py ] && exec {python} "$@"\necho', 1)
    return fake.replace(
        "echo", trial.replace("{trial}", str(run / "trial")).replace("{metrics}", str(metrics)) + "echo", 1
    )


def test_a_language_model_begins_with_the_checkpoint_of_the_bundle(tmp_path: Path) -> None:
    """The checkpoint's files lie in several parts, as do the recordings of real speech."""
    files = ("1/init/model.safetensors", "2/init/config.json", "2/init/codec/model.safetensors", "0/real_words.json")
    speech = ("1/real/en-real/part-0.parquet", "2/real/en-real/part-1.parquet", "2/real/en-commands/part-0.parquet")
    for name in (*files, *speech):
        file = tmp_path / "bundle" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    fake = with_trial(tmp_path)
    settings = {"BUDGET": "1380", "PARTS": "3"}
    calls = calls_of(tmp_path, "language", fake=fake, OUT="", **settings)
    names = [
        Path(words[0]).name if words[0] != "-m" else f"{words[1]} {words[2]}" for words in calls if words[0] != "-c"
    ]
    assert names[-5:] == ["mix_corpora.py", "encode.py", "myna train", "myna train", "export_fledgling.py"]
    assert names.count("augment_real.py") == 1
    by_script = {Path(words[0]).name: words for words in calls}
    assert option(by_script["natural_corpus.py"], "--seconds") == "360"
    real, place = tmp_path / "data/real", by_script["augment_real.py"].index("--source") + 1
    assert by_script["augment_real.py"][place : place + 3] == [f"{real}/en-real=15", f"{real}/en-commands=3", "--words"]
    assert option(by_script["mix_corpora.py"], "--real") == str(tmp_path / "data/real_augmented")
    init = tmp_path / "data" / "init"
    assert (init / "model.safetensors").read_text() == files[0] and (init / "config.json").read_text() == files[1]
    trained = calls[-2]
    steps = next(int(word.partition("=")[2]) for word in trained if word.startswith("train.steps="))
    assert 10_000 < steps < 13_300 and "train.learning_rate=1.2e-3" in trained
    assert len(list((tmp_path / "data/real/en-real").iterdir())) == 2


def test_a_codec_for_real_voices_is_trained_on_all_speech_of_the_bundle(tmp_path: Path) -> None:
    for name in ("0/real/en-real/part-0", "1/real/en-real/part-1", "1/real/studio/all", "0/background/music"):
        file = tmp_path / "bundle" / f"{name}.parquet"
        file.parent.mkdir(parents=True)
        file.touch()
    (tmp_path / "bundle/0/speech_encoder.safetensors").touch()
    calls = calls_of(tmp_path, "voices", BUDGET="900", REAL_WEIGHTS="en-real=0.2", REAL_WEIGHT="0.07")
    by_script = {Path(words[0]).name: words for words in calls}
    assert "--clean" in by_script["natural_corpus.py"] and "--clean" in by_script["espeak_corpus.py"]
    for corpus in ("natural_corpus.py", "espeak_corpus.py"):
        assert {"cs", "es", "it"} <= set(by_script[corpus][by_script[corpus].index("--languages") :])
    trained, data = by_script["train_codec.py"], tmp_path / "data"
    assert option(trained, "--speech-encoder") == str(tmp_path / "bundle/0/speech_encoder.safetensors")
    assert [word for before, word in pairwise(trained) if before == "--source"] == [
        f"{data}/natural_augmented=0.45",
        f"{data}/espeak_codec=0.1",
        f"{data}/real/en-real=0.2",
        f"{data}/real/studio=0.07",
    ]
    assert sorted(path.name for path in (data / "real/en-real").iterdir()) == ["part-0.parquet", "part-1.parquet"]
    assert "--augment" in trained and option(trained, "--background").endswith("background/music.parquet")
    assert 700 < int(option(trained, "--seconds")) <= 810 and (tmp_path / "out/codec/config.json").is_file()
    assert calls_of(tmp_path, "voices", BUDGET="900") == [], "typed again, nothing is left to do"


def test_a_codec_is_trained_on_what_there_is(tmp_path: Path) -> None:
    """Train without Kokoro, natural and real speech; the script names what is missing."""
    fake = FAKE_PYTHON.replace("echo", '[[ "$1" == *natural* ]] && exit 1\necho', 1)
    calls = calls_of(tmp_path, "voices", BUDGET="900", fake=fake)
    trained = next(words for words in calls if words[0].endswith("train_codec.py"))
    assert trained.count("--source") == 1 and option(trained, "--source").endswith("espeak_codec=0.1")


def test_a_codec_and_a_language_model_on_its_codes_are_trained_in_one_go(tmp_path: Path) -> None:
    (tmp_path / "bundle/1/real/en-real").mkdir(parents=True)
    calls = calls_of(tmp_path, "both", fake=with_trial(tmp_path), OUT="", BUDGET="1700", VOICES_BUDGET="700")
    names = [Path(words[0]).name for words in calls if words[0].endswith(".py")]
    assert names.index("train_codec.py") < names.index("grow_fledgling.py") < names.index("encode.py")
    corpora = [option(words, "--out") for words in calls if words[0].endswith("natural_corpus.py")]
    assert corpora == [f"{tmp_path}/data/voices/natural_augmented", f"{tmp_path}/data/natural_augmented"]
    by_script = {Path(words[0]).name: words for words in calls}
    assert 500 < int(option(by_script["train_codec.py"], "--seconds")) <= 610
    grown = by_script["grow_fledgling.py"]
    assert option(grown, "--codec") == f"{tmp_path}/runs/voices/codec/codec"
    assert option(grown, "--out") == f"{tmp_path}/data/initial" and f"{tmp_path}/bundle/1/real/en-real" in grown
    with pytest.raises(AssertionError, match="train a codec"):
        calls_of(tmp_path / "other", "language", fake=FAKE_PYTHON, BUDGET="1000")
