"""A rank of test_nccl.py: `python -m tests.train.ranked FAULT WORDS...` runs `myna WORDS` with a fault in it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from myna.audio.files import Samples
from myna.commands import main
from myna.core import io
from myna.listen.asr import Transcript
from myna.train import checkpoint
from myna.train.trainer import Trainer
from tests.evaluate.scripted_scorers import ScriptedScorers, scripted_scorers
from tests.train.distributed_helper import asked_to_stop

RANK = int(os.environ["RANK"])
SLOW_SECONDS = 40.0
"""Longer than the time that ranks wait for one another in these tests."""


class SlowScorers(ScriptedScorers):
    """Scorers that take `SLOW_SECONDS` for their first transcript."""

    def transcribe(self, samples: Samples, sample_rate: int, language: str | None) -> Transcript:
        if not self.spoken:
            time.sleep(SLOW_SECONDS)
        return super().transcribe(samples, sample_rate, language)


def at_first_fsync(happen: Callable[[], None]) -> AbstractContextManager[Any]:
    """Let something happen while rank 0 writes its first checkpoint."""
    fsync, calls = io.fsync, count()

    def disturbed(path: Path) -> None:
        if next(calls) == 0:
            happen()
        fsync(path)

    return patch.object(checkpoint, "fsync", disturbed)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_step(step: int) -> AbstractContextManager[Any]:
    train_step, steps = Trainer.train_step, count(1)

    def deadly(*arguments: Any) -> Any:
        if next(steps) == step:
            die()
        return train_step(*arguments)

    return patch.object(Trainer, "train_step", deadly)


def fault(name: str) -> AbstractContextManager[Any]:
    if name == "slow disk":
        return at_first_fsync(lambda: time.sleep(SLOW_SECONDS))
    if name == "dies saving":
        return at_first_fsync(die)
    if name == "rank 1 is asked to stop":
        return asked_to_stop(3 if RANK == 1 else None)
    if name == "rank 1 dies":
        return die_at_step(4) if RANK == 1 else nullcontext()
    if name == "slow ears":
        return scripted_scorers(SlowScorers(Path(os.environ["RECORDINGS"]), similarity={0: 0.5, 2: 0.8}))
    assert name == "none"
    return nullcontext()


if __name__ == "__main__":
    with fault(sys.argv.pop(1)):
        main()
