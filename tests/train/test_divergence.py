"""Divergence: losses and gradients that end a training, and those that must not."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch

from myna.train.loss import MAX_STEPS_ABOVE_CHANCE, MAX_ZERO_GRADIENT_STEPS, DivergenceMonitor, LossAccumulator

CHANCE = (5.0, 4.0, 4.0)
AUDIO = torch.tensor([0.0, 0.5, 0.5])
TEXT = torch.tensor([1.0, 0.0, 0.0])


def losses(mean: float, counts: tuple[float, ...] = (3.0, 10.0, 10.0)) -> LossAccumulator:
    """Make losses with this mean for every term."""
    result = LossAccumulator.zeros(len(counts))
    result.counts = torch.tensor(counts, dtype=torch.float64)
    result.totals.sums.copy_(mean * result.counts)
    return result


def watch(steps: list[tuple[float, float]], weights: torch.Tensor = AUDIO) -> DivergenceMonitor:
    """Return a monitor after steps with these losses and gradient norms."""
    monitor = DivergenceMonitor()
    for step, (loss, norm) in enumerate(steps, start=1):
        monitor.update(step, losses(loss), norm, CHANCE, weights)
    return monitor


def test_a_gradient_of_zero_for_some_steps_in_a_row() -> None:
    dead = [(4.0, 0.0)] * MAX_ZERO_GRADIENT_STEPS
    assert watch(dead[1:]).diagnose() is None and watch([*dead[1:], (4.0, 1.0), *dead[1:]]).diagnose() is None
    message = watch([(2.0, 1.0), *dead]).diagnose()
    assert message == "the gradient is exactly zero since step 2, at a loss of 4.00 where a guess has 4.00"


def test_a_loss_above_chance_after_it_was_well_below() -> None:
    high = [(4.5, 1.0)] * MAX_STEPS_ABOVE_CHANCE
    assert watch([(2.0, 1.0), *high[1:]]).diagnose() is None, "it may recover"
    assert watch([(2.0, 1.0), *high[1:], (3.9, 1.0)]).since is None, "and has"
    assert "not better than chance since step 2" in (watch([(2.0, 1.0), *high]).diagnose() or "")
    assert watch([(4.1, 1.0), *high]).diagnose() is None, "random weights begin there"
    assert watch([(3.5, 1.0), *high]).diagnose() is None, "and are not far below for a while"


def test_the_end_of_a_run_leaves_no_time_to_recover() -> None:
    assert watch([(2.0, 1.0), (4.5, 1.0)]).diagnose(is_last=True) is None
    assert watch([(2.0, 1.0), (4.5, 1.0), (4.5, 1.0)]).diagnose(is_last=True) is not None
    assert watch([(2.0, 1.0), (4.0, 0.0), (4.0, 0.0)]).diagnose(is_last=True) is not None


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_steps_that_a_loss_scale_skips_are_not_counted(norm: float) -> None:
    monitor = watch([(2.0, 1.0), (4.0, 0.0), (math.nan, norm), (4.0, 0.0)])
    assert (monitor.zero_gradients, monitor.since) == (2, 2)
    assert watch([(2.0, norm)] * 9).diagnose(is_last=True) is None


def test_nothing_to_learn_or_nothing_left_is_no_divergence() -> None:
    assert watch([(0.0, 0.0)] * 9).diagnose(is_last=True) is None, "everything is learned"
    monitor = DivergenceMonitor()
    for step in range(9):
        monitor.update(step, losses(4.0, (0.0, 10.0, 10.0)), 0.0, CHANCE, TEXT)
    assert monitor.diagnose(is_last=True) is None, "no text in these rows"


def test_losses_of_other_streams_are_not_compared() -> None:
    monitor = watch([(1.0, 1.0)] * 3, weights=TEXT)
    for step in range(4, 99):
        monitor.update(step, losses(4.5), 1.0, CHANCE, AUDIO)
    assert monitor.diagnose(is_last=True) is None, "audio has only begun"


def test_terms_beside_the_streams_of_the_family_do_not_count() -> None:
    monitor = DivergenceMonitor()
    for step in range(9):
        monitor.update(step, losses(2.0, (3.0, 10.0, 10.0, 5.0)), 1.0, CHANCE, torch.tensor([0.0, 0.5, 0.5, 100.0]))
    assert monitor.lowest == 0.5 and monitor.since is None


def test_its_state_survives_a_resume() -> None:
    monitor = watch([(2.0, 1.0), *[(4.0, 0.0)] * (MAX_ZERO_GRADIENT_STEPS - 1)])
    resumed = DivergenceMonitor(**asdict(monitor))
    resumed.update(9, losses(4.0), 0.0, CHANCE, AUDIO)
    assert "since step 2" in (resumed.diagnose() or "")
