"""The comparison of rankings at toy size: a tiny model, synthetic voices, and fake metrics."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from benchmarks import rank_checkpoints
from myna.audio.files import Samples, write_audio
from myna.core.run_folder import Run
from myna.evaluate.scoring import Scorers
from myna.listen.asr import Transcript
from myna.listen.speaker_encoders import SpeakerEmbedding
from myna.models import save_tiny_model
from tests.tone_corpus import SAMPLE_RATE, SPEAKER_PITCHES, tone_speech


class FakeMetrics:
    """Spectral speaker embeddings, a constant transcript and a constant MOS."""

    name = "fake"

    def transcribe(self, samples: Samples, sample_rate: int, language: str | None) -> Transcript:  # noqa: ARG002
        return Transcript("something else", looped=False)

    def embed(self, samples: Samples, sample_rate: int) -> SpeakerEmbedding:  # noqa: ARG002
        return np.asarray(np.abs(np.fft.rfft(samples, 2048))[:1024].reshape(64, 16).sum(axis=1), np.float32)

    def score(self, samples: Samples, sample_rate: int) -> float:  # noqa: ARG002
        return 3.0


def test_sentences_are_all_different() -> None:
    made = rank_checkpoints.sentences(100)
    assert len(set(made)) == 100 and made[:7] == rank_checkpoints.sentences(7)
    assert made[0] == "The old baker opened the heavy window before breakfast."
    with pytest.raises(SystemExit, match="--sentences FILE"):
        rank_checkpoints.sentences(101)


@pytest.mark.slow
def test_both_rankings_are_put_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_model(tmp_path / "model")
    words = ("good morning", "what a fine day", "follow me", "hello there", "so long", "far away", "come here", "go on")
    for number, text in enumerate((*words, "over there", "not today")):
        clip = tmp_path / "recordings" / "heron" / f"{number}.wav"
        write_audio(clip, np.tile(tone_speech(text, SPEAKER_PITCHES["heron"]), 2), SAMPLE_RATE)
        clip.with_suffix(".txt").write_text(f"{text} {text}")
    (tmp_path / "lines.txt").write_text("hello\nyou\ngood day\nso far\n")
    options = ["--out", tmp_path / "out", "--model", tmp_path / "model", "--asr", "any", "--seeds", 0]
    options += [
        "--voice",
        tmp_path / "recordings",
        "--sentences",
        tmp_path / "lines.txt",
        "--eval-limit",
        2,
        "--limit",
        4,
    ]
    for setting in (
        "train.steps=2",
        "train.evaluate_every=1",
        "model.check_pretrained=false",
        "speech_eval.min_stop_rate=0.0",
    ):
        options += ["--set", setting]
    fake = FakeMetrics()
    scorers = Scorers(
        asr=fake, speaker_encoder=fake, distillmos=fake, names={"asr": "a", "speaker_encoder": "s", "distillmos": "d"}
    )
    with (
        patch("myna.evaluate.callback.open_required_scorers", lambda _: scorers),
        patch.object(rank_checkpoints, "open_required_scorers", lambda _: scorers),
        patch.object(sys, "argv", ["rank_checkpoints.py", *map(str, options)]),
    ):
        rank_checkpoints.main()
        results = json.loads((tmp_path / "out" / "ranking.json").read_text())
        with patch("myna.train.loop.run_training", lambda *_, **__: pytest.fail("it was trained before")):
            rank_checkpoints.main()
    assert results == json.loads((tmp_path / "out" / "ranking.json").read_text())
    speech_eval = Run.open(tmp_path / "out" / "seed-0").recipe.speech_eval
    assert (speech_eval.min_stop_rate, speech_eval.limit) == (0.0, 4), "what was set, and what the comparison needs"
    [one] = results["seeds"]
    assert (results["sentences"], results["eval_limit"], one["seed"], set(one["scores"])) == (4, 2, 0, {"1", "2"})
    for scores in one["scores"].values():
        assert scores["same_sentences"]["n"] == 2 and scores["exhaustive"]["n"] == 4
        assert scores["during_training"] == pytest.approx(scores["same_sentences"]["mean"], abs=0.02)
    assert one["during_training"] == one["same_sentences"] and one["agree"] == (
        one["during_training"] == one["exhaustive"]
    )
    assert one["regret"]["mean"] >= 0 and f"seed 0: during training {one['during_training']}" in capsys.readouterr().out
