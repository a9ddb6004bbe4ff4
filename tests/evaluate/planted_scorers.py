"""Ears that hear what a test plants, step by step, and a panel that has them.

They know real recordings by their sound. Everything else is a model's, and is as alike, as well understood and as good
as the test says for the step that is heard. Like careless ears they throw every dice there is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from myna.audio.files import Samples, read
from myna.errors import AudioError
from myna.evaluate.callback import SpeechEvaluation
from myna.evaluate.items import EvalSet
from myna.evaluate.resemblyzer import Voice
from myna.evaluate.scorers import Scorers
from myna.evaluate.scoring import ItemScores
from myna.evaluate.systems import System
from myna.evaluate.wer import Transcript
from myna.train.callbacks import AutocastContext
from myna.train.callbacks import SpeechScores as Verdict

RATE = 16_000


@dataclass
class Planted:
    """What is heard at which step; a step that is not named is heard like the untuned model."""

    real: Path
    """A folder of recordings."""
    alike: Mapping[int, float] = field(default_factory=dict)
    """Similarity of a model's voice."""
    guard_alike: Mapping[int, float] = field(default_factory=dict)
    """The same on the lines of the guard."""
    quality: Mapping[int, float] = field(default_factory=dict)
    base: float = 0.5
    step: int = 0
    guarding: bool = False
    broken: bool = False
    spoken: list[int] = field(default_factory=list)
    """Steps at which a model was heard, once for each line."""
    names: tuple[str, str, str] = ("planted words", "planted voice", "planted quality")

    def __post_init__(self) -> None:
        self._known = {read(path, sample_rate=RATE).tobytes() for path in self.real.rglob("*.wav")}

    def ears(self) -> Scorers:
        return Scorers(
            words=self,
            voice=self,
            distillmos=self,
            names=dict(zip(("words", "voice", "distillmos"), self.names, strict=True)),
        )

    def transcribe(self, samples: Samples, sample_rate: int, language: str | None) -> Transcript:  # noqa: ARG002
        if self.broken:
            raise AudioError("this cannot be heard", hint="listen to something else")
        torch.rand(3), np.random.rand(3), random.random()
        return Transcript("nothing that was to be said", looped=False)

    def embed(self, samples: Samples, sample_rate: int) -> Voice:  # noqa: ARG002
        if samples.tobytes() in self._known:
            return np.array([1.0, 0.0], np.float32)
        self.spoken.append(self.step)
        alike = (self.guard_alike if self.guarding else self.alike).get(self.step, self.base)
        # No two lines are quite the same, or every interval would be without width.
        alike += 0.01 * np.sin(len(samples))
        return np.array([alike, np.sqrt(1 - alike**2)], np.float32)

    def score(self, samples: Samples, sample_rate: int) -> float:  # noqa: ARG002
        return self.quality.get(self.step, 3.0)


class PlantedPanel(SpeechEvaluation):
    """Tells its ears which step they hear, which no ear could know."""

    __slots__ = ()
    planted: Planted

    def hear(self, step: int, model: nn.Module, numbers: AutocastContext) -> Verdict:
        self.planted.step = step
        return super().hear(step, model, numbers)

    def _judge(self, plan: EvalSet, system: System, folder: Path) -> list[ItemScores]:
        self.planted.guarding = plan is self.guard
        return super()._judge(plan, system, folder)


@contextmanager
def planted(ears: Planted) -> Iterator[Planted]:
    """Whoever trains inside is heard by these."""
    PlantedPanel.planted = ears
    with (
        patch("myna.workflow.Panel", PlantedPanel),
        patch("myna.evaluate.callback.open_required_scorers", lambda _: ears.ears()),
    ):
        yield ears
