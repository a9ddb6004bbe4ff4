"""Evaluation callback of the training loop, and how it gets the model.

The loop knows no metrics. It calls an `EvaluationCallback` to evaluate the model's current speech, and gets two
answers: whether this is the best checkpoint so far, and whether the model may still improve. An evaluation does not
change the training, not even its random states.
"""

import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from torch import nn

from myna.core.errors import TrainingError
from myna.train.checkpoint import get_rng_states, set_rng_states
from myna.train.trainer import Trainer

AutocastContext = Callable[[], AbstractContextManager[Any]]
"""Function that makes the autocast context of a model in training, whose weights are of several types."""


class LoggedSample(NamedTuple):
    name: str
    samples: npt.NDArray[np.float32]
    sample_rate: int
    spectrogram: npt.NDArray[np.uint8]
    """Picture of the spectrogram, (height, width, 3)."""


class SpeechScores(NamedTuple):
    row: dict[str, Any]
    """Scores for metrics.jsonl and the trackers; holds no timings."""
    is_best: bool
    """Whether the scores are better than the best before them, and within the constraints."""
    is_highest: bool = False
    """Whether the score is the highest so far, though perhaps by chance: it extends patience."""
    samples: Sequence[LoggedSample] = ()


class EvaluationCallback(Protocol):
    """Evaluation of the model's speech during training, on rank 0 only."""

    def describe(self) -> Sequence[str]:
        """Return lines for the log: what is evaluated, and with which metrics."""

    def restore(self, step: int) -> None:
        """Resume after `step`: keep the scores up to it and drop later ones."""

    def run(self, step: int, model: nn.Module, autocast: AutocastContext, /) -> SpeechScores:
        """Evaluate the model after `step` steps; step 0 is the base model. It may be put into evaluation mode."""

    def summarize(self) -> Sequence[str]:
        """Return the outcome of the run as lines for the log."""


def run_callback(trainer: Trainer, callback: EvaluationCallback | None, step: int) -> SpeechScores:
    """Evaluate the weights that would be saved now on rank 0, while the others wait. An error stops all of them."""
    accelerator = trainer.accelerator
    trainer.objective.eval()
    with preserve_rng_state(accelerator.device), trainer.ema_weights():
        model, scores = trainer.full_model(runnable=True), SpeechScores({}, is_best=False)

        def evaluate() -> tuple[bool, bool]:
            nonlocal scores
            assert callback is not None and model is not None, "rank 0 has both"
            try:
                scores = callback.run(step, model, accelerator.autocast)
            except OSError as error:
                raise TrainingError(
                    f"the speech evaluation of step {step} cannot be kept: {error}",
                    hint="make room there, then go on from the last checkpoint: myna train --resume RUN",
                ) from error
            return scores.is_best, scores.is_highest

        is_best, is_highest = trainer.run_on_main(evaluate)
    return scores._replace(is_best=is_best, is_highest=is_highest)


@contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch after the block."""
    python, numpy, tensors = random.getstate(), np.random.get_state(), get_rng_states(device)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        set_rng_states(tensors)


def log_samples(accelerator: Accelerator, samples: Sequence[LoggedSample], step: int) -> None:
    """Log every sample to every tracker, under the same name at all steps."""
    if not samples:
        return
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            for sample in samples:
                name, rate = f"speech_eval/{sample.name}", sample.sample_rate
                tracker.tracker.add_audio(name, sample.samples, global_step=step, sample_rate=rate)
                tracker.tracker.add_image(f"{name}/mel", sample.spectrogram, global_step=step, dataformats="HWC")
        elif tracker.name in ("wandb", "trackio"):
            # Both libraries use these names.
            library = importlib.import_module(tracker.name)
            media: dict[str, Any] = {}
            for sample in samples:
                media[f"speech_eval/{sample.name}"] = library.Audio(sample.samples, sample_rate=sample.sample_rate)
                media[f"speech_eval/{sample.name}/mel"] = library.Image(sample.spectrogram)
            tracker.tracker.log(media, step=step)
