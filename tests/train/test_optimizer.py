"""Optimizers: AdamW as in torch, and fp16 weights that learn like fp32 ones."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.precision import draw_steps, learn, make_recipe, make_trainer
from torch import nn

from myna.core.config import TrainSettings
from myna.core.errors import TrainingError
from myna.models import open_family
from myna.models.higgs_v2.tiny import save_tiny
from myna.train import optimizer as optimizer_module
from myna.train.optimizer import INITIAL_LOSS_SCALE, MAX_LOSS_SCALE, KahanAdamW, make_optimizer
from myna.train.precision import Precision, PrecisionName
from myna.train.trainer import MAX_CONSECUTIVE_OVERFLOWS

SETTINGS = TrainSettings(steps=1, learning_rate=1e-3, weight_decay=0.1, betas=(0.8, 0.95))


def weight(*values: float, dtype: torch.dtype = torch.float16) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def kahan(*parameters: nn.Parameter, **settings: Any) -> KahanAdamW:
    return KahanAdamW(parameters, **({"lr": 1e-3, "weight_decay": 0.0} | settings))


def set_gradient(optimizer: KahanAdamW, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    parameter.grad = (gradient * optimizer.loss_scale).to(parameter.dtype)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "pure-fp16"])
def test_the_precision_chooses_and_the_settings_arrive(name: PrecisionName) -> None:
    precision = Precision(name, "a test")
    optimizer = make_optimizer([nn.Parameter(torch.ones(3, dtype=precision.trainable_dtype))], SETTINGS, precision)
    assert isinstance(optimizer, KahanAdamW if name == "pure-fp16" else torch.optim.AdamW)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (1e-3, 0.1, (0.8, 0.95))


def test_off_cuda_adamw_takes_all_tensors_at_once() -> None:
    optimizer = make_optimizer([weight(1.0, dtype=torch.float32)], SETTINGS, Precision("fp32", "a test"))
    assert (optimizer.param_groups[0]["foreach"], optimizer.param_groups[0]["fused"]) == (True, False)


@pytest.mark.parametrize("name", ["fp32", "pure-fp16"])
def test_the_same_gradients_give_the_same_bits(name: PrecisionName) -> None:
    def learn() -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        precision = Precision(name, "a test")
        parameters = [
            nn.Parameter(torch.randn(33, 7, generator=generator).to(precision.trainable_dtype)) for _ in range(3)
        ]
        optimizer = make_optimizer(parameters, SETTINGS, precision)
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.randn(33, 7, generator=generator).to(precision.trainable_dtype)
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in parameters])

    assert torch.equal(learn(), learn())


def regress(optimizer_of: Any, dtype: torch.dtype, *, rate: float, steps: int) -> tuple[torch.Tensor, float]:
    """Learn a linear map from noisy gradients; return the weights and their distance from the map."""
    generator = torch.Generator().manual_seed(0)
    truth, start = torch.randn(2, 64, generator=generator)
    parameter = nn.Parameter(start.half().to(dtype))
    optimizer = optimizer_of([parameter], lr=rate, betas=(0.9, 0.99), weight_decay=0.01)
    for _ in range(steps):
        gradient = parameter.detach().float() - truth + 0.1 * torch.randn(64, generator=generator)
        scale = optimizer.loss_scale if isinstance(optimizer, KahanAdamW) else 100.0  # or fp16 would end in NaN
        parameter.grad = (scale / 100 * gradient).to(dtype)
        optimizer.step()
    learned = parameter.detach().float()
    return learned, float((learned - truth).norm())


def test_small_updates_are_not_lost() -> None:
    """Steps of 2e-5 are below half the spacing of fp16 numbers near 1, and below most of it near 0.1."""
    exact, error = regress(torch.optim.AdamW, torch.float32, rate=2e-5, steps=3000)
    followed, own_error = regress(KahanAdamW, torch.float16, rate=2e-5, steps=3000)
    _, stalled_error = regress(torch.optim.AdamW, torch.float16, rate=2e-5, steps=3000)
    assert ((exact - followed).abs() < 2.0**-11 * exact.abs() + 1e-4).all()  # no more than rounding, and a little
    assert own_error == pytest.approx(error, rel=0.001)
    start = regress(torch.optim.AdamW, torch.float32, rate=0.0, steps=1)[1]
    assert start - error > 0.3
    assert start - stalled_error < 0.5 * (start - error)


@pytest.mark.parametrize("value", [1.0, 0.05, 1e-4, 1e-6, 0.0, 300.0])
def test_weights_of_any_size_add_up(value: float) -> None:
    """The weight and its compensation together are within a few parts in a million of fp32's, also among subnormals."""
    rate = max(value, 1e-3) * 1e-5
    parameter, exact = weight(value), weight(value, dtype=torch.float32)
    exact.data.copy_(parameter.data)
    optimizer = kahan(parameter, lr=rate)
    plain = torch.optim.AdamW([exact], lr=rate, weight_decay=0.0)
    start = exact.item()
    for _ in range(1000):
        set_gradient(optimizer, parameter, torch.full((1,), -0.01))
        exact.grad = torch.full((1,), -0.01)
        optimizer.step()
        plain.step()
    together = parameter.item() + optimizer.state[parameter]["compensation"].item() * optimizer_module.COMPENSATION_UNIT
    assert together - start == pytest.approx(1000 * rate, rel=0.02)
    assert together - start == pytest.approx(exact.item() - start, rel=0.02)


def test_weight_decay_adds_up_too() -> None:
    parameter = weight(1.0)
    optimizer = kahan(parameter, lr=1e-4, weight_decay=0.1)
    for _ in range(1000):
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert parameter.item() == pytest.approx((1 - 1e-5) ** 1000, abs=1e-3)
    assert parameter.item() != 1.0


def test_what_it_keeps_is_tensors_and_two_numbers() -> None:
    parameter = weight(1.0, 2.0)
    optimizer = kahan(parameter)
    set_gradient(optimizer, parameter, torch.tensor([0.1, 0.2]))
    optimizer.step()
    state = optimizer.state[parameter]
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    assert {key: value.dtype for key, value in state.items()} == {
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
        "step": torch.float32,
        "compensation": torch.float16,
    }
    assert {key: optimizer.param_groups[0][key] for key in ("loss_scale", "clean_steps")} == {
        "loss_scale": INITIAL_LOSS_SCALE,
        "clean_steps": 1,
    }


def test_it_goes_on_from_what_was_kept_bit_for_bit() -> None:
    def learn(optimizer: KahanAdamW, parameter: nn.Parameter, steps: range) -> None:
        for step in steps:
            gradient = 0.1 * torch.randn(8, generator=torch.Generator().manual_seed(step))
            set_gradient(optimizer, parameter, gradient if step != 7 else torch.full((8,), math.inf))
            optimizer.step()

    whole = nn.Parameter(torch.ones(8, dtype=torch.float16))
    optimizer = kahan(whole)
    learn(optimizer, whole, range(20))

    first = nn.Parameter(torch.ones(8, dtype=torch.float16))
    before = kahan(first)
    learn(before, first, range(10))
    second = nn.Parameter(first.detach().clone())
    after = kahan(second)
    after.state[second] = copy.deepcopy(before.state[first])
    after.param_groups[0] |= {key: before.param_groups[0][key] for key in ("loss_scale", "clean_steps")}
    learn(after, second, range(10, 20))
    assert torch.equal(whole, second)
    assert after.loss_scale == optimizer.loss_scale == INITIAL_LOSS_SCALE / 2


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_is_skipped_and_halves_the_scale(bad: float) -> None:
    parameter, other = weight(1.0, 2.0), weight(3.0)
    optimizer = kahan(parameter, other, lr=0.01)
    for value in (0.1, bad, 0.1):
        set_gradient(optimizer, parameter, torch.tensor([value, 0.1]))
        set_gradient(optimizer, other, torch.tensor([0.1]))
        before = parameter.detach().clone(), other.detach().clone()
        norm = optimizer.clip(1.0)
        optimizer.step()
        assert math.isfinite(norm) == math.isfinite(value)
        assert torch.equal(before[0], parameter) == (not math.isfinite(value))
        assert torch.equal(before[1], other) == (not math.isfinite(value))
    assert optimizer.loss_scale == INITIAL_LOSS_SCALE / 2
    assert optimizer.param_groups[0]["clean_steps"] == 1
    assert optimizer.state[other]["step"].item() == 2


def test_the_scale_grows_back_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "LOSS_SCALE_GROWTH_STEPS", 3)
    parameter = weight(1.0)
    optimizer = kahan(parameter)
    scales = []
    for step in range(40):
        set_gradient(optimizer, parameter, torch.tensor([math.inf if step == 1 else 1e-5]))
        optimizer.step()
        scales.append(optimizer.loss_scale)
    assert scales[:5] == [INITIAL_LOSS_SCALE, *[INITIAL_LOSS_SCALE / 2] * 3, INITIAL_LOSS_SCALE]
    assert scales[-1] == MAX_LOSS_SCALE


def test_the_norm_is_that_of_the_true_gradient_and_clipping_holds_to_it() -> None:
    """Measured through momentum: after one step it is (1 - beta1) times the clipped gradient."""
    parameters = [weight(1.0, 1.0), weight(1.0)]
    unused = weight(1.0)
    optimizer = kahan(*parameters, unused)
    for parameter, gradient in zip(parameters, ([0.3, 0.0], [0.4]), strict=True):
        set_gradient(optimizer, parameter, torch.tensor(gradient))
    scaled = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    assert optimizer.clip(0.05) == pytest.approx(0.5, rel=1e-3)
    assert all(torch.equal(a, b.grad) for a, b in zip(scaled, parameters, strict=True) if b.grad is not None)
    optimizer.step()
    momentum = torch.cat([optimizer.state[parameter]["exp_avg"] for parameter in parameters])
    assert torch.allclose(momentum, 0.1 * torch.tensor([0.03, 0.0, 0.04]), rtol=1e-3)
    assert unused not in optimizer.state and unused.item() == 1.0

    # The limit was for that step alone.
    set_gradient(optimizer, parameters[1], torch.tensor([0.4]))
    before = optimizer.state[parameters[1]]["exp_avg"].clone()
    optimizer.step()
    assert torch.allclose(optimizer.state[parameters[1]]["exp_avg"], 0.9 * before + 0.04, rtol=1e-3)


def test_a_norm_that_fp16_cannot_hold_is_no_overflow() -> None:
    parameter = nn.Parameter(torch.zeros(10_000, dtype=torch.float16))
    optimizer = kahan(parameter)
    parameter.grad = torch.full_like(parameter, 60_000.0)
    assert optimizer.clip(1.0) == pytest.approx(6e6 / INITIAL_LOSS_SCALE, rel=1e-3)


def test_gradients_too_small_for_fp16_survive_through_the_scale() -> None:
    def gradient_of(optimizer: KahanAdamW | None) -> float:
        parameter = weight(1.0) if optimizer is None else optimizer.param_groups[0]["params"][0]
        loss = 1e-9 * (parameter * 1.0).float().sum()
        (optimizer.scale_loss(loss) if optimizer is not None else loss).backward()
        assert parameter.grad is not None
        return parameter.grad.item()

    assert gradient_of(None) == 0.0
    assert gradient_of(kahan(weight(1.0))) / INITIAL_LOSS_SCALE == pytest.approx(1e-9, rel=1e-2)


def test_a_trainer_in_pure_fp16_learns_as_one_in_fp32(tmp_path: Path) -> None:
    """Train on the CPU, where users cannot choose this precision: slow, but the same code."""
    source = save_tiny(tmp_path / "tiny")
    family = open_family(str(source))
    steps = draw_steps(family, 6)
    names: tuple[PrecisionName, ...] = ("fp32", "pure-fp16")
    rows = []
    for name in names:
        recipe = make_recipe(source, name, steps=6)
        trainer = make_trainer(recipe, family, Precision(name, "a test"), torch.device("cpu"), tmp_path)
        assert (trainer.kahan is not None) == (name == "pure-fp16")
        assert {parameter.dtype for parameter in trainer.trainable_parameters.values()} == {
            trainer.precision.trainable_dtype
        }
        rows.append(learn(trainer, steps))
    exact, half = rows
    assert half["losses"] == pytest.approx(exact["losses"], rel=0.005)
    assert half["losses"][-1] < half["losses"][0] - 0.02
    assert half["finite_gradients"] and half["skipped_steps"] == 0


def test_gradients_that_stay_infinite_end_a_run_of_pure_fp16(tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "tiny")
    family = open_family(str(source))
    recipe = make_recipe(source, "pure-fp16", steps=1)
    trainer = make_trainer(recipe, family, Precision("pure-fp16", "a test"), torch.device("cpu"), tmp_path)
    for _ in range(MAX_CONSECUTIVE_OVERFLOWS):
        trainer._check_finite(math.inf)
    with pytest.raises(TrainingError, match="not finite"):
        trainer._check_finite(math.inf)
