"""A training that is asked to stop saves its state and resumes as if it had not stopped."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from myna.core.run_folder import Run, checkpoint_steps
from myna.train.loop import _stop_on_signal
from tests.train.resume_helper import (
    TrainingForks,
    contents,
    count_rows,
    kill,
    metrics,
    recipe_for,
    wait_for_rows,
)


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_result(workspace: Path, tmp_path: Path) -> None:
    recipe = recipe_for(
        workspace,
        data={"evaluation": str(workspace / "evaluation")},
        adapt={"dropout": 0.1},
        train={"steps": 200, "save_every": 50, "evaluate_every": 7, "early_stopping_patience": 50},
    ).model_dump(mode="json")
    whole, stopped, dice = tmp_path / "whole", tmp_path / "stopped", random.Random(0)
    with TrainingForks(workspace, tmp_path / "log") as forks:
        assert forks.train(whole, recipe=recipe) == 0
        pid = forks.start(stopped, recipe=recipe)
        for number in (signal.SIGTERM, signal.SIGINT):
            wait_for_rows(stopped, count_rows(stopped) + 4)
            kill(pid, number, dice)
            assert forks.wait() == 0
            step = checkpoint_steps(Run.open(stopped))[-1]
            said = (stopped / "log.txt").read_text().splitlines()[-1]
            assert said.startswith(f"stopped after step {step} as asked") and f"--resume {stopped}" in said
            assert f'"step": {step},' in metrics(stopped)[-1], "every step that was taken is kept"
            assert not (stopped / "adapter").exists()
            pid = forks.start(stopped)
        assert forks.wait() == 0
    assert metrics(stopped) == metrics(whole)
    assert contents(stopped / "adapter") == contents(whole / "adapter")


def test_the_second_interrupt_does_not_wait_and_handlers_come_back() -> None:
    def handlers() -> list[object]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    before, asked = handlers(), []
    with pytest.raises(KeyboardInterrupt), _stop_on_signal() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            asked.append(stop.requested)
    assert asked == [True, True], "asking twice to end is asking to end"
    assert handlers() == before
