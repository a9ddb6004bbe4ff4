"""LoRA on a quantized base: it learns as on the plain base, in less memory, and resumes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open

from myna.core.config import Recipe, parse_recipe
from myna.core.errors import ConfigError, TrainingError
from myna.core.run_folder import Run, checkpoint_folder
from myna.data.loader import Shard
from myna.models import open_family
from myna.models.base import IGNORE_INDEX, Family, RenderedSequence
from myna.models.higgs_v2.family import HiggsV2
from myna.models.higgs_v2.tiny import save_tiny, tiny_config
from myna.models.lora import load_adapter
from myna.models.quantized import quantized_linears
from myna.train import loop
from myna.train.checkpoint import describe_inputs
from myna.train.distributed import init_accelerator
from myna.train.loop import make_loader, run_training
from myna.train.loss import term_weights
from myna.train.memory_plan import LargestBatch, MemoryPlan, check_weights_fit, plan_memory
from myna.train.precision import Precision, PrecisionName
from myna.train.trainer import Trainer
from tests.train.resume_helper import Notes, contents, make_workspace, metrics, recipe_for

KINDS = ("fp8", "int8", "nf4")
CPU = torch.device("cpu")
STEPS, RATE = 60, 4e-3
NEAR = {"fp8": 0.015, "int8": 0.002, "nf4": 0.025}
"""Relative tolerance of a loss against that of the plain base. The largest measured differences: 0.8, 0.06 and 1.1
%."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make clips, a random model, and one whose layers were trained while its embeddings were frozen."""
    folder = make_workspace(tmp_path_factory.mktemp("workspace"))
    held = {"mode": "full", "freeze": ["text_embedding", "audio_embedding"]}
    how = {"steps": 25, "learning_rate": 2e-2, "warmup": 5, "schedule": "constant", "evaluate_every": 25}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "run_preflight", lambda *_, **__: None)
        recipe = recipe_for(folder, adapt=held, train=how)
        run_training(recipe, Run.create(folder / "learned", recipe), Notes())
    return folder


def trainer_for(
    workspace: Path,
    base: str,
    precision: PrecisionName = "fp32",
    source: str = "learned/model",
    **changes: dict[str, Any],
) -> Trainer:
    """Make a trainer without the check of the device, since fp8 is emulated here."""
    model = {"source": str(workspace / source), "quantization": base}
    recipe, decided = recipe_for(workspace, model=model, **changes), Precision(precision, "asked for")
    accelerator = init_accelerator(recipe, decided, CPU, workspace)
    return Trainer.from_recipe(recipe, open_family(recipe.model.source), decided, accelerator, lambda _: None)


def losses(trainer: Trainer, steps: int) -> list[float]:
    recipe = trainer.recipe
    loader = make_loader(recipe, trainer.family, recipe.data.train)
    weights, told = term_weights(trainer.family.loss_terms, recipe.loss), []
    stream = loader.steps(recipe.train.batch_size, 1, Shard())
    for _ in range(steps):
        tally, _ = trainer.train_step(next(stream), weights, RATE)
        told.append(float(tally.metrics(trainer.family.loss_terms, weights)["loss"]))
    stream.close()
    return told


class Curve(NamedTuple):
    first: float
    last: float
    """Mean of the last ten losses, more than an epoch."""


def curve(workspace: Path, base: str) -> Curve:
    told = losses(trainer_for(workspace, base), STEPS)
    return Curve(told[0], sum(told[-10:]) / 10)


# What is learned


@pytest.fixture(scope="module")
def plain(workspace: Path) -> Curve:
    return curve(workspace, "none")


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_the_plain_base(workspace: Path, plain: Curve, kind: str) -> None:
    got = curve(workspace, kind)
    assert got.first == pytest.approx(plain.first, rel=NEAR[kind])
    assert got.last == pytest.approx(plain.last, rel=NEAR[kind])
    # The difference is small against what was learned.
    assert plain.last < 0.9 * plain.first


def test_the_loss_hears_the_layers(workspace: Path, plain: Curve) -> None:
    """Shows that the test above can fail."""
    trainer = trainer_for(workspace, "int8")
    for layer in quantized_linears(trainer.model):
        layer.scale.zero_()
    assert losses(trainer, 1)[0] > 1.5 * plain.first


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16_too_folded_or_not(workspace: Path, plain: Curve, kind: str, fast: bool) -> None:
    trainer = trainer_for(workspace, kind, "bf16", train={"fused_lora": fast})
    assert {layer.dtype for layer in quantized_linears(trainer.model)} == {torch.bfloat16}
    assert losses(trainer, 1)[0] == pytest.approx(plain.first, rel=2 * NEAR[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_every_adapter_learns_and_nothing_else(workspace: Path, kind: str) -> None:
    # With text: what the last layer makes of it is nothing to a loss on audio.
    trainer = trainer_for(workspace, kind, source="model", loss={"text_weight": 1.0})
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    packed = [tensor.clone() for layer in quantized_linears(trainer.model) for tensor in layer.buffers(recurse=False)]
    losses(trainer, 2)  # in the first one A still gets no gradient, since B is zero
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p.detach(), before[name])}
    assert moved == trainer.trainable_parameters.keys() and len(moved) == 2 * 20
    now = [tensor for layer in quantized_linears(trainer.model) for tensor in layer.buffers(recurse=False)]
    assert all(torch.equal(one, other) for one, other in zip(packed, now, strict=True))


def test_recomputed_layers_learn_the_same(workspace: Path) -> None:
    kept, recomputed = (
        losses(trainer_for(workspace, "nf4", train={"gradient_checkpointing": how}), 3) for how in ("none", "full")
    )
    assert recomputed == pytest.approx(kept, rel=1e-6)


def test_what_is_said_counts_weights_and_not_bytes(workspace: Path) -> None:
    said: dict[str, list[str]] = {}
    for base in ("none", *KINDS):
        trainer, told = trainer_for(workspace, base), list[str]()
        Trainer.from_recipe(trainer.recipe, trainer.family, trainer.precision, trainer.accelerator, told.append)
        said[base] = told
    assert "parameters learn" in said["none"][0]
    assert all(told == said["none"] for told in said.values())


# What it takes


def speech(family: Any, text: int, audio: int) -> RenderedSequence:
    ids = np.array([5] * text + [family.config.audio_token_id] * audio)
    codes = np.zeros((audio, 8), np.int64)
    return RenderedSequence("speech", ids, codes, np.full(text + audio, IGNORE_INDEX), codes, (), audio / 25)


def planned(family: Family, base: str, precision: PrecisionName = "bf16", fast: bool = True) -> MemoryPlan:
    how = {"steps": 1, "gradient_checkpointing": "none", "fused_lora": fast}
    tree = {"model": {"source": "x", "quantization": base}, "data": {"train": "y"}, "train": how, "adapt": {"rank": 4}}
    recipe = parse_recipe(tree, where="test")
    return plan_memory(family, recipe, Precision(precision, ""), CPU, LargestBatch((speech(family, 30, 60),), 90))


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_plan_counts_what_is_there(workspace: Path, kind: str) -> None:
    trainer = trainer_for(workspace, kind)
    frozen = [*trainer.objective.buffers(), *(p for p in trainer.model.parameters() if not p.requires_grad)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in frozen}
    assert planned(trainer.family, kind, "fp32").frozen == sum(storages.values())


def test_the_memory_plan_is_smaller_by_what_is_frozen() -> None:
    family = HiggsV2("wide", tiny_config(hidden=512, layers=4), None)
    # Folded, they would also have room for the adapters, which on so small a model is not little.
    plans = {base: planned(family, base, fast=False) for base in ("none", *KINDS)}
    before, weights = plans["none"], 4 * (3 * 512 * 512 + 6 * 512 * 1024)
    for kind, bytes_each in (("fp8", 2.0), ("int8", 1.0), ("nf4", 0.516)):
        now = plans[kind]
        assert f"frozen, {kind}" in now.table()
        assert before.frozen - now.frozen == pytest.approx((2 - bytes_each) * weights, abs=0.02 * weights)
        assert (now.trained, now.gradients, now.optimizer_state) == (
            before.trained,
            before.gradients,
            before.optimizer_state,
        )
        # Not one weight that was turned back is kept, though a product has the use of a few at a time.
        assert abs(now.activations - before.activations) < 8 * 512 * 1024


def test_what_does_not_fit_is_told_of_fewer_bits() -> None:
    family = HiggsV2("wide", tiny_config(hidden=512, layers=4), None)
    for base, hint in (("none", "--set model.quantization=nf4"), ("nf4", "--set model.source=")):
        with pytest.raises(TrainingError) as told:
            check_weights_fit(replace(planned(family, base), available=2**20))
        assert told.value.hint.startswith(hint)


def test_processes_do_not_send_the_packed_weights_around(workspace: Path) -> None:
    objective = trainer_for(workspace, "nf4").objective
    ignored = set(objective._ddp_params_and_buffers_to_ignore)
    assert {name for name, _ in objective.named_buffers()} == ignored
    assert sum(name.endswith(".codes") for name in ignored) == 20


# What is refused


@pytest.mark.parametrize(("adapt", "reason"), [({"mode": "full"}, "adapt.mode: full"), ({"dora": True}, "adapt.dora")])
@pytest.mark.parametrize("base", KINDS)
def test_a_base_in_fewer_bits_that_would_be_trained_is_refused(adapt: dict[str, Any], reason: str, base: str) -> None:
    tree = {
        "model": {"source": "x", "quantization": base},
        "data": {"train": "y"},
        "train": {"steps": 1},
        "adapt": adapt,
    }
    with pytest.raises(ConfigError) as told:
        parse_recipe(tree, where="test")
    assert reason in told.value.what and f"model.quantization: {base}" in told.value.what
    assert "--set model.quantization=none" in told.value.hint
    assert parse_recipe(tree | {"model": {"source": "x"}}, where="test").model.quantization == "none"


def test_fp8_is_refused_before_anything_is_read(workspace: Path, tmp_path: Path) -> None:
    recipe = recipe_for(
        workspace, model={"source": str(workspace / "model"), "quantization": "fp8"}, data={"train": "nowhere"}
    )
    with pytest.raises(ConfigError, match="fp8"):
        run_training(recipe, Run.create(tmp_path / "run", recipe), Notes())


# Going on


@pytest.fixture(scope="module")
def runs(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train six steps, and again resumed after the third; both with the whole preflight."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = nf4_recipe(workspace)
    run_training(recipe, Run.create(folder / "whole", recipe), Notes())
    stopped = Run.open(Path(shutil.copytree(folder / "whole", folder / "stopped")))
    shutil.rmtree(stopped.adapter)
    shutil.rmtree(checkpoint_folder(stopped, 6))
    return folder


def nf4_recipe(workspace: Path) -> Recipe:
    model = {"source": str(workspace / "learned" / "model"), "quantization": "nf4", "check_pretrained": False}
    return recipe_for(workspace, model=model, train={"save_every": 3})


def test_it_goes_on_bit_by_bit(runs: Path) -> None:
    run = Run.open(runs / "stopped")
    run_training(run.recipe, run, Notes(), resume=True)
    assert metrics(runs / "stopped") == metrics(runs / "whole")
    assert contents(runs / "stopped" / "adapter") == contents(runs / "whole" / "adapter")


def test_it_does_not_go_on_with_another_base(runs: Path) -> None:
    for base in ("none", "int8"):
        with pytest.raises(TrainingError, match=r"another model\.quantization"):
            Run.open(runs / "whole", [f"model.quantization={base}"])


def test_another_model_under_it_shows(workspace: Path) -> None:
    """Packed weights are not parameters, and are part of the base model's fingerprint nevertheless."""
    trainer = trainer_for(workspace, "nf4")
    loader = make_loader(trainer.recipe, trainer.family, trainer.recipe.data.train)
    before = describe_inputs(trainer, loader, None)
    assert describe_inputs(trainer_for(workspace, "nf4"), loader, None) == before
    layer = next(quantized_linears(trainer.model))
    layer.codes[3] ^= 1
    assert describe_inputs(trainer, loader, None)["base model"] != before["base model"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_model_is_known_folded_or_not(workspace: Path, kind: str) -> None:
    """`train.fused_lora`, which joins layers, may change between starts of a run."""
    loader = make_loader(recipe_for(workspace), open_family(str(workspace / "model")), workspace / "prepared")
    one, other = (
        describe_inputs(trainer_for(workspace, kind, train={"fused_lora": fast}), loader, None)
        for fast in (True, False)
    )
    assert one == other


def test_a_checkpoint_holds_what_was_learned_and_no_base(runs: Path) -> None:
    for path in (runs / "whole").rglob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
        assert names
        assert not [name for name in names if "lora_" not in name and not name.startswith("rng/")], path


def test_its_adapter_opens_on_the_plain_model(workspace: Path, runs: Path) -> None:
    family = open_family(str(workspace / "learned" / "model"))
    model = family.load_model(dtype=torch.float32, device="cpu", text_head=False)
    opened = load_adapter(model, runs / "whole" / "adapter")
    assert not list(quantized_linears(opened))


def test_odd_sizes_train_as_well(workspace: Path) -> None:
    """24 x 24 and 12 x 24 weights are no multiples of a block."""
    save_tiny(workspace / "odd", hidden=24)
    plain = losses(trainer_for(workspace, "none", source="odd"), 2)
    for kind in KINDS:
        assert losses(trainer_for(workspace, kind, source="odd"), 2) == pytest.approx(plain, rel=1e-3)
