"""The script that chains the stages, with a stand-in for Python that notes what it was asked for."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "training" / "fledgling" / "fledgling.sh"
STAND_IN = """#!/usr/bin/env bash
[ "$(basename "$1")" = plan_seconds.py ] && exec {python} "$@"
echo "$@" >>{asked}
while [ $# -gt 0 ]; do [ "$1" = --out ] && mkdir -p "$2/codec" && touch "$2/manifest.jsonl" "$2/progress.json" \\
  "$2/codec/model.safetensors" "$2/codec/config.json"; shift; done
exit 0
"""


def asked_for(home: Path, *stages: str, **settings: str) -> list[list[str]]:
    """What Python was asked for in these stages, one list of words for each time."""
    for folder in ("carry/0/texts", "carry/0/kokoro", "carry/1/natural"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    stand_in, asked = home / "python", home / "asked"
    stand_in.write_text(STAND_IN.format(python=shlex.quote(sys.executable), asked=shlex.quote(str(asked))))
    stand_in.chmod(0o755)
    asked.write_text("")
    places = {"PYTHON": stand_in, "DATA": home / "data", "CARRY": home / "carry", "RUNS": home / "runs"}
    places["OUT"] = home / "out"
    given = {"PATH": os.environ["PATH"], **{name: str(place) for name, place in places.items()}, **settings}
    done = subprocess.run(["bash", SCRIPT, *stages], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split() for line in asked.read_text().splitlines()]


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


@pytest.mark.parametrize("codec", ["", "runs/before/codec"])
def test_a_decoder_is_trained_within_its_budget_and_nothing_else_is(tmp_path: Path, codec: str) -> None:
    asked = asked_for(tmp_path, "decoder", BUDGET="600", CODEC=codec, CODEC_OPTIONS="--rate 1e-4")
    by_script = {Path(words[0]).name: words for words in asked}
    assert len(asked) == len(by_script), "each of them once"
    assert by_script.keys() == {"espeak_corpus.py", "shape_natural.py", "natural_corpus.py", "train_codec.py"}
    assert option(by_script["natural_corpus.py"], "--seconds") == "60"
    assert option(by_script["espeak_corpus.py"], "--out").endswith("espeak_codec"), "and none for a language model"
    trained = by_script["train_codec.py"]
    assert option(trained, "--begin-with") == (codec or "src/myna/models/fledgling/codec")
    assert "--decoder-only" in trained and trained[-2:] == ["--rate", "1e-4"]
    assert 500 < int(option(trained, "--seconds")) < 600 and option(trained, "--out").endswith("runs/decoder/codec")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "codec.safetensors",
        "codec.json",
        "codec_progress.json",
    }
    assert asked_for(tmp_path, "decoder", BUDGET="600", CODEC=codec) == [], "typed again, nothing is left to do"


def test_channels_may_be_left_out_of_all_corpora(tmp_path: Path) -> None:
    for channels, clean in (({}, False), ({"CHANNELS": ""}, True)):
        (tmp_path / str(clean)).mkdir()
        asked = asked_for(tmp_path / str(clean), "sounds", **channels)
        assert len(asked) == 4 and all(("--clean" in words) == clean for words in asked), asked


def test_the_manifest_of_all_natural_speech_is_written_last(tmp_path: Path) -> None:
    asked = [Path(words[0]).name for words in asked_for(tmp_path, "sounds") if "natural" in words[0]]
    assert asked == ["shape_natural.py", "natural_corpus.py"]


def test_a_fledgling_goes_on_learning_with_the_codec_it_knows(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    (begun / "codec").mkdir(parents=True)
    (begun / "codec" / "model.safetensors").write_text("codes")
    (begun / "model.safetensors").write_text("weights")
    asked = asked_for(tmp_path, "codec", "encode", "trial", BEGIN_WITH=str(begun))
    assert [Path(words[0]).name for words in asked[:2]] == ["mix.py", "encode.py"], "no codec and no egg is made"
    assert (tmp_path / "data" / "egg" / "model.safetensors").read_text() == "weights"
    assert "model.check_pretrained=true" in asked[2]
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_text("other codes")
    with pytest.raises(AssertionError, match="knows other codes"):
        asked_for(tmp_path, "codec", "encode", BEGIN_WITH=str(begun), CODEC=str(other), RUNS=str(tmp_path / "again"))
