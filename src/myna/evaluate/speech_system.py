"""An engine among the systems that `evaluate` listens to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from myna.data.conversation import AudioClip, Reference
from myna.data.utterance import Utterance, normalise_text
from myna.evaluate.items import EvalItem, clip_key, samples_of
from myna.evaluate.systems import SystemOutput
from myna.models.base import Sampling
from myna.speak.engine import Engine, SpeechRequest, encode_clip


def revision(engine: Engine) -> str:
    """A model by its weights and by how they are used, wherever they came from."""
    made = hashlib.blake2b(digest_size=16)
    for about in (engine.codec.revision, engine.family.prompt_revision, engine.place):
        made.update(about.encode())
    _add(made, engine.model.state_dict())
    return made.hexdigest()


def revision_in_training(engine: Engine) -> str:
    """A model in training by what learns. The rest stays as it is, and there may be much of it."""
    made = hashlib.blake2b(digest_size=16)
    for about in (engine.family.source, engine.codec.revision, engine.family.prompt_revision, engine.place):
        made.update(about.encode())
    _add(made, {name: part for name, part in engine.model.named_parameters() if part.requires_grad})
    return made.hexdigest()


def _add(made: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in sorted(tensors.items()):
        made.update(f"{name} {tensor.dtype}".encode())
        made.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


@dataclass(slots=True)
class SpeechSystem:
    """A model among the systems. Its weights are opened when they are needed, and let go when others need the room."""

    name: str
    open: Callable[[], Engine]
    seed: int
    about: Mapping[str, Any]
    known_by: Callable[[Engine], str] = revision
    """What tells its weights from others."""
    voices: dict[str, Reference] = field(default_factory=dict)
    """References that were encoded before, by the same codec."""
    _engine: Engine | None = None
    _revision: str = ""
    _sampling: Sampling | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self._engine = self.open()
            self._revision = self._revision or self.known_by(self._engine)
        return self._engine

    @property
    def sampling(self) -> Sampling:
        """As the model asks for it. Kept when the weights are let go, since lines are known by it."""
        if self._sampling is None:
            self._sampling = replace(self.engine.family.sampling, seed=self.seed)
        return self._sampling

    @property
    def sample_rate(self) -> int:
        return self.engine.codec.sample_rate

    def key(self, task: EvalItem) -> str:
        if not self._revision:
            self._revision = self.known_by(self.engine)
        return f"{self._revision}/{asdict(replace(self.sampling, max_seconds=task.cap))}"

    def can_say(self, task: EvalItem) -> bool:  # noqa: ARG002
        return True

    def speak(self, tasks: Sequence[EvalItem]) -> list[SystemOutput]:
        lines = [
            SpeechRequest(task.text, tuple(map(self._voice, task.references)), scene=task.scene, id=task.id)
            for task in tasks
        ]
        spoken = self.engine.speak(lines, replace(self.sampling, max_seconds=tasks[0].cap))
        return [SystemOutput(speech.samples, speech.stopped) for speech in spoken]

    def close(self) -> None:
        self._engine = None

    def _voice(self, clip: Utterance) -> Reference:
        key = clip_key(clip)
        if key not in self.voices:
            codec = self.engine.codec
            codes = encode_clip(codec, samples_of(clip, codec.sample_rate))
            self.voices[key] = Reference(normalise_text(clip.text), AudioClip(clip.id, codes))
        return self.voices[key]
