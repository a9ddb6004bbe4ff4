"""The comparison of rankings at toy size: a tiny model, birds for voices, and ears that need no weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from benchmarks import rank_checkpoints
from myna.audio.files import Samples, write
from myna.evaluate.resemblyzer import Voice
from myna.evaluate.scorers import Scorers
from myna.evaluate.wer import Transcript
from myna.models import save_tiny
from myna.train.run import Run
from tests.birds import BIRDS, SAMPLE_RATE, whistle


class Ear:
    """A voice is how loud its pitches are; words are never understood, and everything sounds alike good."""

    def transcribe(self, samples: Samples, sample_rate: int, language: str | None) -> Transcript:  # noqa: ARG002
        return Transcript("something else", looped=False)

    def embed(self, samples: Samples, sample_rate: int) -> Voice:  # noqa: ARG002
        return np.asarray(np.abs(np.fft.rfft(samples, 2048))[:1024].reshape(64, 16).sum(axis=1), np.float32)

    def score(self, samples: Samples, sample_rate: int) -> float:  # noqa: ARG002
        return 3.0


def test_sentences_are_all_different() -> None:
    made = rank_checkpoints.sentences(100)
    assert len(set(made)) == 100 and made[:7] == rank_checkpoints.sentences(7)
    assert made[0] == "The old baker opened the heavy window before breakfast."
    with pytest.raises(SystemExit, match="--sentences FILE"):
        rank_checkpoints.sentences(101)


def test_both_rankings_are_put_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "model")
    words = ("good morning", "what a fine day", "follow me", "hello there", "so long", "far away", "come here", "go on")
    for number, text in enumerate((*words, "over there", "not today")):
        clip = tmp_path / "recordings" / "heron" / f"{number}.wav"
        write(clip, np.tile(whistle(text, BIRDS["heron"]), 2), SAMPLE_RATE)
        clip.with_suffix(".txt").write_text(f"{text} {text}")
    (tmp_path / "lines.txt").write_text("hello\nyou\ngood day\nso far\n")
    asked = ["--out", tmp_path / "out", "--model", tmp_path / "model", "--recogniser", "any", "--seeds", 0]
    asked += ["--voice", tmp_path / "recordings", "--sentences", tmp_path / "lines.txt", "--heard", 2, "--lines", 4]
    for setting in (
        "train.steps=2",
        "train.evaluate_every=1",
        "model.check_pretrained=false",
        "speech_eval.min_stop_rate=0.5",
    ):
        asked += ["--set", setting]
    ear = Ear()
    ears = Scorers(words=ear, voice=ear, distillmos=ear, names={"words": "w", "voice": "v", "distillmos": "d"})
    with (
        patch("myna.evaluate.callback.open_required_scorers", lambda _: ears),
        patch.object(rank_checkpoints, "open_ears", lambda _: ears),
        patch.object(sys, "argv", ["rank_checkpoints.py", *map(str, asked)]),
    ):
        rank_checkpoints.main()
        found = json.loads((tmp_path / "out" / "ranking.json").read_text())
        with patch("myna.workflow.run_training", lambda *_, **__: pytest.fail("it was trained before")):
            rank_checkpoints.main()
    assert found == json.loads((tmp_path / "out" / "ranking.json").read_text())
    speech_eval = Run.open(tmp_path / "out" / "seed-0").recipe.speech_eval
    assert (speech_eval.min_stop_rate, speech_eval.limit) == (0.5, 2), "what was set, and what the comparison needs"
    [one] = found["seeds"]
    assert (found["lines"], found["heard"], one["seed"], set(one["marks"])) == (4, 2, 0, {"1", "2"})
    for marks in one["marks"].values():
        assert marks["same_lines"]["n"] == 2 and marks["exhaustive"]["n"] == 4
        assert marks["while_training"] == pytest.approx(marks["same_lines"]["mean"], abs=0.02)
    assert one["while_training"] == one["same_lines"] and one["agree"] == (one["while_training"] == one["exhaustive"])
    assert one["lost"]["mean"] >= 0 and f"seed 0: while training {one['while_training']}" in capsys.readouterr().out
