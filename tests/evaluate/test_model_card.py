"""Model cards: written with every run, rewritten when it is evaluated, and never a reason for a run to fail."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import myna
from myna.core.io import file_sha256, save_text
from myna.data.dataset import DictionaryColumn
from myna.evaluate import model_card
from myna.evaluate.model_card import CARD_FILE, base_license, speaker_rows, write_model_card
from tests.tone_corpus import recipe, write_recordings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> myna.Run:
    folder = tmp_path_factory.mktemp("card")
    write_recordings(folder / "recordings")
    myna.make_tiny(folder / "model")
    data = myna.prepare(folder / "recordings", folder / "prepared", model=str(folder / "model"), device="cpu")
    return myna.train(recipe(folder), data=data, steps=1, out=folder / "run")


def card(run: myna.Run) -> str:
    return (run.result / CARD_FILE).read_text()


def test_every_run_has_a_model_card(run: myna.Run) -> None:
    text = card(run)
    assert text.startswith("---\nbase_model: model\nlibrary_name: peft\n")
    assert file_sha256(run.adapter / "adapter_model.safetensors") in text
    assert "2 speakers" in text
    assert "| robin |" in text
    assert "No consent of 2 of 2 speakers is on record" in text
    assert "Not evaluated yet: `myna evaluate run`" in text
    assert "licence of the base `model` is not known" in text
    assert "myna detect out.wav" in text
    assert str(run.folder.parent) not in text, "where it lies is nobody else's business"


@pytest.mark.parametrize("clips", [0, 1, 5, 2000])
def test_speakers_are_counted_with_clips_and_hours(clips: int) -> None:
    draw = np.random.default_rng(clips)
    speakers, languages = draw.integers(0, 50, clips, np.int32), draw.integers(0, 3, clips, np.int32)
    frames, is_target = draw.integers(1, 500, clips, np.int32), draw.integers(0, 2, clips, np.uint8)
    has_answer = draw.random(clips) < 0.02
    names, codes = [f"s{index}" for index in range(50)], ["en", "ar", "vi"]
    table: Any = SimpleNamespace(
        speaker=DictionaryColumn(speakers, pa.array(names)),
        language=DictionaryColumn(languages, pa.array(codes)),
        frames=frames,
        is_target=is_target,
        has_answer=has_answer,
    )
    rows = {row["speaker"]: row for row in speaker_rows(table, 25.0)}
    counted = [index for index in range(clips) if is_target[index] or has_answer[index]]
    assert sum(row["clips"] for row in rows.values()) == len(counted)
    for speaker, row in rows.items():
        own = [index for index in counted if names[speakers[index]] == speaker]
        spoken = Counter(codes[languages[index]] for index in own)
        assert spoken[row["language"]] == max(spoken.values())
        assert row["clips"] == len(own)
        assert row["hours"] == pytest.approx(sum(int(frames[index]) for index in own) / 25 / 3600)
        assert row["answers"] == any(has_answer[index] for index in own)


def test_consents_of_stored_voices(run: myna.Run) -> None:
    write_model_card(run, {"robin": "cons_1", "nobody": "cons_2"})
    assert "- robin: `cons_1`" in card(run)
    assert "No consent of 1 of 2 speakers" in card(run)
    assert "cons_2" not in card(run)


def test_scores_with_intervals(run: myna.Run) -> None:
    score = {"mean": 0.048, "low": 0.031, "high": 0.07, "n": 30}
    found = {
        "model": "run",
        "items": 30,
        "scorers": {"asr": "whisper-base"},
        "systems": {"run": {"wer": score}, "base": {"wer": {**score, "mean": 0.2}}, "round_trip": {}},
        "warnings": ["2 items were trained on"],
    }
    (run.folder / "evaluation").mkdir()
    (run.folder / "evaluation" / "evaluation.json").write_text(json.dumps(found))
    write_model_card(run, {})
    assert "| | this | its base |" in card(run)
    assert "| word errors | 4.8 % (3.1 % to 7.0 %) | 20.0 % (3.1 % to 7.0 %) |" in card(run)
    assert "**2 items were trained on**" in card(run)
    (run.folder / "evaluation" / "evaluation.json").write_text('{"torn')
    write_model_card(run, {})
    assert "The evaluation cannot be read" in card(run) and "evaluation.json" in card(run)
    shutil.rmtree(run.folder / "evaluation")


def test_missing_training_data_is_called_unknown(run: myna.Run, tmp_path: Path) -> None:
    moved = run.recipe.data.train.rename(tmp_path / "moved")
    write_model_card(run, {})
    assert "could not be read" in card(run)
    assert "No consent of any speaker" in card(run)
    moved.rename(run.recipe.data.train)


def test_an_unwritable_card_does_not_fail_the_run(run: myna.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_card, "save_text", full)
    again = myna.train(run.recipe, steps=1, out=run.folder.parent / "again")
    assert again.is_finished
    assert not (again.result / CARD_FILE).exists()
    assert "no model card was written: [Errno 28]" in (again.folder / "log.txt").read_text()


def test_weights_and_card_appear_together(run: myna.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between them would leave a finished run without a card."""
    out, seen = run.folder.parent / "together", []

    def save_and_look(file: Path, text: str) -> None:
        save_text(file, text)
        seen.append((out / run.result.name).exists())

    monkeypatch.setattr(model_card, "save_text", save_and_look)
    assert "Its weights have the sha256" in card(myna.train(run.recipe, steps=1, out=out))
    assert seen == [False]


def test_licence_of_a_base_by_its_own_card(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / CARD_FILE).write_text("---\nlanguage: en\nlicense: cc-by-nc-4.0\n---\n# A model\n")
    assert base_license(str(tmp_path)) == "cc-by-nc-4.0"
    (tmp_path / CARD_FILE).write_text("# A model\nlicense: none\n")
    assert base_license(str(tmp_path)) == ""
    assert base_license("fledgling") == "apache-2.0"
    assert base_license("/nowhere/at/all") == ""
