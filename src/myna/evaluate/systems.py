"""Systems under evaluation: speech models as users name them, and real recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from myna.audio.files import Samples
from myna.core.config import DataSettings
from myna.core.errors import ConfigError, SpeakError
from myna.core.run_folder import RunFolder
from myna.data.conversation import AudioClip, Reference
from myna.evaluate.items import EvalItem, EvalSet, load_clip, load_eval_set, recording_key
from myna.models.base import Sampling
from myna.models.code_sampling import SAMPLING_REVISION
from myna.models.ref import ModelRef, split_name
from myna.speak.batch import SpeechPlan
from myna.speak.engine import Engine, encode_clip
from myna.speak.loading import load_engine
from myna.speak.request import SpeechRequest
from myna.text.normalization import normalise_text

REAL, ROUND_TRIP, BASE = "real", "round_trip", "base"
RESERVED_NAMES = (REAL, ROUND_TRIP, BASE)
SYSTEM_TITLES = {REAL: "real recording", ROUND_TRIP: "real, through the codec", BASE: "untuned base"}


def system_title(system: str) -> str:
    return SYSTEM_TITLES.get(system, system)


@dataclass(frozen=True, slots=True, eq=False)
class SystemOutput:
    samples: Samples
    stopped: bool | None
    """False if the length limit ended it; None for a recording."""


class System(Protocol):
    """Source of audio for evaluation items."""

    @property
    def name(self) -> str: ...

    @property
    def sample_rate(self) -> int: ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Run, model and loss, for the report."""

    def key(self, item: EvalItem) -> str:
        """Identify the audio of an item: audio with an equal key is not generated again."""

    def supports(self, item: EvalItem) -> bool: ...

    def speak(self, items: Sequence[EvalItem], batch_size: int) -> Iterator[tuple[EvalItem, SystemOutput]]:
        """Speak items of one maximum length, at most `batch_size` at the same time, and yield each when it ends. No
        output may depend on the other items."""

    def close(self) -> None:
        """Release the weights; `speak` loads them again."""


@dataclass(frozen=True, slots=True)
class Recordings:
    """Real recordings, or their codec round trip, the upper bound of every model that uses the codec."""

    name: str
    sample_rate: int
    revision: str = ""
    transform: Callable[[Samples], Samples] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def key(self, item: EvalItem) -> str:
        recording = item.recording
        return f"{recording_key(recording)}/{self.sample_rate}/{self.revision}" if recording is not None else ""

    def supports(self, item: EvalItem) -> bool:
        return item.recording is not None

    def speak(self, items: Sequence[EvalItem], batch_size: int) -> Iterator[tuple[EvalItem, SystemOutput]]:  # noqa: ARG002
        for item in items:
            assert item.recording is not None, "items without a recording are not supported"
            clip = load_clip(item.recording, self.sample_rate)
            yield item, SystemOutput(self.transform(clip) if self.transform is not None else clip, None)

    def close(self) -> None:
        pass


@dataclass(slots=True)
class SpeechSystem:
    """Speech engine as a system. Weights are loaded when they are needed, and released for the next system."""

    name: str
    load: Callable[[], Engine]
    seed: int
    metadata: Mapping[str, Any]
    fingerprint: Callable[[Engine], str] = Engine.fingerprint
    references: dict[str, Reference] = field(default_factory=dict)
    """Encoded references by clip, for reuse by systems of the same codec."""
    _engine: Engine | None = None
    _weights_hash: str = ""
    _sampling: Sampling | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self._engine = self.load()
            self._weights_hash = self._weights_hash or self.fingerprint(self._engine)
        return self._engine

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of the model, kept after `close` since they are part of the key."""
        if self._sampling is None:
            self._sampling = replace(self.engine.family.sampling, seed=self.seed)
        return self._sampling

    @property
    def sample_rate(self) -> int:
        return self.engine.codec.sample_rate

    def key(self, item: EvalItem) -> str:
        sampling = replace(self.sampling, max_seconds=item.max_seconds)
        return f"{self._weights_hash}/{SAMPLING_REVISION}/{asdict(sampling)}"

    def supports(self, item: EvalItem) -> bool:  # noqa: ARG002
        return True

    def speak(self, items: Sequence[EvalItem], batch_size: int) -> Iterator[tuple[EvalItem, SystemOutput]]:
        plans = map(self._plan, items)
        for place, speech in self.engine.speak_plans(plans, batch_size=batch_size):
            yield items[place], SystemOutput(speech.samples, speech.stopped)

    def close(self) -> None:
        self._engine = None

    def _plan(self, item: EvalItem) -> SpeechPlan:
        """Plan one segment, however long: the maximum length is that of the whole item."""
        codec, keys = self.engine.codec, [recording_key(clip) for clip in item.references]
        for key, clip in zip(keys, item.references, strict=True):
            if key not in self.references:
                codes = encode_clip(codec, load_clip(clip, codec.sample_rate))
                self.references[key] = Reference(normalise_text(clip.text), AudioClip(clip.id, codes))
        request = SpeechRequest(
            item.text,
            tuple(self.references[key] for key in keys),
            id=item.id,
            scene=item.scene,
            max_seconds=item.max_seconds,
            seed=self.seed,
        )
        return self.engine.plan(request, split=False)


@dataclass(frozen=True, slots=True)
class Subject:
    """Run, adapter or model to evaluate, with its name in the report."""

    name: str
    ref: ModelRef

    @classmethod
    def parse(cls, text: str, base: str | None = None) -> Subject:
        """Resolve SOURCE or NAME=SOURCE; a run or an adapter is opened on another `base` model if one is given."""
        name, source = split_name(text)
        if name in RESERVED_NAMES:
            raise ConfigError(f"a model cannot be called {name} here", hint=f"give it another name: mine={source}")
        return cls(name, ModelRef.find(source, base))

    def system(self, *, seed: int, device: str, strength: float = 1.0, codec: str | None = None) -> SpeechSystem:
        """Return the system; its weights are loaded when it speaks. `strength` scales its LoRA."""
        ref = self.ref
        metadata: dict[str, Any] = {"model": ref.base_source}
        if not ref.is_trained and strength != 1.0:
            raise SpeakError(
                f"`strength` scales the LoRA of a run, and {ref.source} is a model by itself", hint="leave it out"
            )
        if ref.is_trained:
            metadata = run_metadata(ref.run) if ref.run is not None else metadata | {"adapter": str(ref.folder)}
        return SpeechSystem(
            self.name,
            lambda: load_engine(ref, codec=codec, device=device, strength=strength),
            seed,
            metadata | ({"strength": strength} if strength != 1.0 else {}),
        )

    def base_system(self, *, seed: int, device: str) -> SpeechSystem | None:
        """Return the base model of a run or an adapter, with the codec of the training; None for a model."""
        if not self.ref.is_trained:
            return None
        base = Subject(BASE, ModelRef.find(self.ref.base_source))
        return base.system(seed=seed, device=device, codec=self.ref.metadata.codec)

    def eval_set(
        self, data: Path | None, sentences: Path | None, *, seed: int, limit: int | None, language: str
    ) -> EvalSet:
        """Load the items of `sentences` or of `data`; by default the held-out data of the run."""
        run = self.ref.run
        if data is None and run is not None:
            data = run.recipe.data.evaluation or (run.recipe.data.train if sentences is not None else None)
        if data is None and sentences is None:
            raise ConfigError(
                "there is nothing to say: no `data`, no `sentences`, and no data.evaluation in a recipe",
                hint="myna evaluate RUN --data data/HELD_OUT, or --sentences FILE with one sentence a line",
            )
        settings = run.recipe.data if run is not None else DataSettings(train=data) if data is not None else None
        scene = self.ref.metadata.scene if self.ref.is_trained else ""
        return load_eval_set(data, sentences, settings, seed, limit, language, scene)


def run_metadata(run: RunFolder) -> dict[str, Any]:
    """Read run folder, model and evaluation loss: that of the best checkpoint by speech, if speech was evaluated."""
    metadata: dict[str, Any] = {"run": str(run.folder), "model": run.recipe.model.source}
    notes: list[str] = []
    rows = run.read_metrics(notes.append)
    metadata |= {"notes": notes} if notes else {}
    # A loss that was not finite is None.
    losses = {row["step"]: row["evaluation"]["loss"] for row in rows if "evaluation" in row}
    train_losses = [row["loss"] for row in rows if "loss" in row]
    best_steps = [row["speech_eval"]["best_step"] for row in rows if "speech_eval" in row]
    if losses:
        lowest = min((loss for loss in losses.values() if loss is not None), default=None)
        metadata |= {"loss": losses.get(best_steps[-1], lowest) if best_steps else lowest, "base_loss": losses.get(0)}
    elif train_losses:
        metadata |= {"loss": train_losses[-1]}
    return metadata
