"""Checkpoints: complete or absent, verified, rejected if they do not fit, and the best one kept."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from myna.core.config import Recipe, dump_recipe
from myna.core.errors import TrainingError
from myna.core.run_folder import Run, checkpoint_folder, checkpoint_steps
from myna.data.loader import Loader, Shard
from myna.models import open_family
from myna.models.base import Batch, RenderedSequence
from myna.models.higgs_v2.family import HiggsV2
from myna.models.higgs_v2.tiny import save_tiny
from myna.models.lora import load_adapter
from myna.train import checkpoint, loop
from myna.train.checkpoint import CheckpointManager, TrainingProgress
from myna.train.distributed import init_accelerator
from myna.train.loop import make_loader, run_training
from myna.train.loss import term_weights
from myna.train.precision import Precision
from myna.train.trainer import Trainer
from tests.train.resume_helper import Notes, TrainingForks, contents, metrics, recipe_for

STATE, FACTS = "state.safetensors", "state.json"


@pytest.fixture(autouse=True)
def no_preflight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the preflight, since these tests are about saving."""
    monkeypatch.setattr(loop, "run_preflight", lambda *_, **__: None)


def learn(folder: Path, recipe: Recipe) -> Run:
    run = Run.create(folder, recipe)
    run_training(recipe, run, Notes())
    return run


def go_on(folder: Path, settings: list[str] | None = None) -> Notes:
    run, notes = Run.open(folder, settings), Notes()
    run_training(run.recipe, run, notes, resume=True)
    return notes


@pytest.fixture(scope="module")
def unfinished(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run of six steps that was interrupted after the fourth, with checkpoints of the second and the fourth."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "run_preflight", lambda *_, **__: None)
        how = {"save_every": 2, "evaluate_every": 6, "keep_checkpoints": 3, "ema_decay": 0.5}
        recipe = recipe_for(workspace, data={"evaluation": str(workspace / "evaluation")}, train=how)
        run = learn(tmp_path_factory.mktemp("runs") / "run", recipe)
    shutil.rmtree(run.adapter)
    shutil.rmtree(checkpoint_folder(run, 6))
    return run.folder


@pytest.fixture
def copied(unfinished: Path, tmp_path: Path) -> Run:
    return Run.open(Path(shutil.copytree(unfinished, tmp_path / "run")))


def newest(run: Run) -> Path:
    return checkpoint_folder(run, checkpoint_steps(run)[-1])


# What is in one


def test_it_holds_what_speaks_and_what_it_takes_to_go_on(copied: Run, workspace: Path) -> None:
    files = {path.split("/")[-1] for path in contents(copied.folder / "checkpoints")}
    assert files == {STATE, FACTS, "adapter_config.json", "adapter_model.safetensors", "myna.json"}, "and no pickle"
    facts = json.loads((newest(copied) / FACTS).read_text())
    family = open_family(str(workspace / "model"))
    prepared = json.loads((workspace / "prepared" / "prepared.json").read_text())
    assert facts["recipe"] == copied.recipe.model_dump(mode="json")
    assert facts["inputs"]["prompt"] == family.prompt_revision
    assert facts["inputs"]["codec"] == prepared["codec_revision"]
    assert facts["inputs"]["training data"].startswith("6 utterances")
    assert facts["inputs"]["evaluation data"].startswith("4 utterances")
    base = family.load_model(dtype=torch.float32, device="cpu", text_head=False)
    load_adapter(base, newest(copied) / "adapter")


class TrainingParts:
    """Trainer with its data, as the loop makes them."""

    def __init__(self, recipe: Recipe, run: Run, precision: Precision, device: str = "cpu") -> None:
        accelerator = init_accelerator(recipe, precision, torch.device(device), run.folder)
        self.family = open_family(recipe.model.source)
        self.loader: Loader[RenderedSequence, Batch] = make_loader(recipe, self.family, recipe.data.train)
        self.trainer = Trainer.from_recipe(recipe, self.family, precision, accelerator, lambda _: None)
        self.checkpoints = CheckpointManager(self.trainer, run, self.loader)

    def train_step(self, start: int, steps: int) -> None:
        stream = self.loader.steps(2, 1, Shard(), start=start)
        for _ in range(steps):
            self.trainer.train_step(next(stream), term_weights(self.family.loss_terms, self.trainer.recipe.loss), 1e-3)
        stream.close()

    def state(self) -> dict[str, Any]:
        """Return everything that a step depends on."""
        trainer, device = self.trainer, self.trainer.accelerator.device
        kept = {"random": torch.get_rng_state(), "groups": [_plain(group) for group in trainer.optimizer.param_groups]}
        if device.type == "cuda":
            kept["random on the card"] = torch.cuda.get_rng_state(device)
        if trainer.accelerator.scaler is not None:
            kept["scaler"] = trainer.accelerator.scaler.state_dict()
        for name, parameter in trainer.trainable_parameters.items():
            kept[name] = parameter.detach().clone()
            kept |= {f"{name}/{key}": value.clone() for key, value in trainer.optimizer.state[parameter].items()}
            if trainer.ema is not None:
                kept[f"{name}/mean"] = trainer.ema.averages[name].clone()
        return kept | {"ema": trainer.ema and trainer.ema.steps, "overflows": trainer.overflows}


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            found = other[key]
            assert (found.dtype, found.device, found.shape) == (value.dtype, value.device, value.shape), key
            assert torch.equal(found, value), key
        else:
            assert other[key] == value, key


@pytest.mark.parametrize("name", ["fp32", "bf16", "pure-fp16"])
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_what_is_restored_is_what_was_saved_and_goes_on_alike(
    workspace: Path, tmp_path: Path, mode: str, name: Any
) -> None:
    """pure-fp16 has its own optimizer, with compensations and a loss scale among its settings."""
    adapt: dict[str, Any] = {"dropout": 0.3} if mode == "lora" else {"mode": "full", "rank": 16, "alpha": 32}
    recipe = recipe_for(workspace, adapt=adapt, train={"ema_decay": 0.9})
    run, precision = Run.create(tmp_path / "run", recipe), Precision(name, "a test")
    first = TrainingParts(recipe, run, precision)
    first.train_step(0, 3)
    first.checkpoints.save(TrainingProgress(3, best_step=2, best_loss=0.1, evaluations_since_best=4))
    saved = first.state()
    first.train_step(3, 2)

    second = TrainingParts(recipe, run, precision)
    assert second.checkpoints.restore() == TrainingProgress(3, best_step=2, best_loss=0.1, evaluations_since_best=4)
    assert_same(second.state(), saved)
    moments = {key for key in saved if "/" in key}
    assert {key.rpartition("/")[2] for key in moments} >= {"exp_avg", "exp_avg_sq", "step", "mean"}
    second.train_step(3, 2)
    assert_same(second.state(), first.state())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "pure-fp16"])
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_on_a_card_it_is_restored_to_where_it_was(workspace: Path, tmp_path: Path, mode: str, name: Any) -> None:
    """The fused optimizer counts its steps on the GPU, fp16 has a scaler, and dropout a random state of the GPU."""
    adapt: dict[str, Any] = {"dropout": 0.3} if mode == "lora" else {"mode": "full", "rank": 16, "alpha": 32}
    recipe = recipe_for(workspace, adapt=adapt, train={"ema_decay": 0.9, "device": "cuda"})
    run, precision = Run.create(tmp_path / "run", recipe), Precision(name, "a test")
    first = TrainingParts(recipe, run, precision, "cuda:0")
    first.train_step(0, 3)
    first.checkpoints.save(TrainingProgress(3))
    saved = first.state()
    first.train_step(3, 2)
    second = TrainingParts(recipe, run, precision, "cuda:0")
    second.checkpoints.restore()
    assert_same(second.state(), saved)
    second.train_step(3, 2)
    for key, value in first.state().items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(second.state()[key], value, rtol=1e-3, atol=1e-4, msg=key)


def test_a_run_without_a_checkpoint_begins_anew(workspace: Path, tmp_path: Path) -> None:
    recipe = recipe_for(workspace, train={"steps": 2})
    whole = learn(tmp_path / "whole", recipe)
    begun = Run.create(tmp_path / "begun", recipe)
    begun.log_metrics({"step": 1, "loss": 9.0})
    go_on(begun.folder)
    assert metrics(begun.folder) == metrics(whole.folder)
    assert contents(begun.adapter) == contents(whole.adapter)


def test_half_written_checkpoints_are_removed_and_strangers_are_not(copied: Run) -> None:
    leftovers = [copied.folder / "checkpoints" / ".step-000009.partial", copied.folder / ".adapter.partial"]
    for leftover in leftovers:
        leftover.mkdir()
        (leftover / STATE).write_text("half")
    (copied.folder / ".0123456789ab.tmp").write_text("half")
    (copied.folder / ".gitignore").write_text("*")
    go_on(copied.folder)
    assert {path.name for path in copied.folder.glob(".*")} == {".gitignore"}
    assert not list((copied.folder / "checkpoints").glob(".*"))


# Which are kept


def test_the_last_and_the_best_are_kept(workspace: Path, tmp_path: Path) -> None:
    """The learning rate is so high that the evaluation soon gets worse."""
    recipe = recipe_for(
        workspace,
        data={"evaluation": str(workspace / "evaluation")},
        train={"steps": 12, "evaluate_every": 1, "keep_checkpoints": 2, "learning_rate": 0.05, "schedule": "constant"},
    )
    run = learn(tmp_path / "run", recipe)
    losses = {
        row["step"]: row["evaluation"]["loss"]
        for row in map(json.loads, metrics(run.folder))
        if "evaluation" in row and row["step"] > 0
    }
    best = min(losses, key=lambda step: losses[step])
    assert best < 11, "the test needs a best one that is not among the last"
    assert checkpoint_steps(run) == [best, 11, 12]
    last = load_file(checkpoint_folder(run, 12) / "adapter" / "adapter_model.safetensors")
    result = load_file(run.adapter / "adapter_model.safetensors")
    assert all(torch.equal(tensor, result[name]) for name, tensor in last.items()), "without early stopping, the last"


def early(workspace: Path) -> Recipe:
    return recipe_for(
        workspace,
        data={"evaluation": str(workspace / "evaluation")},
        train={
            "steps": 40,
            "evaluate_every": 1,
            "save_every": 3,
            "keep_checkpoints": 1,
            "early_stopping_patience": 3,
            "learning_rate": 0.05,
            "schedule": "constant",
        },
    )


def test_early_stopping_stops_and_gives_the_best(workspace: Path, tmp_path: Path) -> None:
    run = learn(tmp_path / "run", early(workspace))
    rows = [json.loads(line) for line in metrics(run.folder)]
    losses = [row["evaluation"]["loss"] for row in rows if "evaluation" in row and row["step"] > 0]
    assert len(losses) < 40 and len(losses) == 1 + losses.index(min(losses)) + 3
    best = 1 + losses.index(min(losses))
    assert contents(run.adapter) == contents(checkpoint_folder(run, best) / "adapter")
    assert f"no better evaluation since step {best}: stopping early" in (run.folder / "log.txt").read_text()


def test_killed_between_the_last_checkpoint_and_the_result_nothing_more_is_learned(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = learn(tmp_path / "whole", early(workspace))

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    for name, recipe in {"early": early(workspace), "steps": recipe_for(workspace, train={"steps": 3})}.items():
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(CheckpointManager, "publish", die)
            learn(tmp_path / name, recipe)
        before = metrics(tmp_path / name)
        assert go_on(tmp_path / name).rows == []
        assert metrics(tmp_path / name) == before
        assert Run.open(tmp_path / name).is_finished
    assert contents(tmp_path / "early" / "adapter") == contents(whole.adapter)


# What is refused


def rewrite_manifest(workspace: Path) -> None:
    path = workspace / "prepared" / "manifest.jsonl"
    path.write_text(path.read_text().replace("good morning", "good evening"))


def drop_clip(workspace: Path) -> None:
    path = workspace / "evaluation" / "manifest.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


def other_model(workspace: Path) -> None:
    shutil.rmtree(workspace / "model")
    save_tiny(workspace / "model", hidden=32, seed=1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (rewrite_manifest, r"another training data \(6 utterances \w+, now 6 utterances \w+\)"),
        (drop_clip, r"another evaluation data \(4 utterances \w+, now 3 utterances \w+\)"),
        (other_model, r"another base model \(\w+, now \w+\)"),
    ],
)
def test_another_base_or_other_data_are_refused(
    workspace: Path, copied: Run, tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    """The content counts, not the name of the folder."""
    moved = Path(shutil.copytree(workspace, tmp_path / "moved"))
    text = (copied.folder / "config.yaml").read_text().replace(str(workspace), str(moved))
    (copied.folder / "config.yaml").write_text(text)
    for path in copied.folder.glob(f"checkpoints/*/{FACTS}"):
        path.write_text(path.read_text().replace(str(workspace), str(moved)))
    change(moved)
    before = contents(copied.folder)
    with pytest.raises(TrainingError, match=said):
        go_on(copied.folder)
    after = contents(copied.folder)
    assert {name: data for name, data in after.items() if name != "log.txt"} == {
        name: data for name, data in before.items() if name != "log.txt"
    }, "it stays as it was"


def test_data_may_move(workspace: Path, copied: Run, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(workspace / "prepared", tmp_path / "moved"))
    go_on(copied.folder, [f"data.train={moved}"])
    assert Run.open(copied.folder).is_finished


def test_another_prompt_codec_or_precision_is_refused(copied: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(HiggsV2, "prompt_revision", property(lambda _: "0123"))
        with pytest.raises(TrainingError, match=r"another prompt \(\w+, now 0123\)"):
            go_on(copied.folder)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "choose_precision", lambda *_: Precision("bf16", "a test"))
        with pytest.raises(TrainingError, match=r"another precision \(fp32, now bf16\)"):
            go_on(copied.folder)


def test_a_recipe_that_was_changed_by_hand_is_refused(copied: Run) -> None:
    changed = copied.recipe.model_copy(update={"train": copied.recipe.train.model_copy(update={"learning_rate": 0.5})})
    (copied.folder / "config.yaml").write_text(dump_recipe(changed))
    with pytest.raises(TrainingError, match=r"made with another train\.learning_rate"):
        go_on(copied.folder)


def drop_tensor(kind: str) -> Callable[[Path], None]:
    def drop(folder: Path) -> None:
        tensors = load_file(folder / STATE)
        del tensors[next(name for name in tensors if name.startswith(kind))]
        save_file(tensors, folder / STATE)

    return drop


def add_tensor(folder: Path) -> None:
    save_file(load_file(folder / STATE) | {"weight/other": torch.ones(1)}, folder / STATE)


def reshape_tensor(folder: Path) -> None:
    tensors = load_file(folder / STATE)
    name = next(name for name in tensors if name.startswith("weight/"))
    save_file(tensors | {name: tensors[name].flatten()[:1]}, folder / STATE)


def truncate(name: str) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])

    return cut


@pytest.mark.parametrize(
    "damage",
    [
        *(drop_tensor(kind) for kind in ("weight/", "ema/", "optimizer/exp_avg/", "optimizer/step/", "rng/cpu")),
        add_tensor,
        reshape_tensor,
        truncate(STATE),
        truncate(FACTS),
        lambda folder: (folder / FACTS).unlink(),
        lambda folder: (folder / STATE).unlink(),
        lambda folder: (folder / FACTS).write_text("{}"),
    ],
)
def test_a_damaged_one_is_refused(copied: Run, damage: Callable[[Path], None]) -> None:
    bad = newest(copied)
    damage(bad)
    with pytest.raises(TrainingError, match="step-000004 is damaged") as caught:
        go_on(copied.folder)
    assert caught.value.hint.startswith(f"rm -r {bad} ")


def test_the_one_before_it_will_do(copied: Run, unfinished: Path) -> None:
    shutil.rmtree(newest(copied))
    go_on(copied.folder)
    assert metrics(copied.folder) == metrics(unfinished)


# What cannot be written


@pytest.mark.slow
def test_a_full_disk_stops_with_a_word_and_leaves_the_last_checkpoint(workspace: Path, tmp_path: Path) -> None:
    """A limit on the size of the child's files acts as a full disk."""
    recipe = recipe_for(workspace, train={"steps": 8, "save_every": 2}).model_dump(mode="json")
    whole, full = tmp_path / "whole", tmp_path / "full"
    with TrainingForks(workspace, tmp_path / "log") as forks:
        assert forks.train(whole, recipe=recipe) == 0
        limit = (checkpoint_folder(Run.open(whole), 8) / STATE).stat().st_size // 2
        assert forks.train(full, recipe=recipe, deadly=("fsync", 20)) == -signal.SIGKILL
        good = checkpoint_steps(Run.open(full))
        assert good and good[-1] < 8
        before = contents(full / "checkpoints" / f"step-{good[-1]:06d}")

        assert forks.train(full, file_limit=limit) == 1
        said = forks.log.read_text()
        assert f"the checkpoint of step {good[-1] + 2} could not be written to {full}: " in said
        assert "File too large" in said and "Traceback" not in said
        assert f"make room there, then go on from step {good[-1]}: myna train --resume {full}" in said
        assert checkpoint_steps(Run.open(full)) == good and not list(full.glob("checkpoints/.*"))
        assert contents(full / "checkpoints" / f"step-{good[-1]:06d}") == before

        assert forks.train(full) == 0
    assert metrics(full) == metrics(whole)
    assert contents(full / "adapter") == contents(whole / "adapter")


@pytest.mark.parametrize("place", ["checkpoints", "metrics.jsonl", "log.txt"])
def test_a_folder_that_cannot_be_written_stops_with_a_word(workspace: Path, tmp_path: Path, place: str) -> None:
    """A folder is in the place of a file, and a file in the place of a folder, where not even root can write."""
    recipe = recipe_for(workspace, train={"steps": 2})
    run = Run.create(tmp_path / "run", recipe)
    if place == "checkpoints":
        (run.folder / place).write_text("")
    else:
        (run.folder / place).mkdir()
    with pytest.raises(TrainingError, match=rf"(could not be written|cannot write) to {run.folder}") as caught:
        run_training(recipe, run, Notes())
    assert f"myna train --resume {run.folder}" in caught.value.hint
    assert not run.is_finished


def test_what_is_read_back_otherwise_is_no_checkpoint(copied: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(tensors: dict[str, torch.Tensor], path: Path) -> None:
        name = next(name for name in tensors if name.startswith("optimizer/exp_avg/"))
        save_file(tensors | {name: tensors[name] + 1e-9}, path)

    monkeypatch.setattr(checkpoint, "save_file", flip)
    with pytest.raises(TrainingError, match="was read back otherwise than it was written"):
        go_on(copied.folder)
    assert checkpoint_steps(copied) == [2, 4]
