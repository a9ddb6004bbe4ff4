"""Whisper by transformers, with a small random model of the real class: chosen by its files, refused if it does not
fit, and with equal texts alone and in a batch."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, EncoderDecoderCache

from myna.audio.files import Samples
from myna.core.errors import CheckpointError, ModelError
from myna.evaluate.scoring import Scorers
from myna.listen import models
from myna.listen.asr import ASR, Transcript, is_transformers_whisper
from tests.evaluate.tiny_scorers import LETTERS, save_whisper

RATE = 16_000


def tone(pitch: float, seconds: float = 1.0) -> Samples:
    return np.asarray(0.3 * np.sin(2 * np.pi * pitch * np.arange(int(seconds * RATE)) / RATE), np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """Copy of the folder that a test may damage."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture(autouse=True)
def without_faster_whisper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faster_whisper", None)


def test_a_folder_of_transformers_is_known_by_its_files(folder: Path) -> None:
    asr = ASR.open(str(folder))
    assert asr.name.startswith("transformers ") and folder.name in asr.name
    transcript = asr.transcribe(tone(300), RATE, "en")
    assert transcript.text and set(transcript.text) <= set(LETTERS)
    assert transcript == asr.transcribe(tone(300), RATE, "en"), "no dice"
    assert asr.transcribe(np.zeros(RATE, np.float32), RATE, "en") == Transcript("", looped=False)


def test_where_both_makes_lie_together_the_prefix_decides(copy: Path) -> None:
    assert is_transformers_whisper(copy)
    (copy / "model.bin").touch()
    assert not is_transformers_whisper(copy)
    assert ASR.open(f"transformers:{copy}").name.startswith("transformers ")


def test_company_changes_nothing(folder: Path) -> None:
    asr = ASR.open(str(folder), workers=4)
    clips = [tone(pitch, seconds) for pitch in (150, 700, 2500) for seconds in (0.4, 1.9, 2.7)]
    alone = [asr.transcribe(clip, RATE, "en") for clip in clips]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda clip: asr.transcribe(clip, RATE, "en"), clips))
    assert together == alone and len({heard.text for heard in alone}) > 1


def test_more_than_a_window_is_transcribed_to_its_end_and_loops_are_marked(folder: Path) -> None:
    asr = ASR.open(str(folder))
    short, long = (asr.transcribe(tone(300, seconds), RATE, "en") for seconds in (1.0, 9.0))
    assert len(long.text) >= 3 * len(short.text)
    assert long.looped and not short.looped, "a random model goes round in circles"


def test_beams_of_five_and_the_language_that_was_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asr = ASR.open(str(folder))
    model, calls = asr._model, []
    generate = model.generate

    def spy(**options: Any) -> Any:
        calls.append(options)
        return generate(**options)

    monkeypatch.setattr(model, "generate", spy)
    for language in ("ar", None):
        asr.transcribe(tone(300), RATE, language)
    assert [call["language"] for call in calls] == ["ar", None]
    assert all(call["num_beams"] == 5 and call["do_sample"] is False and call["task"] == "transcribe" for call in calls)
    with pytest.raises(ModelError, match="does not know the language vi, but ar, en"):
        asr.transcribe(tone(300), RATE, "vi")
    model.generation_config.is_multilingual = False
    asr.transcribe(tone(300), RATE, "vi")
    assert "language" not in calls[-1], "an English Whisper is not calls for a language"


def test_reordering_beams_moves_their_own_cache_only(folder: Path) -> None:
    ours, theirs = ASR.open(str(folder)), ASR.open(str(folder))
    del theirs._model._reorder_cache
    for pitch in (150, 700, 2500):
        assert ours.transcribe(tone(pitch), RATE, "en") == theirs.transcribe(tone(pitch), RATE, "en")
    written, heard = DynamicCache(), DynamicCache()
    numbers = torch.arange(5.0).view(5, 1, 1, 1)
    for cache in (written, heard):
        cache.update(numbers, numbers, 0)
    same = heard.layers[0].keys
    moved = ours._model._reorder_cache(EncoderDecoderCache(written, heard), torch.tensor([4, 4, 0, 1, 2]))
    assert moved.self_attention_cache.layers[0].keys.flatten().tolist() == [4, 4, 0, 1, 2]
    assert moved.cross_attention_cache.layers[0].keys is same, "it is not copied"


def test_what_does_not_fit_is_refused(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    name = "model.encoder.layers.0.fc1.weight"
    save_file({key: value for key, value in weights.items() if key != name}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.encoder\.layers\.0\.fc1\.weight"):
        ASR.open(str(copy))
    torch.save(weights, copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="pickles"):
        ASR.open(str(copy))
    save_file(weights, copy / "model.safetensors")
    (copy / "preprocessor_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be opened"):
        ASR.open(str(copy))
    (copy / "generation_config.json").unlink()
    with pytest.raises(ModelError, match=r"no generation_config\.json"):
        ASR.open(str(copy))
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json or vocab\.json"):
        ASR.open(str(copy))
    (copy / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ModelError, match="of the kind bert"):
        ASR.open(str(copy))


def test_another_ones_weights_have_another_name(folder: Path, tmp_path: Path) -> None:
    other = save_whisper(tmp_path / folder.name, seed=1)
    assert ASR.open(str(folder)).name != ASR.open(str(other)).name


def test_a_hub_out_of_reach_is_told_in_the_column(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[tuple[str, list[str]]] = []

    def unreachable(repository: str, allow_patterns: list[str]) -> str:
        wanted.append((repository, allow_patterns))
        raise OSError("no route to the hub")

    monkeypatch.setattr(models, "snapshot_download", unreachable)
    scorers = Scorers.open("transformers:base")
    assert scorers.asr is None and "openai/whisper-base" in scorers.missing["asr"]
    assert "no route to the hub" in scorers.missing["asr"] and "hf download" in scorers.missing["asr"]
    Scorers.open("someone/whisper-tuned")
    assert [repository for repository, _ in wanted] == ["openai/whisper-base", "someone/whisper-tuned"]
    assert not any(pattern.endswith((".pt", ".ckpt", "pytorch_model.bin")) for _, files in wanted for pattern in files)


def test_a_name_on_the_hub_is_opened_by_what_was_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "snapshot_download", lambda *_, **__: str(folder))
    assert ASR.open("someone/whisper-tuned").name.startswith("transformers ")
