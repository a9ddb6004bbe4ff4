"""Systems under evaluation: speech engines, and the recordings themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from myna.audio.files import Samples
from myna.data.conversation import AudioClip, Reference
from myna.data.manifest import Utterance
from myna.evaluate.items import EvalItem, load_clip, recording_key
from myna.models.base import Sampling
from myna.models.code_sampling import SAMPLING_REVISION
from myna.speak.engine import Engine, SpeechRequest, encode_clip
from myna.speak.fingerprint import weights_fingerprint
from myna.speak.segments import SpeechPlan
from myna.text.normalization import normalise_text

REAL, ROUND_TRIP, BASE = "real", "round_trip", "base"


@dataclass(frozen=True, slots=True, eq=False)
class SystemOutput:
    samples: Samples
    stopped: bool | None
    """False when the length limit ended it; None for a recording."""


class System(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def sample_rate(self) -> int: ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """For the report: run, model, loss."""

    def key(self, item: EvalItem) -> str:
        """Equal keys give equal audio: audio with this key is not generated again."""

    def supports(self, item: EvalItem) -> bool: ...

    def speak(self, items: Sequence[EvalItem], batch_size: int) -> Iterator[tuple[EvalItem, SystemOutput]]:
        """Items of one maximum length, at most `batch_size` at the same time, each as it ends; no output may depend on
        the others."""

    def close(self) -> None:
        """Release the weights; `speak` loads them again."""


@dataclass(frozen=True, slots=True)
class Recordings:
    """The real recordings, or their codec round trip: the upper bound of every model that uses the codec."""

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
    """A speech engine as a system. Weights are loaded when they are needed, and released for the next system."""

    name: str
    load: Callable[[], Engine]
    seed: int
    metadata: Mapping[str, Any]
    fingerprint: Callable[[Engine], str] = weights_fingerprint
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
        """The model's own sampling settings. Kept after `close`, since they are part of the key."""
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
        """One segment, however long: the maximum length is that of the whole item."""
        references = tuple(map(self._encode_reference, item.references))
        request = SpeechRequest(item.text, references, scene=item.scene, id=item.id)
        return self.engine.plan(request, replace(self.sampling, max_seconds=item.max_seconds), split=False)

    def _encode_reference(self, clip: Utterance) -> Reference:
        key = recording_key(clip)
        if key not in self.references:
            codec = self.engine.codec
            codes = encode_clip(codec, load_clip(clip, codec.sample_rate))
            self.references[key] = Reference(normalise_text(clip.text), AudioClip(clip.id, codes))
        return self.references[key]
