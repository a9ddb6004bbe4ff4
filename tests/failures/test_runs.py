"""Run folders, runs that no longer learn, and runs that go on."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import myna
from myna.audio.files import write_audio
from myna.commands import display, main
from myna.commands.model import show_model_stats
from myna.core.config import SpeechEvalSettings, dump_recipe
from myna.core.errors import ConfigError, MynaError, TrainingError
from myna.core.run_folder import Run, checkpoint_folder, checkpoint_steps, read_checkpoint_metadata
from myna.evaluate.ranking import StepScores, best_checkpoint, score_checkpoint
from myna.evaluate.scoring import ItemScores
from myna.models import open_family
from myna.train import checkpoint
from myna.train.optimizer import learning_rate
from myna.train.trainer import Trainer
from tests.tone_corpus import SAMPLE_RATE, tone_speech

from .conftest import TrainWith
from .tiny_setup import RecordingCallback, make_recipe, train_run

Capture = pytest.CaptureFixture[str]
REPOSITORY = Path(__file__).parents[2]
HOLD = """
import sys, time
import myna
from myna.train.launch import ProgressObserver
class Waiting(ProgressObserver):
    def on_metrics(self, row):
        print("step", row["step"], flush=True)
        time.sleep(600)
if sys.argv[1] == "train":
    myna.train(sys.argv[2], out=sys.argv[3], observer=Waiting(lambda *_: None))
else:
    myna.resume(sys.argv[3], observer=Waiting(lambda *_: None))
"""
"""A training that stays in its first step."""


@pytest.fixture
def recipe_file(workspace: Path, tmp_path: Path) -> Path:
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(make_recipe(workspace, train={"save_every": 1})))
    return file


def start_holding(*words: object) -> subprocess.Popen[str]:
    """Another process that trains, once it is in its first step."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, *map(str, words)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline().startswith("step")
    return process


# Two processes in one run


@pytest.mark.parametrize("command", ["train", pytest.param("resume", marks=pytest.mark.slow)])
def test_a_run_that_another_process_trains_is_refused_until_that_one_dies(
    recipe_file: Path, tmp_path: Path, command: str
) -> None:
    folder = tmp_path / "run"
    if command == "resume":
        myna.train(recipe_file, out=folder, settings={"train.steps": 1})
        recipe = Run.open(folder).recipe
        (folder / "config.yaml").write_text(dump_recipe(recipe).replace("steps: 1\n", "steps: 3\n"))
        (folder / "adapter").rename(tmp_path / "adapter")
    holder = start_holding(command, recipe_file, folder)
    try:
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        attempts: list[Callable[[], Run]] = [partial(myna.train, recipe_file, out=folder), partial(myna.resume, folder)]
        for attempt in attempts:
            with pytest.raises(TrainingError, match=rf"{folder} is being trained") as caught:
                attempt()
            assert f"process {holder.pid} on {socket.gethostname()} since 20" in caught.value.what
            assert f"kill {holder.pid}" in caught.value.hint
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    run = myna.resume(folder)
    assert run.is_finished and checkpoint_steps(run)[-1] == 3
    rows = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
    assert rows == [1, 2, 3], "every step once"


# A run that no longer learns


@pytest.mark.parametrize("rate", [1e9, 1e3])
def test_a_run_whose_gradient_is_zero_stops_with_the_step_and_the_cure(
    workspace: Path,
    pretrained_base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    rate: float,
) -> None:
    recipe = make_recipe(
        workspace, model={"source": str(pretrained_base)}, train={"steps": 50, "learning_rate": rate, "save_every": 1}
    )
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    monkeypatch.setattr(sys, "argv", ["myna", "train", str(file), "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit, match="1"):
        main()
    message = " ".join(capsys.readouterr().err.split())
    assert re.search(r"step [45]: the run has diverged .* the gradient is exactly zero since step [23]", message)
    assert "at a loss of 4.19 where a guess has 4.19" in message and "--set train.learning_rate=0.0001" in message
    run = Run.open(tmp_path / "run")
    assert not run.is_finished and checkpoint_steps(run)[0] == 1, "what was saved before is kept"


def test_a_short_run_that_ends_above_chance_is_not_called_a_result(
    train_with: TrainWith, pretrained_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Trainer.train_step

    def ruin(self: Trainer, *given: Any) -> Any:
        """A gradient that is not zero, and weights that go astray with it."""
        result = whole(self, *given)
        with torch.no_grad():
            for parameter in self.trainable_parameters.values():
                parameter.normal_(std=3.0)
        return result

    monkeypatch.setattr(Trainer, "train_step", ruin)
    with pytest.raises(TrainingError, match=r"step 4: .* the loss is not better than chance since step 2"):
        train_with(model={"source": str(pretrained_base)}, train={"steps": 4})


@pytest.mark.parametrize("source", ["model", "pretrained"])
def test_a_run_that_recovers_or_begins_at_chance_is_left_alone(
    train_with: TrainWith, workspace: Path, pretrained_base: Path, source: str
) -> None:
    model = workspace / "model" if source == "model" else pretrained_base
    run, callback = train_with(
        model={"source": str(model), "check_pretrained": False}, train={"steps": 12, "learning_rate": 1.0}
    )
    assert run.is_finished and max(row["loss"] for row in callback.steps) > math.log(66)


def test_a_loss_that_is_not_a_number_is_never_the_best(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, whole = iter([3.0, math.nan, 2.0, math.inf, 2.5]), Trainer.evaluate

    def evaluate(self: Trainer, *given: Any) -> dict[str, Any]:
        return whole(self, *given) | {"loss": next(losses)}

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    recipe = make_recipe(
        workspace,
        data={"evaluation": str(workspace / "evaluation")},
        train={"steps": 4, "evaluate_every": 1, "early_stopping_patience": 9},
    )
    run, callback = train_run(recipe, tmp_path / "run")
    assert any("evaluation loss 2.0000 at step 2" in line for line in callback.messages)
    assert any("the evaluation loss of step 1 is not a number" in line for line in callback.messages)
    best = read_checkpoint_metadata(checkpoint_folder(run, 4))["progress"]
    assert (best["best_step"], best["best_loss"]) == (2, 2.0)
    rows = [row["evaluation"]["loss"] for row in run.read_metrics() if "evaluation" in row]
    assert rows == [3.0, None, 2.0, None, 2.5]
    lines = run.metrics.read_text().splitlines()
    assert all(json.loads(line, parse_constant=pytest.fail) for line in lines), "valid JSON"


@pytest.mark.parametrize("metric", ["similarity", "distillmos"])
def test_a_score_that_is_not_a_number_is_never_the_best(metric: str) -> None:
    item = ItemScores("spoken", "line", "", "so it is", "wren", "en", "sentence", "", "sound", True, 1.0)
    item = replace(item, similarity=0.5, distillmos=3.5, characters=8, character_errors=0, seconds=1.0)
    base, *steps = (
        StepScores(step, [replace(item, **{metric: value})])
        for step, value in enumerate((getattr(item, metric), math.nan, getattr(item, metric) + 0.1))
    )
    scores = [score_checkpoint(one, base, SpeechEvalSettings()) for one in (base, *steps)]
    assert any("is not a number" in line for line in scores[1].violations)
    best = best_checkpoint(scores)
    assert best is not None and best.step == 2


def test_an_infinite_norm_is_null_and_its_reason_is_logged(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, whole = iter([math.inf, 0.5, math.nan]), Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", lambda *given: (whole(*given)[0], next(steps)))
    run, callback = train_run(make_recipe(workspace), tmp_path / "run")
    rows = [json.loads(line, parse_constant=pytest.fail) for line in run.metrics.read_text().splitlines()]
    assert [row["gradient_norm"] for row in rows] == [None, 0.5, None]
    assert [line for line in callback.messages if "was skipped" in line] == [
        f"step {step} was skipped: its gradient overflows in fp32; the loss scale is halved" for step in (1, 3)
    ]


def test_weights_that_are_not_finite_replace_no_checkpoint(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Trainer.train_step

    def overflow(self: Trainer, *given: Any) -> Any:
        result = whole(self, *given)
        if given[2] < 1e-3:
            next(iter(self.trainable_parameters.values())).data.fill_(math.inf)
        return result

    monkeypatch.setattr(Trainer, "train_step", overflow)
    train = {"steps": 3, "save_every": 1, "keep_checkpoints": 1, "schedule": "linear"}
    with pytest.raises(TrainingError, match="after step 3 weights are not finite: base_model") as caught:
        train_run(make_recipe(workspace, train=train), tmp_path / "run")
    assert "step-000002" in caught.value.hint and "train.learning_rate" in caught.value.hint
    run = Run.open(tmp_path / "run")
    assert checkpoint_steps(run) == [2] and not run.is_finished


# Incomplete checkpoints, mixed stages


@pytest.mark.parametrize("mode", ["comprehensive", "full"])
@pytest.mark.parametrize("fault", ["missing", "unexpected"])
def test_a_checkpoint_with_other_tensors_than_were_saved_is_not_named_one(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, fault: str
) -> None:
    """A writer that loses a tensor, or has one too many. Adapter, model and state are checked alike."""
    adapt = {"mode": "full"} if mode == "full" else {"rank": 4}
    recipe = make_recipe(workspace, adapt=adapt, train={"steps": 1})
    name = "model" if mode == "full" else "adapter"
    owner: Any = type(open_family(recipe.model.source)) if mode == "full" else checkpoint
    writer = "save_model" if mode == "full" else "save_adapter"
    whole = getattr(owner, writer)

    def write(*given: Any) -> Any:
        result, folder = whole(*given), given[-1]
        file = next(folder.glob("*.safetensors"))
        tensors = load_file(file)
        if fault == "unexpected":
            tensors["extra"] = torch.zeros(1)
        else:
            del tensors[min(tensors)]
        save_file(tensors, file)
        return result

    monkeypatch.setattr(owner, writer, write)
    expected = "holds extra, which was not written" if fault == "unexpected" else "lacks what was written"
    with pytest.raises(TrainingError, match=rf"the checkpoint of step 1 could not be written .*safetensors {expected}"):
        train_run(recipe, tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").iterdir()) and not (tmp_path / "run" / name).exists()


def test_a_state_that_lost_a_tensor_is_not_named_a_checkpoint(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lossy(tensors: dict[str, torch.Tensor], *given: Any) -> None:
        save_file({name: tensor for name, tensor in tensors.items() if not name.startswith("rng/")}, *given)

    monkeypatch.setattr(checkpoint, "save_file", lossy)
    with pytest.raises(TrainingError, match=r"state.safetensors lacks what was written: rng/cpu/0"):
        train_run(make_recipe(workspace), tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("ends", [(0.5, 200), (1, 200)])
def test_stages_do_not_mix_shares_of_the_run_with_steps(workspace: Path, ends: tuple[float, float]) -> None:
    stages = [{"until": end, "text_weight": 1.0} for end in ends]
    with pytest.raises(ConfigError, match=r"`train.stages` mixes shares .* with steps: [\d.]+, 200") as caught:
        make_recipe(workspace, train={"stages": stages})
    assert "until" in caught.value.hint
    for alike in ((0.5, 1), (100, 200)):
        make_recipe(workspace, train={"stages": [{"until": end, "text_weight": 1.0} for end in alike]})


# A dry run into a run that exists


def test_a_dry_run_writes_nothing_and_so_works_in_any_folder(recipe_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trackers = {"train.trackers": ["tensorboard"]} if find_spec("tensorboard") else {}
    myna.train(recipe_file, out=folder, dry_run=True, settings=trackers)
    assert not folder.exists()
    myna.train(recipe_file, out=folder)
    before = {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")}
    callback = RecordingCallback()
    myna.train(recipe_file, out=folder, dry_run=True, settings={"train.steps": 9} | trackers, observer=callback)
    assert "dry run: everything is ready for 9 steps, and nothing was trained or written" in callback.messages
    after = {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in folder.rglob("*")}
    assert after == before
    with pytest.raises(TrainingError, match="already holds a run"):
        myna.train(recipe_file, out=folder)


# Markup in texts


def test_markup_in_a_text_or_an_id_neither_ends_a_training_nor_is_swallowed(
    workspace: Path, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for number, text in enumerate(("hi [/b]", "[bold]you", ":speaker: who")):
        clip = tmp_path / "recordings" / "take[a]" / f"0{number}.wav"
        write_audio(clip, tone_speech(text, 120.0), SAMPLE_RATE)
        clip.with_suffix(".txt").write_text(text)
    myna.prepare(tmp_path / "recordings", tmp_path / "prepared", model=str(workspace / "model"), device="cpu")
    capsys.readouterr()
    words = ["train", recipe_file, "--out", tmp_path / "[/red]", "--set", f"data.train={tmp_path / 'prepared'}"]
    monkeypatch.setattr(sys, "argv", ["myna", *map(str, words)])
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit, match="0"):
        main()
    printed = capsys.readouterr()
    samples = [line for line in printed.err.splitlines() if line.startswith("sample")]
    assert samples == [line for line in (tmp_path / "[/red]" / "log.txt").read_text().splitlines() if "sample" in line]
    assert len(samples) == 3 and all("take[a]" in line for line in samples)
    assert f"saved {tmp_path / '[/red]' / 'adapter'}" in printed.err and f"--run {tmp_path / '[/red]'}" in printed.out


@pytest.mark.parametrize("text", [r"C:\voices\[b]\01.wav", "C:\\voices\\", "[/b]", "take[a]/01", ":smile: [red]x[/]"])
def test_messages_and_errors_are_printed_as_they_are(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    with display.TrainingDisplay() as shown:
        shown.on_message(text)
        shown.on_start(1, 0)
        shown.progress(text, 1, 2)
    display.show(text)
    show_model_stats(text, {text: text})
    printed = "".join(capsys.readouterr())
    assert printed.count(text) >= 5, printed

    def fail(*_: object) -> None:
        raise TrainingError(text, hint=text)

    monkeypatch.setattr("myna.core.config.shipped_recipes", fail)
    monkeypatch.setattr(sys, "argv", ["myna", "recipes"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1 and capsys.readouterr().err == f"error {text}\n  → {text}\n"


# Runs that go on


def rates(run: Run) -> list[float]:
    return [row["learning_rate"] for row in run.read_metrics() if "learning_rate" in row]


def metrics(run: Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "speed"} for row in run.read_metrics()]


def test_a_run_resumed_with_more_steps_is_the_longer_run_bit_for_bit(workspace: Path, tmp_path: Path) -> None:
    recipe = make_recipe(
        workspace,
        data={"evaluation": str(workspace / "evaluation")},
        adapt={"dropout": 0.3},
        train={"steps": 4, "evaluate_every": 2, "save_every": 2, "ema_decay": 0.9, "warmup": 2},
    )
    short = myna.train(recipe, out=tmp_path / "run")
    weights = (short.adapter / "adapter_model.safetensors").read_bytes()
    long = myna.train(recipe, out=tmp_path / "long", settings={"train.steps": 8})

    class Interrupting(RecordingCallback):
        def on_metrics(self, row: dict[str, Any]) -> None:
            if row["step"] == 7:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        myna.resume(short, settings={"train.steps": 8}, observer=Interrupting())
    broken = Run.open(short.folder)
    assert broken.recipe.train.steps == 8 and not broken.is_finished, "the run remembers"
    assert (broken.adapter / "adapter_model.safetensors").read_bytes() == weights, (
        "and speaks as before until it is done"
    )
    run = myna.resume(short.folder)
    assert run.is_finished and metrics(run) == metrics(long)
    for file in ("adapter/adapter_model.safetensors", "checkpoints/step-000008/state.safetensors"):
        assert (run.folder / file).read_bytes() == (long.folder / file).read_bytes(), file
    callback = RecordingCallback()
    myna.resume(run, observer=callback)
    assert len(callback.messages) == 1 and "is finished" in callback.messages[0]


def test_the_schedule_is_that_of_the_new_length_from_the_next_step_on(train_with: TrainWith) -> None:
    run, _ = train_with(train={"steps": 4, "schedule": "cosine", "warmup": 0.5})
    before = rates(run)
    run = myna.resume(run, settings={"train.steps": 10})
    assert rates(run)[:4] == before and before[-1] < before[1]
    planned = [learning_rate(run.recipe.train, step, 10) for step in range(1, 11)]
    assert rates(run)[4:] == planned[4:]
    assert planned[4] == 2e-3 == max(planned), "a warm-up given as a share is of all ten steps too"
    # A run that counts epochs gets more of them in the same way.
    other, _ = train_with(data={"pack": False}, train={"steps": None, "epochs": 1})
    assert len(rates(myna.resume(other, settings=["train.epochs=2"]))) == 6


def test_settings_that_may_not_change_on_resume_are_refused_by_name(train_with: TrainWith) -> None:
    run, _ = train_with(train={"steps": 3})
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(TrainingError, match=r"another train\.learning_rate and train\.schedule") as caught:
        myna.resume(run, settings=["train.steps=9", "train.schedule=cosine", "train.learning_rate=1"])
    assert "train.steps" in caught.value.hint and "adapt.init" in caught.value.hint
    with pytest.raises(TrainingError, match="is at step 3 already, and 2 are asked for") as caught:
        myna.resume(run, settings={"train.steps": 2})
    assert "train.steps=3 or more" in caught.value.hint
    with pytest.raises(ConfigError, match=r"either `train\.epochs` or `train\.steps`"):
        myna.resume(run, settings={"train.epochs": 2, "train.steps": 9})
    log = run.folder / "log.txt"
    after = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file() and path.name != ".lock"}
    assert {path for path in after if after[path] != before.get(path)} <= {log} and Run.open(run.folder).is_finished


def test_a_run_that_stopped_early_goes_on_with_more_patience(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, whole = iter([3.0, 2.0, 2.5, 2.5, 1.0]), Trainer.evaluate
    monkeypatch.setattr(Trainer, "evaluate", lambda *given: whole(*given) | {"loss": next(losses)})
    train = {"steps": 4, "evaluate_every": 1, "early_stopping_patience": 1}
    data = {"evaluation": str(workspace / "evaluation")}
    run, _ = train_run(make_recipe(workspace, data=data, train=train), tmp_path / "run")
    assert checkpoint_steps(run)[-1] == 2
    with pytest.raises(TrainingError, match="has stopped early: no evaluation was better since step 1") as caught:
        myna.resume(run, settings={"train.steps": 9})
    assert "train.early_stopping_patience=2" in caught.value.hint
    run = myna.resume(run, settings={"train.early_stopping_patience": 3})
    assert [row["step"] for row in run.read_metrics() if "loss" in row] == [1, 2, 3, 4]
    assert read_checkpoint_metadata(checkpoint_folder(run, 4))["progress"]["best_step"] == 4


@pytest.fixture(scope="session")
def first(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A short run with a LoRA and a module that is trained in full."""
    recipe = make_recipe(
        workspace,
        data={"evaluation": str(workspace / "evaluation")},
        adapt={"train_modules": ["audio_head"]},
        train={"steps": 6, "evaluate_every": 3, "save_every": 3},
    )
    return train_run(recipe, tmp_path_factory.mktemp("first") / "run")[0]


def evaluations(run: Run) -> dict[int, float]:
    return {row["step"]: row["evaluation"]["loss"] for row in run.read_metrics() if "evaluation" in row}


def test_training_goes_on_from_a_run_a_checkpoint_or_any_peft_folder(first: Run, tmp_path: Path) -> None:
    foreign = Path(shutil.copytree(first.adapter, tmp_path / "foreign"))
    (foreign / "myna.json").unlink()
    sources = {first.folder: 6, first.folder / "checkpoints" / "step-000003": 3, first.adapter: 6, foreign: 6}
    for number, (source, step) in enumerate(sources.items()):
        settings = {"adapt.init": source, "train.steps": 3, "train.ema_decay": 0.5, "adapt.dropout": 0.1}
        run = myna.train(first.recipe, out=tmp_path / f"run{number}", settings=settings)
        assert evaluations(run)[0] == pytest.approx(evaluations(first)[step], abs=1e-6), "it begins where that one was"
        assert evaluations(run)[3] < evaluations(run)[0], "and learns on"
        assert f"training on from {source}" in (run.folder / "log.txt").read_text()
    assert Run.open(run.folder).recipe.adapt.init == str(foreign)


def test_a_run_begun_from_an_adapter_resumes_without_it(first: Run, tmp_path: Path) -> None:
    source = Path(shutil.copytree(first.adapter, tmp_path / "source"))
    settings = {"adapt.init": source, "train.steps": 4, "train.save_every": 1}
    whole = myna.train(first.recipe, out=tmp_path / "whole", settings=settings)
    part = myna.train(first.recipe, out=tmp_path / "part", settings=settings | {"train.steps": 2})
    shutil.rmtree(source)
    run = myna.resume(part, settings={"train.steps": 4})
    assert (run.adapter / "adapter_model.safetensors").read_bytes() == (
        whole.adapter / "adapter_model.safetensors"
    ).read_bytes()
    with pytest.raises(MynaError, match="source"):
        myna.train(first.recipe, out=tmp_path / "new", settings=settings)


@pytest.mark.parametrize(
    ("settings", "message", "cure"),
    [
        ({"adapt.rank": 8}, r"another `adapt.rank` \(4, here 8\)", "--set adapt.rank=4"),
        ({"adapt.alpha": 4, "adapt.rslora": True}, r"`adapt.alpha` .* another `adapt.rslora`", "--set adapt.alpha=8"),
        ({"adapt.mode": "attention_only"}, "has other modules than adapt.mode", "a LoRA on "),
        ({"adapt.train_modules": []}, "unexpected: base_model.model.audio_lm_head", "audio_lm_head in full"),
        ({"adapt.mode": "full", "adapt.train_modules": []}, "`adapt.init` starts a LoRA", "model.source=RUN/model"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_with_the_difference(
    first: Run, tmp_path: Path, settings: dict[str, Any], message: str, cure: str
) -> None:
    with pytest.raises(MynaError, match=message) as caught:
        myna.train(first.recipe, out=tmp_path / "run", settings={"adapt.init": first.folder} | settings)
    assert cure in caught.value.hint


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_adapter_of_another_base_model_is_refused(
    first: Run, pretrained_base: Path, tmp_path: Path, precision: str
) -> None:
    """A base in another type than in training is read again for the comparison."""
    settings = {"adapt.init": first.folder, "train.precision": precision, "train.steps": 1}
    myna.train(first.recipe, out=tmp_path / "run", settings=settings)
    with pytest.raises(TrainingError, match=r"was trained on another base model than .*model: the fingerprint"):
        myna.train(first.recipe, model=str(pretrained_base), out=tmp_path / "other", settings=settings)
