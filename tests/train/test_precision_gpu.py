"""Every precision on a real GPU, with recomputed layers and modules trained in full."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from benchmarks.precision import draw_steps, gradients_are_finite, learn, make_recipe, make_trainer
from torch import nn

from myna.core.config import TrainSettings
from myna.models import open_family
from myna.models.base import LossSums
from myna.models.higgs_v2.tiny import save_tiny
from myna.train.loss import term_weights
from myna.train.optimizer import make_optimizer
from myna.train.precision import Precision, PrecisionName, choose_precision
from myna.train.trainer import MAX_CONSECUTIVE_OVERFLOWS, Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
NAMES = get_args(PrecisionName)
HALF: tuple[PrecisionName, ...] = ("fp16", "pure-fp16")
Make = Callable[[PrecisionName], Trainer]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make(source: Path, tmp_path: Path) -> Make:
    def trainer(name: PrecisionName) -> Trainer:
        recipe = make_recipe(source, name, steps=30)
        return make_trainer(recipe, open_family(str(source)), choose_precision(name, CUDA), CUDA, tmp_path)

    return trainer


def weights_of(trainer: Trainer) -> torch.Tensor:
    return term_weights(trainer.family.loss_terms, trainer.recipe.loss)


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(name: PrecisionName, make: Make) -> None:
    trainer = make(name)
    row = learn(trainer, draw_steps(trainer.family, 30))
    assert row["final_loss"] < row["first_loss"] - 0.1
    assert row["finite_gradients"]
    dtypes = {True: set[torch.dtype](), False: set[torch.dtype]()}
    for parameter in trainer.model.parameters():
        dtypes[parameter.requires_grad].add(parameter.dtype)
    assert dtypes == {True: {trainer.precision.trainable_dtype}, False: {trainer.precision.compute_dtype}}
    assert any("audio_lm_head" in name for name in trainer.trainable_parameters)
    assert any("embed_audio_tokens" in name for name in trainer.trainable_parameters)


@pytest.mark.parametrize("name", NAMES)
def test_losses_come_out_of_accelerate_as_fp32_sums(name: PrecisionName, make: Make) -> None:
    trainer = make(name)
    [[batch, _]] = draw_steps(trainer.family, 1)
    with trainer.accelerator.autocast():
        result = trainer.objective(batch.to(CUDA))
    assert isinstance(result, LossSums)
    assert (result.sums.dtype, result.correct.dtype, result.stops.dtype) == (torch.float32, *[torch.int64] * 2)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_norm_is_that_of_fp32(name: PrecisionName, make: Make) -> None:
    """Clipping uses unscaled gradients, whatever scales them."""

    def first_norm(trainer: Trainer) -> float:
        [step] = draw_steps(trainer.family, 1)
        return trainer.train_step(step, weights_of(trainer), 1e-3)[1]

    assert first_norm(make(name)) == pytest.approx(first_norm(make("fp32")), rel=0.02)


def set_scale(trainer: Trainer, scale: float) -> None:
    if trainer.accelerator.scaler is not None:
        trainer.accelerator.scaler.load_state_dict(trainer.accelerator.scaler.state_dict() | {"scale": scale})
    else:
        trainer.optimizer.param_groups[0]["loss_scale"] = scale


def scale_of(trainer: Trainer) -> float:
    if trainer.accelerator.scaler is not None:
        return float(trainer.accelerator.scaler.get_scale())
    return float(trainer.optimizer.param_groups[0]["loss_scale"])


@pytest.mark.parametrize("name", HALF)
def test_an_overflow_is_skipped_and_the_run_goes_on(name: PrecisionName, make: Make) -> None:
    trainer = make(name)
    steps = draw_steps(trainer.family, 40)
    trainer.train_step(steps[0], weights_of(trainer), 1e-3)
    assert scale_of(trainer) == 2.0**16
    set_scale(trainer, 2.0**33)
    before = {name: parameter.detach().clone() for name, parameter in trainer.trainable_parameters.items()}
    _, norm = trainer.train_step(steps[1], weights_of(trainer), 1e-3)
    assert not math.isfinite(norm)
    assert scale_of(trainer) == 2.0**32
    assert all(torch.equal(before[name], parameter) for name, parameter in trainer.trainable_parameters.items())
    for step in steps[2 : 2 + MAX_CONSECUTIVE_OVERFLOWS]:
        _, norm = trainer.train_step(step, weights_of(trainer), 1e-3)
    assert math.isfinite(norm)
    assert any(not torch.equal(before[name], parameter) for name, parameter in trainer.trainable_parameters.items())
    assert gradients_are_finite(trainer, steps[-1], weights_of(trainer))


@pytest.mark.parametrize("name", ["fp32", "pure-fp16"])
def test_the_optimizer_gives_the_same_bits_every_time(name: PrecisionName) -> None:
    def result() -> list[torch.Tensor]:
        precision, generator = Precision(name, "a test"), torch.Generator(CUDA).manual_seed(0)

        def draw() -> torch.Tensor:
            return torch.randn(513, 65, generator=generator, device=CUDA).to(precision.trainable_dtype)

        parameters = [nn.Parameter(draw()) for _ in range(3)]
        optimizer = make_optimizer(parameters, TrainSettings(steps=1, weight_decay=0.1), precision)
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = draw()
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    assert all(torch.equal(a, b) for a, b in zip(result(), result(), strict=True))


def test_adamw_is_fused_and_keeps_its_steps_on_the_card(make: Make) -> None:
    """A checkpoint has to restore them there."""
    trainer = make("bf16")
    [step] = draw_steps(trainer.family, 1)
    trainer.train_step(step, weights_of(trainer), 1e-3)
    optimizer: Any = trainer.optimizer
    assert optimizer.param_groups[0]["fused"]
    assert all(optimizer.state[parameter]["step"].is_cuda for parameter in trainer.trainable_parameters.values())
