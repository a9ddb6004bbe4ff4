"""An answering model through the command line: recordings with scores in, the same answers out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from peft import PeftModel
from transformers import Phi4MultimodalForCausalLM

from myna.audio.files import write_audio
from myna.core.errors import MynaError
from myna.data.pronunciation import MISPRONUNCIATION_F1, ParsedAnswers, read_assessment, score_answers
from tests.command_line import run_command
from tests.tone_learners import RATE, lines, recipe, record, sound

pytestmark = pytest.mark.slow


def myna(*words: object) -> str:
    result = run_command([str(word) for word in words])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def way(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen recordings with their scores, prepared and learned."""
    folder = tmp_path_factory.mktemp("listening")
    source = record(folder / "recordings")
    myna("model", "tiny", "--answers", "-o", folder / "model")
    myna("prepare", source, "-o", folder / "prepared", "-m", folder / "model", "--device", "cpu")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(folder)))
    myna("train", folder / "recipe.yaml", "-o", folder / "run")
    return folder


def test_sixteen_learners_are_answered_exactly(way: Path) -> None:
    """All clips say the same word, so only their sound tells the model what to answer."""
    out = way / "answers.jsonl"
    said = myna("answer", way / "prepared", "--run", way / "run", "-o", out, "--device", "cpu")
    assert "16 of 16 answers equal the expected ones" in said
    assert "16 utterances, 0 answers that cannot be read" in said and "phone error rate" in said
    assert "published" not in said, "whose figures are of other recordings"
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(row["answer"] == row["expected"] and row["stopped"] for row in rows)
    assert len({row["answer"] for row in rows}) == 16
    held = way / "held.jsonl"
    myna("answer", way / "prepared", "--run", way / "run", "-o", held, "--device", "cpu", "--constrained")
    assert held.read_text() == out.read_text(), "what can be read already is left alone"
    assert not ParsedAnswers.of(row["answer"] for row in rows).unreadable
    due = [read_assessment({key: line[key] for key in ("text", "scores", "words")}) for line in lines()]
    assert score_answers(due, [row["answer"] for row in rows]).figures[MISPRONUNCIATION_F1].mean == 1.0


def test_an_untrained_model_is_unreadable_unless_constrained(way: Path, tmp_path: Path) -> None:
    words = ["answer", way / "prepared", "--model", way / "model", "--device", "cpu", "--max-tokens", 120]
    assert "16 utterances, 16 answers that cannot be read" in myna(*words, "-o", tmp_path / "free.jsonl")
    said = myna(*words, "-o", tmp_path / "held.jsonl", "--constrained")
    assert "16 utterances, 0 answers that cannot be read" in said
    with pytest.raises(MynaError, match="no answer can be closed within 9 tokens"):
        myna("answer", way / "recordings" / "00.wav", "-m", way / "model", "--constrained", "--max-tokens", 9)


def test_a_recording_is_answered_as_it_was_learned(way: Path, tmp_path: Path) -> None:
    write_audio(tmp_path / "new.wav", sound("K S"), RATE)
    words = ["answer", tmp_path / "new.wav", "--run", way / "run", "--question", "How was it?", "--device", "cpu"]
    assert '"phones": "K S"' in myna(*words)


def test_the_adapter_is_plain_peft(way: Path) -> None:
    base = Phi4MultimodalForCausalLM.from_pretrained(way / "model")
    tuned = PeftModel.from_pretrained(base, str(way / "run" / "adapter"))
    assert any("lora_B" in name and p.abs().max() > 0 for name, p in tuned.named_parameters())


def test_the_run_says_what_it_learned(way: Path) -> None:
    rows = [json.loads(line) for line in (way / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"loss", "text", "accuracy", "stop_accuracy", "speed"} <= rows[0].keys()
    assert rows[-1]["loss"] < 0.02 < 1 < rows[0]["loss"] and rows[-1]["stop_accuracy"] == 1.0
    assert rows[0]["loss"] == rows[0]["text"], "one stream alone is the loss"


def test_render_shows_that_only_the_answer_is_learned(way: Path) -> None:
    output = myna("render", way / "prepared", "-m", way / "model")
    assert "<|audio|>" not in output and "0.40 s" in output and '{│"│p│h│o│n│e│s' in output


def test_preparing_again_encodes_nothing_new(way: Path) -> None:
    words = ["prepare", way / "recordings" / "scores.jsonl", "-o", way / "prepared", "-m", way / "model"]
    assert "0 clips were encoded now" in myna(*words, "--device", "cpu")


def test_an_answering_model_does_not_speak_nor_a_speaking_one_answer(way: Path, tmp_path: Path) -> None:
    with pytest.raises(MynaError, match="answers in words and has no codec"):
        myna("speak", "hello", "--run", way / "run", "-o", tmp_path / "x.wav", "--device", "cpu")
    myna("model", "tiny", "-o", tmp_path / "speaker")
    write_audio(tmp_path / "x.wav", np.zeros(24_000, np.float32), 24_000)
    with pytest.raises(MynaError, match="does not answer in words"):
        myna("answer", tmp_path / "x.wav", "-m", tmp_path / "speaker", "--device", "cpu")


def test_an_answering_model_refuses_a_line_to_be_spoken(way: Path, tmp_path: Path) -> None:
    write_audio(tmp_path / "in" / "a.wav", sound("T K"), RATE)
    (tmp_path / "in" / "a.txt").write_text("hello")
    myna("prepare", tmp_path / "in", "-o", tmp_path / "out", "-m", way / "model", "--device", "cpu")
    with pytest.raises(MynaError, match="its manifest line has no answer"):
        myna("render", tmp_path / "out", "-m", way / "model")


def test_full_training_answers_and_leaves_the_vision_part_alone(way: Path) -> None:
    settings = ("adapt.mode=full", "adapt.train_modules=[]", "train.steps=2", "train.learning_rate=1e-4")
    said = myna("train", way / "recipe.yaml", "-o", way / "full", *(word for s in settings for word in ("--set", s)))
    assert "myna answer RECORDING.wav" in said and "myna speak" not in said
    clip = way / "recordings" / "00.wav"
    assert "00.wav" in myna("answer", clip, "--run", way / "full", "--device", "cpu", "--max-tokens", 3)
    before = Phi4MultimodalForCausalLM.from_pretrained(way / "model").state_dict()
    after = Phi4MultimodalForCausalLM.from_pretrained(way / "full" / "model").state_dict()
    moved = {name for name, tensor in after.items() if not tensor.equal(before[name])}
    assert any("audio_embed.encoder" in name for name in moved)
    assert not any("image_embed" in name or "vision_speech" in name for name in moved)


def test_a_prepared_folder_needs_an_output_file(way: Path) -> None:
    with pytest.raises(MynaError, match="comes alone"):
        myna("answer", way / "prepared", "--run", way / "run")
