"""Gradient checkpointing: recomputed layers give the same gradients, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from myna.core.run_folder import Run
from myna.data.loader import Shard
from myna.models import open_family
from myna.models.higgs_v2.tiny import save_tiny
from myna.train import loop, memory_plan
from myna.train.distributed import init_accelerator
from myna.train.loop import make_loader, run_training
from myna.train.loss import LossAccumulator, term_weights
from myna.train.precision import Precision
from myna.train.trainer import Trainer
from tests.train.resume_helper import make_workspace, recipe_for


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model of four layers, so that every second layer is not every layer."""
    folder = make_workspace(tmp_path_factory.mktemp("workspace"))
    save_tiny(folder / "deep", hidden=32, layers=4)
    return folder


def gradients(
    workspace: Path, checkpointing: Any, adapt: dict[str, Any], fast: bool = False
) -> tuple[dict[str, Any], int]:
    recipe = recipe_for(
        workspace,
        model={"source": str(workspace / "deep")},
        adapt=adapt,
        loss={"text_weight": 0.5},
        train={"gradient_checkpointing": checkpointing, "fused_lora": fast},
    )
    precision = Precision("fp32", "a test")
    accelerator = init_accelerator(recipe, precision, torch.device("cpu"), workspace)
    family = open_family(recipe.model.source)
    trainer = Trainer.from_recipe(recipe, family, precision, accelerator, lambda _: None)
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    for layer in family.layers(accelerator.unwrap_model(trainer.objective)):
        layer.register_forward_pre_hook(count)
    stream = make_loader(recipe, family, recipe.data.train).steps(2, 1, Shard())
    passes, tally = next(stream), LossAccumulator.zeros(len(family.loss_terms))
    stream.close()
    tally.counts = torch.stack([batch.counts for batch in passes]).sum(0)
    torch.manual_seed(5)
    trainer.backward(passes, term_weights(family.loss_terms, recipe.loss), tally)
    found: dict[str, Any] = {name: parameter.grad for name, parameter in trainer.trainable_parameters.items()}
    return found | {"losses": tally.totals.sums}, runs


@pytest.mark.parametrize(
    "adapt",
    [
        {"dropout": 0.5, "train_modules": ["audio_head", "audio_embedding"]},
        {"dora": True, "dropout": 0.1},
        {"mode": "full", "rank": 16, "alpha": 32},
    ],
    ids=["lora", "dora", "full"],
)
def test_gradients_are_the_same(workspace: Path, adapt: dict[str, Any]) -> None:
    plain, plain_runs = gradients(workspace, "none", adapt)
    assert plain_runs == 2 * 4, "two passes through four layers"
    assert all(gradient is not None for gradient in plain.values())
    for checkpointing, extra in (("full", 4), (2, 2)):
        found, runs = gradients(workspace, checkpointing, adapt)
        assert runs == 2 * (4 + extra), "the layers really are computed again"
        assert found.keys() == plain.keys()
        for name, gradient in plain.items():
            assert torch.equal(found[name], gradient), (checkpointing, name)


def test_gradients_of_fast_layers_are_the_same(workspace: Path) -> None:
    """A recomputed layer gets its input in one piece instead of a pending addition."""
    plain, _ = gradients(workspace, "none", {}, fast=True)
    for checkpointing, extra in (("full", 4), (2, 2)):
        found, runs = gradients(workspace, checkpointing, {}, fast=True)
        assert runs == 2 * (4 + extra)
        for name, gradient in plain.items():
            assert torch.equal(found[name], gradient), (checkpointing, name)


class RecomputeObserver:
    """Observer that keeps messages and the number of layers recomputed in every step."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.losses: list[float] = []
        self.recomputed: list[int] = []

    def on_message(self, text: str) -> None:
        self.said.append(text)

    def on_start(self, *_: int) -> None: ...

    def on_metrics(self, row: dict[str, Any]) -> None:
        self.losses.append(row.get("loss", math.nan))


def run(
    workspace: Path, folder: Path, patch: pytest.MonkeyPatch, *, dry_run: bool = False, **how: Any
) -> RecomputeObserver:
    recipe = recipe_for(
        workspace, model={"source": str(workspace / "deep"), "check_pretrained": False}, train={"steps": 2} | how
    )
    seen, learn = RecomputeObserver(), Trainer.train_step

    def note(self: Trainer, *given: Any) -> Any:
        seen.recomputed.append(self.accelerator.unwrap_model(self.objective).recompute)
        return learn(self, *given)

    with patch.context() as inside:
        inside.setattr(Trainer, "train_step", note)
        run_training(recipe, Run.create(folder, recipe), seen, dry_run=dry_run)
    return seen


def total(said: list[str]) -> int:
    """Total bytes, from the table."""
    number, unit = next(line for line in said if line.startswith("  in all")).split()[2:4]
    return int(float(number) * 2 ** {"MiB": 20, "GiB": 30}[unit])


def test_a_training_recomputes_what_its_plan_has_chosen(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = run(workspace, tmp_path / "free", monkeypatch)
    assert any("no layer recomputed, since everything fits" in line for line in free.said)
    assert free.recomputed == [0, 0]
    whole = total(free.said)
    monkeypatch.setattr(memory_plan, "available_memory", lambda _: int(0.8 * whole / memory_plan.USABLE_MEMORY_SHARE))
    tight = run(workspace, tmp_path / "tight", monkeypatch)
    number = tight.recomputed[0]
    assert 0 < number < 4 and tight.recomputed == [number, number]
    told = f"{number} of 4 layers recomputed, the fewest that fit"
    assert any(told in line for line in tight.said) and told in (tmp_path / "tight" / "log.txt").read_text()
    assert tight.losses == free.losses, "and learns the same"
    dry = run(workspace, tmp_path / "dry", monkeypatch, dry_run=True)
    assert any(told in line for line in dry.said) and not dry.recomputed


def test_all_ranks_recompute_what_the_fullest_must(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "gather_object", lambda ours: [*ours, 3])
    assert run(workspace, tmp_path / "run", monkeypatch).recomputed == [3, 3]
