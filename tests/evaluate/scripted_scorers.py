"""Scorers that return scripted scores for each step, and a speech evaluation that uses them.

They know real recordings by their samples. Everything else is a model's, and is as similar and as good as the test
says for the step that is scored. Like careless scorers they draw from every random generator.
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

from myna.audio.files import Samples, read_audio
from myna.core.errors import AudioError
from myna.evaluate.callback import SpeechEvaluation
from myna.evaluate.items import EvalSet
from myna.evaluate.pipeline import System
from myna.evaluate.scoring import ItemScores, Scorers
from myna.listen.asr import Transcript
from myna.listen.speaker_encoders import SpeakerEmbedding
from myna.train.callbacks import AutocastContext, SpeechScores

RATE = 16_000


@dataclass
class ScriptedScorers:
    """Scores by step; a step that is not named is scored like the base model."""

    real: Path
    """A folder of recordings."""
    similarity: Mapping[int, float] = field(default_factory=dict)
    """Speaker similarity of a model."""
    forgetting_similarity: Mapping[int, float] = field(default_factory=dict)
    """Speaker similarity of a model on the forgetting set."""
    quality: Mapping[int, float] = field(default_factory=dict)
    base: float = 0.5
    step: int = 0
    is_forgetting_set: bool = False
    broken: bool = False
    spoken: list[int] = field(default_factory=list)
    """Steps at which a model was scored, once for each item."""
    names: tuple[str, str, str] = ("scripted asr", "scripted encoder", "scripted mos")
    name: str = "scripted encoder"

    def __post_init__(self) -> None:
        self._known = {read_audio(path, sample_rate=RATE).tobytes() for path in self.real.rglob("*.wav")}

    def scorers(self) -> Scorers:
        names = dict(zip(("asr", "speaker_encoder", "distillmos"), self.names, strict=True))
        return Scorers(asr=self, speaker_encoder=self, distillmos=self, names=names)

    def transcribe(self, samples: Samples, sample_rate: int, language: str | None) -> Transcript:  # noqa: ARG002
        if self.broken:
            raise AudioError("this cannot be heard", hint="listen to something else")
        torch.rand(3), np.random.rand(3), random.random()
        return Transcript("nothing that was to be said", looped=False)

    def embed(self, samples: Samples, sample_rate: int) -> SpeakerEmbedding:  # noqa: ARG002
        if samples.tobytes() in self._known:
            return np.array([1.0, 0.0], np.float32)
        self.spoken.append(self.step)
        similarity = (self.forgetting_similarity if self.is_forgetting_set else self.similarity).get(
            self.step, self.base
        )
        # No two items are quite the same, or every interval would be without width.
        similarity += 0.01 * np.sin(len(samples))
        return np.array([similarity, np.sqrt(1 - similarity**2)], np.float32)

    def score(self, samples: Samples, sample_rate: int) -> float:  # noqa: ARG002
        return self.quality.get(self.step, 3.0)


class ScriptedEvaluation(SpeechEvaluation):
    """Speech evaluation that tells its scorers which step they score."""

    __slots__ = ()
    scripted: ScriptedScorers

    def run(self, step: int, model: nn.Module, numbers: AutocastContext) -> SpeechScores:
        self.scripted.step = step
        return super().run(step, model, numbers)

    def _score(self, eval_set: EvalSet | None, system: System, folder: Path) -> list[ItemScores]:
        self.scripted.is_forgetting_set = eval_set is self.forgetting_set
        return super()._score(eval_set, system, folder)


@contextmanager
def scripted_scorers(scorers: ScriptedScorers) -> Iterator[ScriptedScorers]:
    """Evaluate every training inside the block by these scorers."""
    ScriptedEvaluation.scripted = scorers
    with (
        patch("myna.evaluate.callback.SpeechEvaluation", ScriptedEvaluation),
        patch("myna.evaluate.callback.open_required_scorers", lambda _: scorers.scorers()),
    ):
        yield scorers
