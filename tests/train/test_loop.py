"""Training of a tiny real model: the same result however a step is divided, and the effect of every setting."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from myna import prepare
from myna.audio.files import write_audio
from myna.core.config import Recipe, parse_recipe
from myna.core.errors import ConfigError, DataError
from myna.core.run_folder import Run
from myna.data.loader import Shard, start_workers
from myna.data.workers import WorkerPool
from myna.models import open_family, save_tiny_model
from myna.train import loop
from myna.train.loop import make_loader, run_training
from myna.train.trainer import Trainer
from tests.tone_corpus import SAMPLE_RATE, SPEAKER_PITCHES, tone_speech, write_recordings

CODES = [f"code{k}" for k in range(8)]


class Notes:
    """Observer that keeps messages and metrics."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.plan: int | None = None
        self.rows: list[dict[str, Any]] = []

    def on_message(self, text: str) -> None:
        self.said.append(text)

    def on_start(self, steps: int, *_: int) -> None:
        self.plan = steps

    def on_metrics(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model, six clips to learn and two to evaluate on."""
    folder = tmp_path_factory.mktemp("workspace")
    save_tiny_model(folder / "model")
    write_recordings(folder / "recordings")
    for speaker, pitch in SPEAKER_PITCHES.items():
        for number, text in enumerate(("hello", "you")):
            clip = folder / "others" / speaker / f"{number}.wav"
            write_audio(clip, tone_speech(text, pitch), SAMPLE_RATE)
            clip.with_suffix(".txt").write_text(text)
    for source, out in (("recordings", "prepared"), ("others", "evaluation")):
        prepare(str(folder / source), folder / out, model=str(folder / "model"), device="cpu")
    return folder


def recipe(workspace: Path, **changes: dict[str, Any]) -> Recipe:
    tree: dict[str, dict[str, Any]] = {
        "model": {"source": str(workspace / "model"), "check_pretrained": False},
        "data": {"train": str(workspace / "prepared"), "row_tokens": 360, "reference_seconds": [0.2, 10]},
        "adapt": {"rank": 4, "alpha": 8},
        "train": {
            "steps": 3,
            "batch_size": 4,
            "learning_rate": 2e-3,
            "warmup": 0,
            "schedule": "constant",
            "device": "cpu",
        },
    }
    for branch, values in changes.items():
        tree[branch] = tree.get(branch, {}) | values
    return parse_recipe(tree, where="test")


Learn = Callable[..., tuple[Run, Notes]]


@pytest.fixture
def learn(workspace: Path, tmp_path: Path) -> Learn:
    """Train with some settings changed, into a folder of its own."""

    def run_once(**changes: dict[str, Any]) -> tuple[Run, Notes]:
        chosen, notes = recipe(workspace, **changes), Notes()
        run = Run.create(tmp_path / f"run{len(list(tmp_path.iterdir()))}", chosen)
        run_training(chosen, run, notes)
        return run, notes

    return run_once


def steps(notes: Notes) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if key != "speed"} for row in notes.rows if "evaluation" not in row
    ]


def adapter(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.adapter / "adapter_model.safetensors")


# The same step, cut otherwise


def test_one_pass_of_four_rows_is_four_passes_of_one(learn: Learn) -> None:
    runs = [learn(train={"micro_batch_size": rows}) for rows in (4, 2, 1)]
    first_run, first_notes = runs[0]
    for run, notes in runs[1:]:
        for one, other in zip(steps(first_notes), steps(notes), strict=True):
            assert one.keys() == other.keys()
            for key in ("loss", *CODES, "learning_rate", "accuracy", "stop_accuracy"):
                assert other[key] == pytest.approx(one[key], abs=1e-6), key
            assert other["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-4)
        learned = adapter(run)
        for name, tensor in adapter(first_run).items():
            assert torch.allclose(learned[name], tensor, rtol=0, atol=1e-5), name


def test_two_runs_with_a_seed_are_one_and_another_seed_is_another(learn: Learn) -> None:
    (one, notes), (again, same), (_, other) = (learn(train={"seed": seed}) for seed in (3, 3, 4))
    assert steps(notes) == steps(same)
    assert all(torch.equal(tensor, adapter(again)[name]) for name, tensor in adapter(one).items())
    assert steps(notes)[0]["loss"] != steps(other)[0]["loss"]


# What is told


def test_every_step_is_told_and_written(learn: Learn) -> None:
    run, notes = learn()
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert rows == notes.rows and notes.plan == 3
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {"loss", *CODES, "accuracy", "stop_accuracy", "gradient_norm", "learning_rate", "epoch"} <= rows[0].keys()
    assert "text" not in rows[0], "nothing of the text is learned"
    assert set(rows[0]["speed"]) == {"seconds", "tokens_per_second", "audio_per_second", "memory_gib"}
    assert (run.folder / "log.txt").read_text() == "".join(f"{text}\n" for text in notes.said)
    assert any("6 targets" in line for line in notes.said)


def test_evaluations_come_when_due_and_at_the_end(learn: Learn, workspace: Path) -> None:
    changes = {"evaluate_every": 2, "steps": 5}
    run, notes = learn(data={"evaluation": str(workspace / "evaluation")}, train=changes)
    heard = [row for row in notes.rows if "evaluation" in row]
    assert [row["step"] for row in heard] == [0, 2, 4, 5], "the untuned model's first"
    assert {"loss", *CODES, "accuracy", "stop_accuracy"} <= heard[0]["evaluation"].keys()
    assert heard == [row for row in map(json.loads, run.metrics.read_text().splitlines()) if "evaluation" in row]
    assert len({row["evaluation"]["loss"] for row in heard}) == 4, "the model has changed in between"
    assert any("evaluation: 4 targets" in line for line in notes.said)

    _, cut = learn(data={"evaluation": str(workspace / "evaluation")}, train=changes | {"micro_batch_size": 4})
    for one, other in zip(heard, [row for row in cut.rows if "evaluation" in row], strict=True):
        assert other["evaluation"]["loss"] == pytest.approx(one["evaluation"]["loss"], abs=1e-5)


def test_an_evaluation_changes_nothing_that_is_learned(learn: Learn, workspace: Path) -> None:
    (_, notes), (_, quiet) = (
        learn(data={"evaluation": str(workspace / "evaluation")}, train={"evaluate_every": 1}),
        learn(),
    )
    assert steps(notes) == steps(quiet)


def test_epochs_are_counted_in_rows(learn: Learn, workspace: Path) -> None:
    family = open_family(str(workspace / "model"))
    chosen = recipe(workspace)
    rows = make_loader(chosen, family, chosen.data.train).rows_in_first_epoch()
    _, notes = learn(train={"steps": None, "epochs": 2, "batch_size": 2})
    assert notes.plan == -(-2 * rows // 2)
    assert notes.rows[-1]["epoch"] == pytest.approx(2 * notes.plan / rows)


# What is learned


def code_loss(workspace: Path, source: Path) -> float:
    """Mean code loss of a saved model on all training data."""
    family = open_family(str(source))
    chosen = recipe(workspace)
    objective = family.objective(family.load_model(dtype=torch.float32, device="cpu", text_head=False).eval())
    loss, count = 0.0, 0.0
    with torch.no_grad():
        for batch in make_loader(chosen, family, chosen.data.train).evaluation_batches(1, Shard()):
            loss, count = loss + float(objective(batch).sums[1:].sum()), count + float(batch.counts[1:].sum())
    return loss / count


def test_full_training_saves_a_model_that_opens_and_has_learned(learn: Learn, workspace: Path) -> None:
    run, notes = learn(adapt={"mode": "full", "rank": 16, "alpha": 32}, train={"steps": 8, "learning_rate": 5e-3})
    assert not run.adapter.exists() and run.model.is_dir()
    before, after = code_loss(workspace, workspace / "model"), code_loss(workspace, run.model)
    assert notes.rows[0]["loss"] == pytest.approx(before, abs=0.1)
    assert after < before - 0.5
    assert after == pytest.approx(notes.rows[-1]["loss"], abs=0.5), "what was saved is what was trained"


def test_what_is_frozen_stays_as_it_was(learn: Learn, workspace: Path) -> None:
    frozen = ["text_embedding", "audio_embedding", "attention", "text_ffn", "norms", "audio_ffn"]
    run, notes = learn(adapt={"mode": "full", "rank": 16, "alpha": 32, "freeze": frozen})
    before, after = (
        open_family(str(source)).load_model(dtype=torch.float32, device="cpu", text_head=False).state_dict()
        for source in (workspace / "model", run.model)
    )
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {"audio_lm_head.weight"}
    assert notes.rows[-1]["loss"] < notes.rows[0]["loss"]


def test_a_text_weight_loads_and_trains_the_text_head(learn: Learn, workspace: Path) -> None:
    run, notes = learn(
        loss={"text_weight": 0.5}, adapt={"train_modules": ["text_head"]}, train={"steps": 6, "learning_rate": 5e-3}
    )
    first, last = notes.rows[0], notes.rows[-1]
    assert last["text"] < first["text"] - 0.5
    assert first["loss"] == pytest.approx(0.5 * first["text"] + sum(first[code] for code in CODES) / 8, abs=1e-6)
    head = [tensor for name, tensor in adapter(run).items() if "text_lm_head" in name]
    model: Any = open_family(str(workspace / "model")).load_model(dtype=torch.float32, device="cpu", text_head=True)
    assert len(head) == 1 and not torch.equal(head[0], model.text_lm_head.weight)


def test_without_a_text_weight_there_is_no_text_head(learn: Learn) -> None:
    _, notes = learn(train={"steps": 1})
    assert "text" not in notes.rows[0]
    with_text = learn(loss={"text_weight": 0.5}, train={"steps": 1})[1]
    assert _total(with_text) > _total(notes), "an untouched head is not even loaded"


def _total(notes: Notes) -> int:
    said = next(line for line in notes.said if "parameters learn" in line)
    return int(said.split(" of ")[1].split()[0].replace(",", ""))


def test_codebook_weights_weigh(learn: Learn) -> None:
    rows = {
        name: learn(loss={"codebook_weights": weights}, train={"steps": 2})[1].rows
        for name, weights in {"uniform": "uniform", "1/k": "1/k", "first": [1, 0, 0, 0, 0, 0, 0, 0]}.items()
    }
    codes = [rows["uniform"][0][code] for code in CODES]
    shares = [1 / (k + 1) for k in range(8)]
    assert rows["uniform"][0]["loss"] == pytest.approx(sum(codes) / 8, abs=1e-6)
    assert rows["first"][0]["loss"] == pytest.approx(codes[0], abs=1e-6)
    weighed = sum(share * code for share, code in zip(shares, codes, strict=True)) / sum(shares)
    assert rows["1/k"][0]["loss"] == pytest.approx(weighed, abs=1e-6)
    assert all(one[0][code] == rows["uniform"][0][code] for one in rows.values() for code in CODES), (
        "only the sum differs"
    )
    assert len({one[1]["code7"] for one in rows.values()}) == 3, "and so does what is learned"


def test_label_smoothing_smooths(learn: Learn) -> None:
    plain, smooth = (
        learn(loss={"label_smoothing": share}, train={"steps": 6, "learning_rate": 1e-2})[1].rows
        for share in (0.0, 0.3)
    )
    assert plain[0]["loss"] != smooth[0]["loss"]
    assert plain[0]["accuracy"] == smooth[0]["accuracy"], "the same model at first"
    assert smooth[-1]["loss"] > plain[-1]["loss"], "certainty costs"


def test_all_audio_counts_references_too(learn: Learn) -> None:
    plain, supervise_references = (
        learn(loss={"supervise_references": on}, train={"steps": 1})[1].rows[0] for on in (False, True)
    )
    speeds = [row["speed"]["audio_per_second"] * row["speed"]["seconds"] for row in (plain, supervise_references)]
    assert speeds[1] > 1.5 * speeds[0], "seconds that are learned"


def test_a_lora_learns(learn: Learn) -> None:
    run, notes = learn(train={"steps": 8, "learning_rate": 1e-2})
    assert notes.rows[-1]["loss"] < notes.rows[0]["loss"] - 0.03
    # But for the last layer's text FFN, behind which no text is learned.
    dead = {name.split("layers.")[1] for name, tensor in adapter(run).items() if tensor.abs().max() == 0}
    assert dead == {f"1.mlp.{part}_proj.lora_B.weight" for part in ("gate", "up", "down")}


# What cannot be


def test_an_utterance_too_long_for_a_row_is_refused_by_name_before_the_first_step(
    workspace: Path, tmp_path: Path
) -> None:
    chosen, notes = recipe(workspace, data={"row_tokens": 186}), Notes()
    run = Run.create(tmp_path / "run", chosen)
    with pytest.raises(
        DataError, match=r"(robin/robin|heron/heron)-[12] takes 187 tokens .* a row holds 186"
    ) as caught:
        run_training(chosen, run, notes)
    assert "data.row_tokens=187" in caught.value.hint
    assert notes.plan is None and notes.rows == [] and not run.metrics.exists()


def test_codes_of_another_kind_of_codec_are_refused(workspace: Path, tmp_path: Path) -> None:
    note = workspace / "prepared" / "prepared.json"
    before = note.read_text()
    note.write_text(before.replace('"codebook_size": 64', '"codebook_size": 1024'))
    chosen = recipe(workspace)
    try:
        with pytest.raises(DataError, match="another kind of codec") as caught:
            run_training(chosen, Run.create(tmp_path / "run", chosen), Notes())
    finally:
        note.write_text(before)
    assert "myna prepare" in caught.value.hint


def test_a_tracker_gets_the_metrics_or_says_what_to_install(learn: Learn) -> None:
    if find_spec("tensorboard") is None:
        with pytest.raises(ConfigError, match="pip install tensorboard"):
            learn(train={"trackers": ["tensorboard"]})
        return
    run, _ = learn(train={"trackers": ["tensorboard"]})
    assert list(run.folder.rglob("events.out.tfevents.*"))


def test_every_module_is_in_training_after_an_evaluation(
    learn: Learn, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[set[bool]] = []
    clip = Trainer.clip_gradients

    def note(trainer: Trainer) -> Any:
        states.append({module.training for module in trainer.objective.modules()})
        return clip(trainer)

    monkeypatch.setattr(Trainer, "clip_gradients", note)
    learn(data={"evaluation": str(workspace / "evaluation")}, train={"steps": 3, "evaluate_every": 1})
    assert states[-3:] == [{True}] * 3


@pytest.mark.slow
def test_processes_make_the_batches_of_a_card_and_change_nothing(learn: Learn, monkeypatch: pytest.MonkeyPatch) -> None:
    hired: list[WorkerPool] = []

    def note(loaders: Sequence[Any], number: int) -> WorkerPool:
        hired.append(start_workers(loaders, number))
        return hired[-1]

    monkeypatch.setattr(loop, "start_workers", note)
    settings: dict[str, Any] = {"data": {"workers": 2}, "train": {"steps": 4}}
    alone, _ = learn(**settings)
    assert hired == []
    monkeypatch.setattr(loop, "WORKER_PROCESS_DEVICES", ("cpu",))
    together, _ = learn(**settings)
    [workers] = hired
    assert [each._process.returncode for each in workers._workers] == [-signal.SIGKILL] * 2, "nobody is left"
    whole, same = adapter(alone), adapter(together)
    assert whole and all(torch.equal(tensor, same[name]) for name, tensor in whole.items())


@pytest.mark.parametrize("pin", [True, False])
def test_batches_are_pinned_by_those_who_make_them_where_a_card_waits(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, pin: bool
) -> None:
    where: set[str] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        where.add(threading.current_thread().name.split("_")[0])
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", note)
    chosen = recipe(workspace)
    loader = make_loader(chosen, open_family(chosen.model.source), chosen.data.train, pin=pin)
    with closing(loader.steps(4, 1, Shard())) as steps:
        assert len(next(steps)) == 4
    assert where == ({"myna-render"} if pin else set())
