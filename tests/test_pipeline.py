"""All commands in order, on a tiny real model: recordings in, the same lines spoken out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from peft import PeftModel
from transformers import HiggsAudioV2ForConditionalGeneration

from myna.core.errors import MynaError
from myna.data.codec import Codes
from myna.data.dataset import PreparedDataset
from myna.models.higgs_v2.tiny import save_tiny_codec
from tests.command_line import run_command
from tests.tone_corpus import LINES, REFERENCE, SPEAKER_PITCHES, code_accuracy, recipe, write_recordings


def myna(*words: object) -> str:
    result = run_command([str(word) for word in words])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of two speakers, prepared and trained."""
    folder = tmp_path_factory.mktemp("workspace")
    write_recordings(folder / "recordings")
    myna("model", "tiny", "-o", folder / "model")
    myna("prepare", folder / "recordings", "-o", folder / "prepared", "-m", folder / "model", "--device", "cpu")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(folder)))
    myna("train", folder / "recipe.yaml", "-o", folder / "run")
    return folder


def speak(workspace: Path, speaker: str, text: str, *extra: object) -> Codes:
    out = workspace / "spoken.npy"
    voice = workspace / "recordings" / speaker / f"{speaker}-0.wav"
    words = ["speak", text, "--run", workspace / "run", "--reference", voice, "--reference-text", REFERENCE]
    myna(
        *words, "--temperature", 0, "--device", "cpu", "-o", workspace / "spoken.wav", "--codes", out, "--force", *extra
    )
    return np.asarray(np.load(out))


@pytest.mark.parametrize("speaker", SPEAKER_PITCHES)
def test_overfitted_lines_come_back_code_for_code_in_the_voice_of_the_reference(workspace: Path, speaker: str) -> None:
    """Each line exists in two voices, so only the reference can tell the model which codes to speak."""
    corpus = PreparedDataset.open(workspace / "prepared")
    real = {(u.speaker, u.text): corpus.codes(u) for u in corpus.utterances}
    other = next(name for name in SPEAKER_PITCHES if name != speaker)
    for text in LINES:
        spoken = speak(workspace, speaker, text)
        assert len(spoken) == len(real[speaker, text]), "it stops on the right frame"
        assert code_accuracy(spoken, real[speaker, text]) >= 0.99
        assert code_accuracy(spoken, real[other, text]) < 0.9


def test_the_run_folder_holds_everything(workspace: Path) -> None:
    run = workspace / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 251))
    assert {"loss", "code0", "code7", "gradient_norm", "learning_rate", "stop_accuracy", "speed"} <= rows[0].keys()
    assert rows[-1]["loss"] < 0.1 < rows[0]["loss"]
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["steps"] == 250
    assert "parameters learn" in (run / "log.txt").read_text()


def test_the_adapter_is_plain_peft(workspace: Path) -> None:
    base = HiggsAudioV2ForConditionalGeneration.from_pretrained(workspace / "model")
    tuned = PeftModel.from_pretrained(base, str(workspace / "run" / "adapter"))
    assert any("lora_B" in name and p.abs().max() > 0 for name, p in tuned.named_parameters())


def test_a_run_is_never_overwritten(workspace: Path) -> None:
    before = (workspace / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(MynaError, match="already holds a run"):
        myna("train", workspace / "recipe.yaml", "-o", workspace / "run")
    assert (workspace / "run" / "metrics.jsonl").read_bytes() == before


def test_preparing_again_encodes_nothing_new(workspace: Path) -> None:
    output = myna(
        "prepare", workspace / "recordings", "-o", workspace / "prepared", "-m", workspace / "model", "--device", "cpu"
    )
    assert "0 clips were encoded now" in output


def test_render_shows_what_is_learned(workspace: Path) -> None:
    output = myna("render", workspace / "prepared", "-m", workspace / "model", "--id", "robin/robin-1")
    assert "g│o│o│d│ │m" in output
    assert "<|audio_out_bos|>" in output and "code targets" in output


def test_speak_wants_a_text_for_every_voice(workspace: Path) -> None:
    voice = workspace / "recordings" / "robin" / "robin-0.wav"
    texts = ("--reference-text", "one", "--reference-text", "two")
    with pytest.raises(MynaError, match="1 references but 2 reference texts"):
        myna("speak", "hello", "--run", workspace / "run", "--reference", voice, *texts, "-o", workspace / "x.wav")


def test_a_model_is_sampled_as_it_asks_unless_somebody_says_otherwise(workspace: Path, tmp_path: Path) -> None:
    def codes(*extra: object, greedy: bool) -> Codes:
        model = shutil.copytree(workspace / "model", tmp_path / f"model{len(list(tmp_path.iterdir()))}")
        (model / "generation_config.json").write_text(json.dumps({"do_sample": False} if greedy else {}))
        words = [
            "speak",
            "hi",
            "--model",
            model,
            "--max-seconds",
            0.4,
            "--device",
            "cpu",
            "--codes",
            tmp_path / "x.npy",
        ]
        myna(*words, "-o", tmp_path / "x.wav", "--force", *extra)
        return np.asarray(np.load(tmp_path / "x.npy"))

    likeliest = codes("--temperature", 0, greedy=False)
    assert np.array_equal(codes(greedy=True), likeliest)
    assert not np.array_equal(codes(greedy=False), likeliest)
    assert np.array_equal(codes("--temperature", 1, greedy=True), codes(greedy=False))


def test_a_run_opens_from_anywhere(workspace: Path) -> None:
    settings = yaml.safe_load((workspace / "run" / "config.yaml").read_text())
    assert Path(settings["data"]["train"]).is_absolute() and Path(settings["model"]["source"]).is_absolute()


def test_a_dry_run_checks_everything_and_trains_nothing(workspace: Path) -> None:
    output = myna("train", workspace / "recipe.yaml", "-o", workspace / "dry", "--dry-run")
    assert "nothing was trained" in output and "preflight passed" in output
    assert not (workspace / "dry").exists(), "nothing is written"
    assert "g│o│o│d" in (workspace / "run" / "preflight.txt").read_text(), "as a training does"


def test_a_finished_run_is_not_trained_again(workspace: Path) -> None:
    before = (workspace / "run" / "metrics.jsonl").read_bytes()
    assert "is finished" in myna("train", "--resume", workspace / "run")
    assert (workspace / "run" / "metrics.jsonl").read_bytes() == before


def test_train_wants_a_recipe_or_a_run(workspace: Path) -> None:
    for words in ([], [workspace / "recipe.yaml", "--resume", workspace / "run"]):
        with pytest.raises(MynaError, match="give a recipe, or --resume"):
            myna("train", *words)


def test_a_run_does_not_speak_through_another_codec(workspace: Path) -> None:
    save_tiny_codec(workspace / "other-codec", seed=7)
    with pytest.raises(MynaError, match="trained with another codec"):
        speak(workspace, "robin", LINES[0], "--codec", workspace / "other-codec")


def test_a_fully_trained_model_speaks_through_the_codec_of_its_base(workspace: Path) -> None:
    settings = ("adapt.mode=full", "adapt.train_modules=[]", "train.steps=2", "train.learning_rate=1e-4")
    myna(
        "train", workspace / "recipe.yaml", "-o", workspace / "full", *(word for s in settings for word in ("--set", s))
    )
    words = ["speak", "hi", "--run", workspace / "full", "--max-seconds", 0.4, "--temperature", 0, "--device", "cpu"]
    assert "spoken-full.wav" in myna(*words, "-o", workspace / "spoken-full.wav")


def test_nothing_is_written_over_what_is_there(workspace: Path) -> None:
    with pytest.raises(MynaError, match="exists and is not empty"):
        myna("model", "tiny", "-o", workspace / "model")
    before = (workspace / "prepared" / "manifest.jsonl").read_bytes()
    with pytest.raises(MynaError, match="imported over itself"):
        myna("import", workspace / "prepared", "-o", workspace / "prepared")
    assert (workspace / "prepared" / "manifest.jsonl").read_bytes() == before


def test_a_device_that_does_not_exist_is_named(workspace: Path) -> None:
    with pytest.raises(MynaError, match="device `gpu` is not available"):
        myna("speak", "hi", "--model", workspace / "model", "--device", "gpu", "-o", workspace / "x.wav")
