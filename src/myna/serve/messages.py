"""Messages between the HTTP process and the engine process."""

import uuid
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

from myna.audio.files import Samples
from myna.core.config import Quantization
from myna.core.errors import MynaError
from myna.speak.request import FinishReason, SpeechRequest


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of the engine process: the model, and how much is allocated."""

    source: str
    """Run, adapter or model: a folder or a hub name. With `adapters` it is their base model."""
    _: KW_ONLY
    model: str | None = None
    """Base model of a run, if not the one that it names."""
    codec: str | None = None
    device: str = "auto"
    quantization: Quantization = "none"
    exact: bool = False
    """Whether speech is the same bits alone and in a crowd, as in `Engine`."""
    strength: float = 1.0
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Names and folders of adapters to load at the start."""
    adapter_rank: int | None = None
    """Highest rank of adapters; None if there will be none."""
    rows: int = 16
    positions: int = 2048
    max_waiting: int = 64
    watermark: bool = True
    max_adapters: int = 32
    """Maximum number of adapters loaded at the same time."""
    is_restart: bool = False
    """Whether an engine is replaced, which must not fail for an adapter that has gone meanwhile."""


@dataclass(frozen=True, slots=True)
class _Answered:
    """Message that is answered by a `RequestEnd` with its id."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex, kw_only=True)


@dataclass(frozen=True, slots=True)
class SpeakMessage(_Answered):
    """Request to speak. Its references are samples at the codec's sample rate."""

    request: SpeechRequest


@dataclass(frozen=True, slots=True)
class AnswerMessage(_Answered):
    """Request to answer a question about a recording."""

    samples: Samples
    question: str
    max_tokens: int
    constrained: bool = False


@dataclass(frozen=True, slots=True)
class AdapterMessage(_Answered):
    """Request to load an adapter, or to unload it if there is no source."""

    name: str
    source: str | None


@dataclass(frozen=True, slots=True)
class CancelMessage:
    """Request to end another request."""

    id: str


@dataclass(frozen=True, slots=True)
class EndSessionMessage:
    """Request to forget a session."""

    session: str


AnsweredMessage = SpeakMessage | AnswerMessage | AdapterMessage
EngineMessage = AnsweredMessage | CancelMessage | EndSessionMessage


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts of a loaded and warm model."""

    _: KW_ONLY
    sample_rate: int
    device: str
    answers: bool = False
    """Whether it answers in words instead of speaking."""
    adapters: tuple[str, ...] = ()
    watermark: str = ""
    """Name of the watermark; empty for none."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Error of a request, or of loading. Errors of the user carry a hint."""

    message: str
    hint: str = ""
    is_users: bool = True

    @staticmethod
    def of(error: MynaError, text: str = "") -> "Failure":
        """Make a failure of an error, which may name its request by its `text`: logs and answers do not repeat it."""
        what = error.what
        repeats = text and what.startswith((f"{text}:", f"{text} "))
        return Failure(f"the text{what.removeprefix(text)}" if repeats else what, error.hint)


@dataclass(frozen=True, slots=True)
class AudioPiece:
    """Next audio of a request: signed 16-bit samples."""

    id: str
    pcm: bytes


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """End of a request."""

    id: str
    finish_reason: FinishReason | None = None
    _: KW_ONLY
    warnings: tuple[str, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    """Answer to a question."""
    failure: Failure | None = None


RequestEvent = AudioPiece | RequestEnd


class WorkerLoad(NamedTuple):
    """Numbers of requests that are spoken and that wait, and the loaded adapters."""

    speaking: int = 0
    waiting: int = 0
    adapters: tuple[str, ...] = ()


class StepReport(NamedTuple):
    """Events of one step of the engine, its seconds, and the load after it."""

    events: tuple[RequestEvent, ...]
    seconds: float
    load: WorkerLoad
