"""A run that is heard while it learns: what is heard decides, leaves no trace in what is learned, and is remembered."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from myna import resume, train
from myna.core.errors import ConfigError, DataError, TrainingError
from myna.core.run_folder import Run, checkpoint_folder
from myna.evaluate.callback import open_required_scorers
from myna.evaluate.evaluation import EvaluationSettings, evaluate_system
from myna.evaluate.pipeline import read_item_scores
from myna.evaluate.scoring import Scorers
from myna.models import save_tiny_model
from myna.models.ref import ModelRef
from myna.speak.loading import load_engine
from myna.speak.request import SpeechRequest
from myna.train import loop
from myna.train.checkpoint import CheckpointManager
from myna.train.trainer import Trainer
from tests.evaluate.scripted_scorers import ScriptedScorers, scripted_scorers
from tests.train.resume_helper import contents, make_workspace, metrics, recipe_for

Learn = Callable[..., Run]
FAST = {"learning_rate": 0.3, "schedule": "constant", "steps": 30, "evaluate_every": 10}
"""The evaluation loss falls from step 10 to step 30."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("workspace"))


@pytest.fixture(autouse=True)
def no_preflight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the preflight, which these tests do not need."""
    monkeypatch.setattr(loop, "run_preflight", lambda *_, **__: None)


@pytest.fixture
def learn(workspace: Path, tmp_path: Path) -> Learn:
    """Train six steps with an evaluation at every second, heard as `scorers` say, or by nobody."""

    def run_once(scorers: ScriptedScorers | None, name: str = "run", **changes: dict[str, Any]) -> Run:
        speech_eval = {"asr": "planted", "limit": 3, "min_stop_rate": 0.0} if scorers is not None else {}
        changes["train"] = {"steps": 6, "evaluate_every": 2} | changes.get("train", {})
        changes["data"] = {"evaluation": str(workspace / "evaluation")} | changes.get("data", {})
        changes["speech_eval"] = speech_eval | changes.get("speech_eval", {})
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe_for(workspace, **changes).model_dump(mode="json")))
        with scripted_scorers(scorers or ScriptedScorers(workspace)):
            run = train(path, out=tmp_path / name)
        assert run is not None
        return run

    return run_once


def rows(run: Run, kind: str) -> dict[int, dict[str, Any]]:
    told = map(json.loads, run.metrics.read_text().splitlines())
    return {row["step"]: row[kind] for row in told if kind in row}


def learned(run: Run) -> list[str]:
    return [line for line in metrics(run.folder) if "speech_eval" not in json.loads(line)]


def log(run: Run) -> str:
    return (run.folder / "log.txt").read_text()


# Nothing that is learned depends on it


EVERYTHING = {
    "adapt": {"dropout": 0.2, "train_modules": ["audio_head"]},
    "train": {"ema_decay": 0.9, "keep_checkpoints": 9},
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(EVERYTHING, id="dropout and running means"),
        pytest.param({"train": {"precision": "bf16"}}, id="folded, in two types"),
        pytest.param({"model": {"quantization": "int8"}}, id="frozen in fewer bits"),
        pytest.param({"adapt": {"mode": "full", "rank": 16, "alpha": 32}}, id="full"),
    ],
)
def test_speech_evaluation_does_not_change_the_training(learn: Learn, workspace: Path, changes: dict[str, Any]) -> None:
    changes = changes | {"train": changes.get("train", {}) | {"steps": 4, "keep_checkpoints": 9}}
    heard, unheard = learn(ScriptedScorers(workspace), "heard", **changes), learn(None, "unheard", **changes)
    assert set(rows(heard, "speech_eval")) == {0, 2, 4} and rows(unheard, "speech_eval") == {}
    assert learned(heard) == metrics(unheard.folder), "losses to the last digit"
    for step in (2, 4):
        states = [checkpoint_folder(run, step) / "state.safetensors" for run in (heard, unheard)]
        assert states[0].read_bytes() == states[1].read_bytes(), "weights, moments, means and random states"


def test_samples_are_spoken_and_kept_without_a_recognizer(learn: Learn, workspace: Path) -> None:
    """They are for listening: nothing is scored, the loss chooses, and a resumed run goes on with them."""
    samples = {"data": str(workspace / "evaluation"), "limit": 2}
    run, silent = learn(None, "spoken", speech_eval=samples), learn(None, "silent")
    assert metrics(run.folder) == metrics(silent.folder) and "speech_eval" not in run.metrics.read_text()
    for step in (0, 2, 4, 6):
        spoken = run.folder / "speech_eval" / f"step-{step:06d}"
        scores = read_item_scores(spoken / "items.parquet")
        assert len(scores) == 2 and all((spoken / row.audio).is_file() for row in scores if row.audio)
        assert all(row.transcript is None and row.similarity is None for row in scores)
    page = run.folder / "speech_eval" / "report.html"
    assert "step 6" in page.read_text() and f"listen to it: {page}" in log(run)
    assert not (run.folder / "best").exists()
    resume(run, settings={"train.steps": 8})
    assert (run.folder / "speech_eval" / "step-000008").is_dir()


def test_every_step_speaks_the_same_items_with_the_saved_weights(learn: Learn, workspace: Path) -> None:
    """The audio of a step in training equals what its checkpoint speaks later, also with averaged weights."""
    run = learn(ScriptedScorers(workspace), **EVERYTHING)
    heard = {
        step: read_item_scores(run.folder / "speech_eval" / f"step-{step:06d}" / "items.parquet") for step in (0, 4, 6)
    }
    assert [row.id for row in heard[0]] == [row.id for row in heard[4]] and len(heard[0]) == 2
    assert all(row.audio_hash != before.audio_hash for row, before in zip(heard[6], heard[0], strict=True))
    checkpoint = str(checkpoint_folder(run, 4))
    evaluation = evaluate_system(
        checkpoint, EvaluationSettings(data=workspace / "evaluation", limit=3, device="cpu"), out=run.folder / "again"
    )
    again = {row.id: row for row in evaluation.rows["step-000004"]}
    assert [again[row.id].audio_hash for row in heard[4]] == [row.audio_hash for row in heard[4]]


# What is heard decides


def test_the_best_checkpoint_is_chosen_by_speech_and_not_by_loss(learn: Learn, workspace: Path) -> None:
    run = learn(ScriptedScorers(workspace, similarity={10: 0.55, 20: 0.8, 30: 0.6}), train=FAST)
    losses = {step: row["loss"] for step, row in rows(run, "evaluation").items()}
    assert losses[20] > min(losses.values()), "the test needs a loss that would have chosen another"
    assert [row["best_step"] for row in rows(run, "speech_eval").values()] == [None, 10, 20, 20]
    best = Run.open(run.folder / "best")
    assert contents(best.adapter) == contents(checkpoint_folder(run, 20) / "adapter")
    assert contents(run.adapter) == contents(best.adapter), "and it is what the run gives"
    assert "step 20 is the best: score" in log(run)


def test_only_each_new_best_speaks_the_confirmation_items(learn: Learn, workspace: Path) -> None:
    scorers = ScriptedScorers(workspace, similarity={2: 0.8, 4: 0.6, 6: 0.9})
    run = learn(scorers, speech_eval={"limit": 4})
    assert "2 items of 2 speakers choose the best checkpoint, 2 others confirm its gain" in log(run)
    heard = rows(run, "speech_eval")
    assert [row["best_step"] for row in heard.values()] == [None, 2, 2, 6]
    assert {step: row.get("confirmed_gain") for step, row in heard.items()} == {
        0: None,
        2: pytest.approx(0.3, abs=0.05),
        4: None,
        6: pytest.approx(0.4, abs=0.05),
    }
    folders = {path.parent.name for path in (run.folder / "speech_eval").glob("*/confirmation")}
    assert folders == {"step-000000", "step-000002", "step-000006"}
    both = [
        read_item_scores(run.folder / "speech_eval" / "step-000006" / folder / "items.parquet")
        for folder in ("", "confirmation")
    ]
    assert not {row.id for row in both[0]} & {row.id for row in both[1]} and len(both[1]) == 2
    assert "on 2 items that chose nothing" in log(run) and "12 are needed in any case" in log(run)
    assert "over the base, on items that chose nothing" in (run.folder / "speech_eval" / "report.html").read_text()


def test_best_and_checkpoints_are_loaded_like_a_run(learn: Learn, workspace: Path) -> None:
    run = learn(ScriptedScorers(workspace, similarity={2: 0.8}))
    said = {}
    for name in ("", "best", "checkpoints/step-000002", "checkpoints/step-000006"):
        engine = load_engine(ModelRef.find_trained(run.folder / name), device="cpu")
        # Equal noise makes like models choose alike: one frame in a hundred tells these two apart.
        speeches = engine.speak([SpeechRequest("hello", id=str(take), max_seconds=4.0) for take in range(8)])
        said[name] = b"".join(speech.codes.tobytes() for speech in speeches)
    assert said["best"] == said[""] == said["checkpoints/step-000002"] != said["checkpoints/step-000006"]
    facts = run.folder / "best" / "state.json"
    text = facts.read_text().replace('"codec": "', '"codec": "another ')
    facts.unlink()  # it has a second name among the checkpoints
    facts.write_text(text)
    with pytest.raises(Exception, match="was trained with another codec"):
        load_engine(ModelRef.find_trained(run.folder / "best"), device="cpu")


def test_a_run_without_a_gain_is_reported_as_such(learn: Learn, workspace: Path) -> None:
    run = learn(ScriptedScorers(workspace))
    assert "no gain over the base model is confirmed; step" in log(run) and "likely reasons: " in log(run)
    page = (run.folder / "speech_eval" / "report.html").read_text()
    assert "No gain over the base model is confirmed" in page
    worse = learn(ScriptedScorers(workspace, similarity={2: 0.3, 4: 0.2, 6: 0.1}), "worse")
    assert "training has made it worse" in log(worse) and "it was best at first" in log(worse)


@pytest.mark.parametrize("setting", ["data", "forgetting_data"])
def test_items_that_are_trained_on_do_not_choose_a_checkpoint(
    learn: Learn, workspace: Path, tmp_path: Path, setting: str
) -> None:
    shutil.copytree(workspace / "prepared", tmp_path / "again")
    with pytest.raises(
        DataError, match=rf"3 of 3 items of `speech_eval.{setting}` are trained on too \(3 with the same"
    ):
        learn(ScriptedScorers(workspace), speech_eval={setting: str(tmp_path / "again")})


@pytest.mark.slow
def test_a_checkpoint_worse_on_the_forgetting_set_is_not_the_best(learn: Learn, workspace: Path) -> None:
    scorers = ScriptedScorers(workspace, similarity={2: 0.6, 4: 0.9, 6: 0.7}, forgetting_similarity={4: 0.3})
    run = learn(scorers, speech_eval={"forgetting_data": str(workspace / "evaluation")})
    heard = rows(run, "speech_eval")
    assert heard[4]["forgetting_change"] == pytest.approx(-0.2, abs=0.03) and heard[4]["forgetting_high"] < 0
    assert [row["best_step"] for row in heard.values()] == [None, 2, 2, 6]
    [violation] = heard[4]["violations"]
    assert "it has become worse at the forgetting set" in violation
    assert f"step 4 has the score {heard[4]['score']:.3f} and cannot be the best: {violation}" in log(run)
    assert "become worse at the forgetting set" in (run.folder / "speech_eval" / "report.html").read_text()
    assert len(read_item_scores(run.folder / "speech_eval" / "step-000004" / "forgetting" / "items.parquet")) == 3
    without_set = learn(ScriptedScorers(workspace, similarity=scorers.similarity), "without_set")
    assert rows(without_set, "speech_eval")[6]["best_step"] == 4, "without a forgetting set it would have been"


def test_no_checkpoint_below_a_constraint_is_the_best(learn: Learn, workspace: Path) -> None:
    run = learn(ScriptedScorers(workspace, similarity={2: 0.6, 4: 0.9}, quality={4: 2.4}))
    assert rows(run, "speech_eval")[6]["best_step"] == 2
    assert "its DistillMOS is 2.40, and 2.50 is required" in log(run)
    none = learn(ScriptedScorers(workspace, similarity={2: 0.9}), "none", speech_eval={"min_mos": 3.5, "patience": 1})
    assert not (none.folder / "best").exists() and max(rows(none, "speech_eval")) == 6, (
        "nobody loses patience before a first"
    )
    assert contents(none.adapter) == contents(checkpoint_folder(none, 6) / "adapter")
    assert "no checkpoint may be called the best, so the last one is the result" in log(none)


# Stopping early, and going on


def test_early_stopping_follows_the_speech_score(learn: Learn, workspace: Path) -> None:
    run = learn(
        ScriptedScorers(workspace, similarity={2: 0.6, 4: 0.8}), train={"steps": 40}, speech_eval={"patience": 2}
    )
    assert list(rows(run, "speech_eval")) == [0, 2, 4, 6, 8]
    assert "no better evaluation since step 4: stopping early" in log(run)
    assert contents(run.adapter) == contents(checkpoint_folder(run, 4) / "adapter")


@pytest.mark.slow
def test_a_resumed_run_keeps_its_speech_scores(
    learn: Learn, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorers = {2: 0.6, 4: 0.8, 6: 0.7, 8: 0.75}
    how: dict[str, Any] = {
        "train": {"steps": 40, "save_every": 3, "keep_checkpoints": 1},
        "speech_eval": {"patience": 3},
    }
    whole = learn(ScriptedScorers(workspace, similarity=scorers), "whole", **how)
    count = iter(range(1, 100))
    once = Trainer.train_step

    def dies_in_step_7(*arguments: Any) -> Any:
        if next(count) == 7:
            raise KeyboardInterrupt
        return once(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "train_step", dies_in_step_7)
        learn(ScriptedScorers(workspace, similarity=scorers), "killed", **how)
    shutil.rmtree(tmp_path / "killed" / "best")  # as if the kill had come between the checkpoint and its copy
    shutil.rmtree(checkpoint_folder(Run.open(tmp_path / "killed"), 6))
    with scripted_scorers(ScriptedScorers(workspace, similarity=scorers)) as again:
        killed = resume(tmp_path / "killed")
    assert killed is not None and metrics(killed.folder) == metrics(whole.folder)
    assert contents(killed.adapter) == contents(whole.adapter)
    assert contents(killed.folder / "best" / "adapter") == contents(whole.folder / "best" / "adapter")
    assert set(again.spoken) == {8, 10}, "step 6 was heard before the kill, and its weights are the same again"
    conclusions = [[line for line in log(run).splitlines() if "is the best" in line] for run in (whole, killed)]
    assert conclusions[0] == conclusions[1] != []


def test_a_resumed_run_refuses_other_scorers_or_items(
    learn: Learn, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    lines = tmp_path / "lines.txt"
    lines.write_text("good evening\nfar away\n")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CheckpointManager, "publish", die)
        learn(ScriptedScorers(workspace), speech_eval={"sentences": str(lines)})
    lines.write_text("good evening\nfar, far away\n")
    with (
        scripted_scorers(ScriptedScorers(workspace)),
        pytest.raises(TrainingError, match="has other items than would be spoken now"),
    ):
        resume(tmp_path / "run")
    lines.write_text("good evening\nfar away\n")
    others = ScriptedScorers(workspace, names=("another asr", "scripted encoder", "scripted mos"))
    with (
        scripted_scorers(others),
        pytest.raises(TrainingError, match="was scored by scripted asr, and now another asr"),
    ):
        resume(tmp_path / "run")
    with pytest.raises(TrainingError, match=r"another speech_eval\.limit"):
        resume(tmp_path / "run", settings=["speech_eval.limit=9"])
    with pytest.raises(TrainingError, match=r"another speech_eval\.asr"):
        resume(tmp_path / "run", settings=["speech_eval.asr=null"])
    shutil.rmtree(tmp_path / "run" / "best")  # as if a kill had come before it
    with scripted_scorers(ScriptedScorers(workspace)) as same:
        run = resume(tmp_path / "run", settings=["speech_eval.asr=moved/planted"])
    assert run is not None and run.is_finished and same.spoken == []
    assert contents(run.folder / "best" / "adapter") == contents(run.adapter)


# Said before anything is trained


def test_missing_scorers_are_an_error_before_training(workspace: Path, tmp_path: Path) -> None:
    recipe = recipe_for(
        workspace, data={"evaluation": str(workspace / "evaluation")}, speech_eval={"asr": "nowhere/at/all"}
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    with pytest.raises(ConfigError, match="asks for scorers that are not here: asr:") as refused:
        train(path, out=tmp_path / "run")
    assert "--set speech_eval.asr=null" in refused.value.hint and not (tmp_path / "run").exists()


def test_only_scorers_that_the_rule_needs_are_opened(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorers = ScriptedScorers(workspace)
    names = {"asr": "a", "speaker_encoder": "s", "distillmos": "d", "dnsmos": "n"}
    everyone = Scorers(asr=scorers, speaker_encoder=scorers, distillmos=scorers, dnsmos=scorers, names=names)
    asked = recipe_for(
        workspace,
        data={"evaluation": str(workspace / "evaluation")},
        speech_eval={"asr": "base", "speaker_encoder": "ecapa"},
    ).speech_eval
    monkeypatch.setattr(Scorers, "open", lambda *given, **_: everyone if given == ("base", "ecapa") else None)
    kept = open_required_scorers(asked)
    assert set(kept.names) == {"asr", "speaker_encoder", "distillmos"} and kept.dnsmos is None
    lacking = Scorers(
        asr=scorers,
        speaker_encoder=scorers,
        names={"asr": "a", "speaker_encoder": "s"},
        missing={"distillmos": "pip install it"},
    )
    monkeypatch.setattr(Scorers, "open", lambda *_, **__: lacking)
    with pytest.raises(ConfigError, match="not here: distillmos: pip install it"):
        open_required_scorers(asked)


def test_speech_evaluation_refuses_a_model_that_answers_in_text(workspace: Path, tmp_path: Path, learn: Learn) -> None:
    save_tiny_model(tmp_path / "listener", answers=True)
    with pytest.raises(ConfigError, match="is for models that speak"):
        learn(ScriptedScorers(workspace), model={"source": str(tmp_path / "listener"), "check_pretrained": False})


def test_sentences_of_a_file_are_spoken_by_speakers_of_the_data(learn: Learn, workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("good evening\nfar away\nover there\nnot heard\n")
    run = learn(
        ScriptedScorers(workspace), speech_eval={"sentences": str(tmp_path / "lines.txt"), "language": "en", "every": 6}
    )
    heard = read_item_scores(run.folder / "speech_eval" / "step-000006" / "items.parquet")
    base = run.folder / "speech_eval" / "step-000000" / "confirmation" / "items.parquet"
    texts = {row.text for row in [*heard, *read_item_scores(base)]}
    assert texts == {"good evening", "far away", "over there"} and len(heard) == 2 and heard[0].language == "en"
    assert list(rows(run, "speech_eval")) == [0, 6], "and as often as was asked"
    assert not (run.folder / "speech_eval" / "real" / "audio").exists(), "nobody has recorded them"
    assert len(list((run.folder / "speech_eval" / "step-000006" / "spectrograms").glob("*.png"))) == 2
