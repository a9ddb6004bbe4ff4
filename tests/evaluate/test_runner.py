"""`myna evaluate` from end to end on a tiny model: what is written, what is kept, and what is said where ears miss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from myna.cli import app
from myna.errors import ConfigError, SpeakError
from myna.evaluate.results import read_rows
from myna.evaluate.runner import Asked, about_run, evaluate
from myna.evaluate.speech_system import SpeechSystem
from myna.evaluate.systems import BASE, REAL, ROUND_TRIP
from myna.train.run import Run
from tests.birds import LINES, recipe, record

QUIET = Console(quiet=True)


def myna(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two birds, a tiny model, and a run that has hardly learned anything."""
    folder = tmp_path_factory.mktemp("house")
    record(folder / "recordings")
    myna("model", "tiny", "-o", folder / "model")
    myna("prepare", folder / "recordings", "-o", folder / "prepared", "-m", folder / "model", "--device", "cpu")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(folder, steps=3)))
    myna("train", folder / "recipe.yaml", "-o", folder / "run")
    return folder


@pytest.fixture(scope="module")
def told(house: Path) -> dict[str, Any]:
    words = ("--data", house / "prepared", "--limit", 4, "--device", "cpu", "--language", "en", "--batch", 3, "--json")
    printed: dict[str, Any] = json.loads(myna("evaluate", house / "run", *words))
    return printed


def test_a_run_stands_beside_its_base_and_the_real_recordings(house: Path, told: dict[str, Any]) -> None:
    assert list(told["systems"]) == [REAL, ROUND_TRIP, "run", BASE] and list(told["deltas"]) == ["run"]
    out = house / "run" / "evaluation"
    assert json.loads((out / "evaluation.json").read_text(encoding="utf-8")) == told
    assert told["systems"]["run"]["stop_rate"]["n"] == 4 and told["systems"][REAL]["stop_rate"]["n"] == 0
    assert "no recogniser was named" in told["missing"]["wer"]
    assert told["systems"]["run"]["wer"] == {"mean": None, "low": None, "high": None, "n": 0}
    assert told["systems"][REAL]["pitch"]["mean"] > 100
    assert told["about"]["run"]["loss"] > 0 and told["asked"]["seed"] == 0
    rows = read_rows(out / "lines.parquet")
    assert len(rows) == 16 and all((out / row.sound).is_file() for row in rows if row.sound)
    assert "untuned base" in (out / "report.html").read_text(encoding="utf-8")


def test_run_again_it_has_nothing_to_say(house: Path, told: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeechSystem, "speak", lambda *_: pytest.fail("everything was said before"))
    asked = Asked(str(house / "run"), house / "prepared", limit=4, device="cpu", language="en", batch=5)
    again = json.loads(json.dumps(evaluate(asked, QUIET).to_json()))
    assert {**again, "asked": {}} == {**told, "asked": {}}


def test_another_seed_says_it_otherwise(house: Path, told: dict[str, Any], tmp_path: Path) -> None:
    asked = Asked(str(house / "model"), house / "prepared", limit=2, device="cpu", seed=1, out=tmp_path / "one")
    first = evaluate(asked, QUIET)
    assert list(first.systems) == [REAL, ROUND_TRIP, "model"] and first.deltas == {}
    other = Asked(
        str(house / "model"), house / "prepared", limit=2, device="cpu", seed=1, out=tmp_path / "two", batch=1
    )
    hashes = [[row.sound_hash for row in one.judged.rows["model"]] for one in (first, evaluate(other, QUIET))]
    assert hashes[0] == hashes[1], "the same lines with the same seed, one by one"
    before = {row.id: row.sound_hash for row in read_rows(house / "run" / "evaluation" / "lines" / "base.parquet")}
    assert told and not {row.sound_hash for row in first.judged.rows["model"]} & set(before.values())


def test_lines_of_a_file_and_models_against_one_another(house: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(LINES), encoding="utf-8")
    shown = myna(
        *("evaluate", house / "run", "--lines", tmp_path / "lines.txt", "--against", f"twin={house / 'run'}"),
        *("--device", "cpu", "--out", tmp_path / "out"),
    )
    told = json.loads((tmp_path / "out" / "evaluation.json").read_text(encoding="utf-8"))
    assert list(told["systems"]) == [REAL, ROUND_TRIP, "run", BASE, "twin"]
    assert told["systems"]["twin"] == told["systems"]["run"] and told["lines"] == 2
    assert "not measured" in shown and "report.html" in shown
    beside = myna(
        *("evaluate", f"one={house / 'model'}", "--lines", tmp_path / "lines.txt", "--against", house / "model"),
        *("--device", "cpu", "--out", tmp_path / "beside"),
    )
    assert "equal to the base" in beside, "the first that stands against a model is what it is measured by"


def test_a_run_is_judged_as_it_will_be_spoken_with(house: Path, told: dict[str, Any], tmp_path: Path) -> None:
    """With none of its LoRA it says what its base says, and with half of it something else than with all."""

    def said(strength: float) -> dict[str, dict[str, str]]:
        against, out = (f"all={house / 'run'}",), tmp_path / str(strength)
        asked = Asked(
            str(house / "run"), house / "prepared", None, against, out, limit=2, device="cpu", strength=strength
        )
        summary = evaluate(asked, QUIET)
        assert summary.to_json()["about"]["run"]["strength"] == strength and "strength" not in told["about"]["run"]
        return {name: {row.id: row.sound_hash for row in rows} for name, rows in summary.judged.rows.items()}

    none, half = said(0.0), said(0.5)
    assert none["run"] == none[BASE] != none["all"] == half["all"]
    assert half["run"] not in (half[BASE], half["all"])
    with pytest.raises(SpeakError, match="of what a run has learned"):
        evaluate(Asked(str(house / "model"), house / "prepared", device="cpu", strength=0.5), QUIET)


def test_what_cannot_be_judged_is_told(house: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to say"):
        evaluate(Asked(str(house / "run"), device="cpu"), QUIET)
    with pytest.raises(ConfigError, match="cannot be called base"):
        evaluate(Asked(f"base={house / 'model'}", house / "prepared", device="cpu"), QUIET)


def test_the_loss_of_a_run_is_that_of_its_best_evaluation(house: Path, tmp_path: Path) -> None:
    run = Run.open(house / "run")
    assert set(about_run(run)) == {"run", "model", "loss"}
    moved = Run(tmp_path, run.recipe)
    rows = [
        {"step": 0, "evaluation": {"loss": 5.0}},
        {"step": 1, "loss": 4.5},
        {"step": 2, "evaluation": {"loss": 4.0}},
    ]
    moved.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert (about_run(moved)["loss"], about_run(moved)["base_loss"]) == (4.0, 5.0)
    rows += [{"step": 3, "evaluation": {"loss": 4.2}}, {"step": 3, "speech_eval": {"best_step": 3}}]
    moved.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert about_run(moved)["loss"] == 4.2, "that of the one that was heard best"


def test_a_split_is_judged_by_what_it_held_out(house: Path, tmp_path: Path) -> None:
    shown = " ".join(myna("split", house / "prepared", "--texts", 1).split())
    assert "parts/train: 4 utterances" in shown and "parts/held_out_texts: 2 utterances" in shown
    held_out = house / "prepared" / "parts" / "held_out_texts"
    asked = Asked(str(house / "model"), held_out, device="cpu", out=tmp_path)
    summary = evaluate(asked, QUIET)
    assert len({row.text for row in summary.judged.rows["model"]}) == 1
    assert any("2 lines are spoken without a reference" in note for note in summary.judged.plan.notes)
