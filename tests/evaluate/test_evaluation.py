"""`myna evaluate` from end to end on a tiny model: what is written, what is kept, and what is said where ears miss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from myna.audio.files import read_audio
from myna.core.errors import ConfigError, OutputError, SpeakError
from myna.core.progress import ProgressCallback, silent
from myna.core.run_folder import Run
from myna.evaluate.evaluation import Evaluation, EvaluationSettings, Subject, evaluate_system, run_metadata
from myna.evaluate.items import load_clip
from myna.evaluate.metrics import BASE, REAL, ROUND_TRIP
from myna.evaluate.pipeline import SpeechSystem, read_item_scores, saved_references
from tests.command_line import run_command
from tests.tone_corpus import LINES, recipe, write_recordings


def evaluate(
    subject: str,
    *,
    against: Sequence[str] = (),
    out: Path | None = None,
    strength: float = 1.0,
    progress: ProgressCallback = silent,
    **settings: Any,
) -> Evaluation:
    return evaluate_system(
        subject, EvaluationSettings(**settings), against=against, out=out, strength=strength, progress=progress
    )


def myna(*words: object) -> str:
    result = run_command([str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two speakers, a tiny model, and a run that has hardly learned anything."""
    folder = tmp_path_factory.mktemp("workspace")
    write_recordings(folder / "recordings")
    myna("model", "tiny", "-o", folder / "model")
    myna("prepare", folder / "recordings", "-o", folder / "prepared", "-m", folder / "model", "--device", "cpu")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(folder, steps=3)))
    myna("train", folder / "recipe.yaml", "-o", folder / "run")
    return folder


@pytest.fixture(scope="module")
def printed(workspace: Path) -> dict[str, Any]:
    words = (
        "--data",
        workspace / "prepared",
        "--limit",
        4,
        "--device",
        "cpu",
        "--language",
        "en",
        "--batch-size",
        3,
        "--json",
    )
    content: dict[str, Any] = json.loads(myna("evaluate", workspace / "run", *words))
    return content


def test_a_run_is_evaluated_with_its_base_and_the_recordings(workspace: Path, printed: dict[str, Any]) -> None:
    assert list(printed["systems"]) == [REAL, ROUND_TRIP, "run", BASE] and list(printed["differences"]) == ["run"]
    out = workspace / "run" / "evaluation"
    assert json.loads((out / "evaluation.json").read_text(encoding="utf-8")) == printed
    assert printed["systems"]["run"]["stop_rate"]["n"] == 4 and printed["systems"][REAL]["stop_rate"]["n"] == 0
    assert "no ASR model was named" in printed["missing"]["wer"]
    assert printed["systems"]["run"]["wer"] == {"mean": None, "low": None, "high": None, "n": 0}
    assert printed["systems"][REAL]["pitch"]["mean"] > 100
    assert printed["metadata"]["run"]["loss"] > 0 and printed["settings"]["seed"] == 0
    rows = read_item_scores(out / "items.parquet")
    assert len(rows) == 16 and all((out / row.audio).is_file() for row in rows if row.audio)
    assert "untuned base" in (out / "report.html").read_text(encoding="utf-8")


def test_references_are_saved_beside_the_speech(workspace: Path, printed: dict[str, Any]) -> None:
    """Named so that they sort beside it, and shown in the page; recordings were given none."""
    assert printed
    out = workspace / "run" / "evaluation"
    settings = EvaluationSettings(data=workspace / "prepared", limit=4, language="en")
    items = settings.eval_set(Subject.parse(str(workspace / "run"))).items
    clips = {item.id: item.references[0] for item in items}
    for row in read_item_scores(out / "items.parquet"):
        beside = saved_references(out / row.audio) if row.audio else []
        assert len(beside) == (row.system in ("run", BASE)), row
        for file in beside:
            expected = load_clip(clips[row.id], 24_000)
            assert np.abs(read_audio(file) - expected).max() < 1e-3
            assert sorted(path.name for path in (*beside, out / row.audio))[-1] == Path(row.audio).name
    assert "<span>reference</span>" in (out / "report.html").read_text(encoding="utf-8")


def test_saved_references_are_replaced_with_their_audio(workspace: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sentences": tmp_path / "list.lst", "device": "cpu", "out": tmp_path / "out"}
    references = []
    for name in ("robin/robin-0.wav", "heron/heron-0.wav"):
        (tmp_path / "list.lst").write_text(f"a|who|{workspace / 'recordings' / name}|hi\n")
        evaluate(str(workspace / "model"), **options)
        [file] = saved_references(tmp_path / "out" / "audio" / "model" / "a.flac")
        references.append(file.read_bytes())
    assert references[0] != references[1]


def test_a_second_evaluation_speaks_nothing_again(
    workspace: Path, printed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpeechSystem, "speak", lambda *_: pytest.fail("everything was said before"))
    run = str(workspace / "run")
    again = evaluate(run, data=workspace / "prepared", limit=4, device="cpu", language="en", batch_size=5)
    assert {**json.loads(json.dumps(again.to_json())), "settings": {}} == {**printed, "settings": {}}


def test_another_seed_gives_other_audio(workspace: Path, printed: dict[str, Any], tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": workspace / "prepared", "limit": 2, "device": "cpu", "seed": 1}
    first = evaluate(str(workspace / "model"), out=tmp_path / "one", **options)
    assert list(first.estimates) == [REAL, ROUND_TRIP, "model"] and first.differences == {}
    other = evaluate(str(workspace / "model"), out=tmp_path / "two", batch_size=1, **options)
    hashes = [[row.audio_hash for row in one.rows["model"]] for one in (first, other)]
    assert hashes[0] == hashes[1], "the same lines with the same seed, one by one"
    before = {
        row.id: row.audio_hash for row in read_item_scores(workspace / "run" / "evaluation" / "items" / "base.parquet")
    }
    assert printed and not {row.audio_hash for row in first.rows["model"]} & set(before.values())


def test_sentences_of_a_file_and_systems_against_one_another(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(LINES), encoding="utf-8")
    shown = myna(
        *(
            "evaluate",
            workspace / "run",
            "--sentences",
            tmp_path / "lines.txt",
            "--against",
            f"twin={workspace / 'run'}",
        ),
        *("--device", "cpu", "--out", tmp_path / "out"),
    )
    printed = json.loads((tmp_path / "out" / "evaluation.json").read_text(encoding="utf-8"))
    assert list(printed["systems"]) == [REAL, ROUND_TRIP, "run", BASE, "twin"]
    assert printed["systems"]["twin"] == printed["systems"]["run"] and printed["items"] == 2
    assert "not measured" in shown and "report.html" in shown
    beside = myna(
        *(
            "evaluate",
            f"one={workspace / 'model'}",
            "--sentences",
            tmp_path / "lines.txt",
            "--against",
            workspace / "model",
        ),
        *("--device", "cpu", "--out", tmp_path / "beside"),
    )
    assert "equal to the base" in beside, "the first that stands against a model is what it is measured by"


def test_strength_scales_the_evaluated_run(workspace: Path, printed: dict[str, Any], tmp_path: Path) -> None:
    """A run at strength 0 speaks like its base, and at strength 0.5 differently than at 1."""

    def said(strength: float) -> dict[str, dict[str, str]]:
        against, out = (f"all={workspace / 'run'}",), tmp_path / str(strength)
        evaluation = evaluate(
            str(workspace / "run"),
            data=workspace / "prepared",
            against=against,
            out=out,
            limit=2,
            device="cpu",
            strength=strength,
        )
        assert (
            evaluation.to_json()["metadata"]["run"]["strength"] == strength
            and "strength" not in printed["metadata"]["run"]
        )
        return {name: {row.id: row.audio_hash for row in rows} for name, rows in evaluation.rows.items()}

    none, half = said(0.0), said(0.5)
    assert none["run"] == none[BASE] != none["all"] == half["all"]
    assert half["run"] not in (half[BASE], half["all"])
    with pytest.raises(SpeakError, match="scales the LoRA of a run"):
        evaluate(str(workspace / "model"), data=workspace / "prepared", device="cpu", strength=0.5)


def test_an_evaluation_without_items_or_with_a_reserved_name_is_refused(workspace: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to say"):
        evaluate(str(workspace / "run"), device="cpu")
    with pytest.raises(ConfigError, match="cannot be called base"):
        evaluate(f"base={workspace / 'model'}", data=workspace / "prepared", device="cpu")


def test_the_loss_of_a_run_is_that_of_its_best_evaluation(workspace: Path, tmp_path: Path) -> None:
    run = Run.open(workspace / "run")
    assert set(run_metadata(run)) == {"run", "model", "loss"}
    moved = Run(tmp_path, run.recipe)
    rows = [
        {"step": 0, "evaluation": {"loss": 5.0}},
        {"step": 1, "loss": 4.5},
        {"step": 2, "evaluation": {"loss": 4.0}},
    ]
    moved.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert (run_metadata(moved)["loss"], run_metadata(moved)["base_loss"]) == (4.0, 5.0)
    rows += [{"step": 3, "evaluation": {"loss": 4.2}}, {"step": 3, "speech_eval": {"best_step": 3}}]
    moved.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert run_metadata(moved)["loss"] == 4.2, "that of the one that was heard best"


def test_a_split_is_evaluated_on_its_held_out_items(workspace: Path, tmp_path: Path) -> None:
    shown = " ".join(myna("split", workspace / "prepared", "--texts", 1).split())
    assert "subsets/train: 4 utterances" in shown and "subsets/held_out_texts: 2 utterances" in shown
    held_out = workspace / "prepared" / "subsets" / "held_out_texts"
    evaluation = evaluate(str(workspace / "model"), data=held_out, device="cpu", out=tmp_path)
    assert len({row.text for row in evaluation.rows["model"]}) == 1
    assert any("2 items are spoken without a reference" in note for note in evaluation.notes)


def test_two_processes_do_not_evaluate_into_one_folder(workspace: Path, tmp_path: Path) -> None:
    left = tmp_path / "out" / "items" / ".0123456789ab.tmp"
    asked: dict[str, Any] = {"data": workspace / "prepared", "limit": 1, "device": "cpu", "out": tmp_path / "out"}

    def second(*_: object) -> None:
        if left.exists():
            return
        with pytest.raises(OutputError, match="another process is evaluating into"):
            evaluate(str(workspace / "run"), **asked)
        left.parent.mkdir(exist_ok=True)
        left.touch()  # of a process that is killed

    evaluate(str(workspace / "run"), **asked, progress=second)
    assert left.is_file()
    evaluate(str(workspace / "run"), **asked)
    assert not left.exists()
