"""Messages between the HTTP process and the engine process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from myna.audio.files import Samples
from myna.core.errors import MynaError
from myna.speak.request import SpeechRequest

if TYPE_CHECKING:  # they import torch, which the HTTP process does without
    from myna.core.config import Quantization
    from myna.speak.scheduler import FinishReason


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine process opens, and how much of it."""

    source: str
    """A run, an adapter or a model: folder or hub name. Where `adapters` are given, their base model."""
    model: str | None = None
    """Base model of a run, where it is not the one that it names."""
    codec: str | None = None
    device: str = "auto"
    quantization: Quantization = "none"
    exact: bool = False
    """Same bits alone and in a crowd, as of `Engine`."""
    strength: float = 1.0
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Names and folders of adapters to load at the start."""
    adapter_rank: int | None = None
    """Highest rank of adapters; None where there will be none."""
    rows: int = 16
    positions: int = 2048
    max_waiting: int = 64
    watermark: bool = True
    max_adapters: int = 32
    """That are loaded at a time."""


@dataclass(frozen=True, slots=True)
class SpeakMessage:
    """Speak a request, whose references are samples at the codec's sample rate."""

    id: str
    request: SpeechRequest

    @property
    def adapter(self) -> str:
        return self.request.adapter


@dataclass(frozen=True, slots=True)
class AnswerMessage:
    """Answer a question about a recording."""

    id: str
    samples: Samples
    question: str
    max_tokens: int
    constrained: bool = False


@dataclass(frozen=True, slots=True)
class AdapterMessage:
    """Load an adapter, or unload it where there is no source."""

    id: str
    name: str
    source: str | None


@dataclass(frozen=True, slots=True)
class CancelMessage:
    """End a request."""

    id: str


@dataclass(frozen=True, slots=True)
class EndSessionMessage:
    """Forget a session."""

    session: str


EngineMessage = SpeakMessage | AnswerMessage | AdapterMessage | CancelMessage | EndSessionMessage


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A model that is loaded and warm."""

    sample_rate: int
    answers: bool
    """Whether it answers in words instead of speaking."""
    adapters: tuple[str, ...]
    watermark: str
    """Name of the watermark, empty where there is none."""
    device: str


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of a request, or of loading. Errors of the user carry a hint."""

    message: str
    hint: str = ""
    is_users: bool = True

    @staticmethod
    def of(error: MynaError) -> Failure:
        return Failure(error.what, error.hint)


@dataclass(frozen=True, slots=True)
class AudioPiece:
    """The next audio of a request: signed 16-bit samples."""

    id: str
    pcm: bytes


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The end of a request."""

    id: str
    finish_reason: FinishReason | None = None
    warnings: tuple[str, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    """The answer to a question."""
    failure: Failure | None = None


RequestEvent = AudioPiece | RequestEnd


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step of the engine has brought, and the load after it."""

    events: tuple[RequestEvent, ...]
    speaking: int
    waiting: int
    seconds: float
    adapters: tuple[str, ...]
