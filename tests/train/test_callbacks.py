"""Evaluation callbacks do not change random states, and their failures stop the training with a hint."""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from myna.core.errors import DataError, TrainingError
from myna.train.callbacks import SpeechScores, preserve_rng_state, run_callback


def throw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_the_dice_fall_as_if_nobody_had_listened() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [throw(), throw()]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = throw()
    with pytest.raises(ZeroDivisionError), preserve_rng_state(torch.device("cpu")):
        throw()
        torch.manual_seed(7)
        _ = 1 / 0
    assert [first, throw()] == expected


class FakeTrainer:
    """Parts of a trainer that an evaluation needs."""

    def __init__(self) -> None:
        self.objective = nn.Linear(1, 1)
        self.accelerator = SimpleNamespace(
            device=torch.device("cpu"), is_main_process=True, num_processes=1, autocast=nullcontext
        )
        self.ema_weights, self.full_model = nullcontext, lambda **_: self.objective
        self.run_on_main: Any = lambda work: work()


@pytest.mark.parametrize("error", [DataError("no such line", hint="look"), OSError(28, "no space left")])
def test_a_failure_is_one_that_a_person_can_act_on(error: Exception) -> None:
    def hear(*_: Any) -> SpeechScores:
        raise error

    trainer: Any = FakeTrainer()
    callback: Any = SimpleNamespace(run=hear)
    with pytest.raises((DataError, TrainingError), match=r"no such line|cannot be kept: .*no space left") as told:
        run_callback(trainer, callback, 20)
    assert told.value.hint


def test_a_model_is_heard_at_rest() -> None:
    trainer: Any = FakeTrainer()
    callback: Any = SimpleNamespace(
        run=lambda step, model, _: SpeechScores({"training": model.training, "step": step}, True)
    )
    assert run_callback(trainer, callback, 20).row == {"training": False, "step": 20}
