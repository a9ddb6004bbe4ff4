"""Whoever hears the model while it learns, and how they are given it to hear.

The loop knows no ears. It is handed an `Audience` from above, has it hear the model as it stands, and learns two
things: whether this is the best now, and whether it may still become better. Listening leaves no trace in what is
learned, not even in the dice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import broadcast_object_list
from torch import nn

from myna.errors import MynaError, TrainingError
from myna.train.checkpoint import random_state, set_random_state
from myna.train.trainer import Trainer

AutocastContext = Callable[[], AbstractContextManager[Any]]
"""Where a model in training computes: its weights are of several types, which autocast brings together."""


class LoggedSample(NamedTuple):
    """A line for the trackers, to hear and to see."""

    name: str
    samples: npt.NDArray[np.float32]
    sample_rate: int
    picture: npt.NDArray[np.uint8]
    """(height, width, 3)"""


class SpeechScores(NamedTuple):
    row: dict[str, Any]
    """For metrics.jsonl and the trackers; nothing of the clock."""
    is_best: bool
    """Better than what was the best before it, and allowed to be."""
    goes_up: bool = False
    """Higher than everything that was heard before it, though perhaps by chance: worth some more patience."""
    samples: Sequence[LoggedSample] = ()


class EvaluationCallback(Protocol):
    """Lives on rank 0 alone."""

    def introduce(self) -> Sequence[str]:
        """Who listens to what, for people."""

    def recall(self, step: int) -> None:
        """The run goes on after this step: what was heard until then counts, and nothing that came later."""

    def hear(self, step: int, model: nn.Module, numbers: AutocastContext) -> SpeechScores:
        """The model as it stands after so many steps; step 0 is the untuned one. It may be put into evaluation mode."""

    def conclude(self) -> Sequence[str]:
        """What came of the run, for people."""


def run_callback(student: Trainer, audience: EvaluationCallback | None, step: int) -> SpeechScores:
    """Rank 0 listens to the weights that would be saved now, while the others wait; if it cannot, all of them stop."""
    accelerator = student.accelerator
    student.objective.eval()
    with preserve_rng_state(accelerator.device), student.averaged():
        model = student.speaking_model()
        heard, failure = SpeechScores({}, is_best=False), None
        if accelerator.is_main_process:
            assert audience is not None and model is not None, "rank 0 has both"
            try:
                heard = audience.hear(step, model, accelerator.autocast)
            except MynaError as error:
                failure = error
            except OSError as error:
                failure = TrainingError(
                    f"what was heard at step {step} cannot be kept: {error}",
                    hint="make room there, then go on from the last checkpoint: myna train --resume RUN",
                )
    if accelerator.num_processes > 1:
        is_best, goes_up, failure = broadcast_object_list([(heard.is_best, heard.goes_up, failure)])[0]
        heard = heard._replace(is_best=is_best, goes_up=goes_up)
    if failure is not None:
        raise failure
    return heard


@contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Whatever is done inside, the dice fall afterwards as if it had not been done."""
    python, arrays, tensors = random.getstate(), np.random.get_state(), random_state(device)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        for kind, state in tensors.items():
            set_random_state(kind, device, state)
