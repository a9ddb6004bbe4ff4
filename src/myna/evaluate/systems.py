"""Systems under evaluation: speech engines, and the recordings themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from myna.audio.files import Samples
from myna.data.conversation import AudioClip, Reference
from myna.data.utterance import Utterance, normalise_text
from myna.evaluate.items import EvalItem, load_clip, recording_key
from myna.models.base import Sampling
from myna.models.code_sampling import SAMPLING_REVISION
from myna.speak.engine import Engine, SpeechRequest, encode_clip
from myna.speak.fingerprint import weights_fingerprint

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

    def speak(self, items: Sequence[EvalItem]) -> list[SystemOutput]:
        """A batch of items of one maximum length; no output may depend on the rest of the batch."""

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

    def speak(self, items: Sequence[EvalItem]) -> list[SystemOutput]:
        clips = [load_clip(item.recording, self.sample_rate) for item in items if item.recording is not None]
        return [SystemOutput(self.transform(clip) if self.transform is not None else clip, None) for clip in clips]

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

    def speak(self, items: Sequence[EvalItem]) -> list[SystemOutput]:
        requests = [
            SpeechRequest(item.text, tuple(map(self._encode_reference, item.references)), scene=item.scene, id=item.id)
            for item in items
        ]
        outputs = self.engine.speak(requests, replace(self.sampling, max_seconds=items[0].max_seconds))
        return [SystemOutput(output.samples, output.stopped) for output in outputs]

    def close(self) -> None:
        self._engine = None

    def _encode_reference(self, clip: Utterance) -> Reference:
        key = recording_key(clip)
        if key not in self.references:
            codec = self.engine.codec
            codes = encode_clip(codec, load_clip(clip, codec.sample_rate))
            self.references[key] = Reference(normalise_text(clip.text), AudioClip(clip.id, codes))
        return self.references[key]
