"""Bodies of requests and responses, and errors, in the shapes of OpenAI's API and of other speech servers."""

import difflib
import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, field_validator, model_validator

from myna.core.errors import MynaError
from myna.provenance.voice_store import DamagedRecordError, NotStoredError
from myna.serve.messages import Failure

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""Types of errors by status; other refused requests are `invalid_request_error`."""


log = logging.getLogger("myna.serve")


class ApiError(Exception):
    """Refused or failed request, with its status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind = kind or KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.headers = dict(headers or {})

    @staticmethod
    def of(error: MynaError, status: int = 400, *, param: str | None = None) -> "ApiError":
        if isinstance(error, DamagedRecordError):
            log.error("%s", error)  # the message names the file, which the answer must not
            return ApiError(500, "a stored voice or consent is damaged; the log of this server names it")
        return ApiError(
            404 if isinstance(error, NotStoredError) else status, f"{error.what} ({error.hint})", param=param
        )

    @staticmethod
    def of_failure(failure: Failure) -> "ApiError":
        """Make an error that the engine process has reported."""
        if not failure.is_users:
            return ApiError(503, failure.message, code="engine_error", headers={"retry-after": "2"})
        return ApiError(400, f"{failure.message} ({failure.hint})" if failure.hint else failure.message)

    @staticmethod
    def of_body(errors: Sequence[Mapping[str, Any]]) -> "ApiError":
        """Make an error of the first fault of a body. The value is not repeated, since it may be megabytes."""
        first = errors[0]
        place = [str(part) for part in first["loc"] if part != "body"]
        name = ".".join(place) or None
        if first["type"] == "json_invalid":
            return ApiError(400, "the body is no JSON")
        message = first["msg"]
        if first["type"] == "extra_forbidden":
            close = difflib.get_close_matches(place[-1], SpeechBody.model_fields, n=1)
            meant = f"did you mean {close[0]}? " if close else ""
            message = f"there is no such field; {meant}/docs lists all fields"
        return ApiError(400, f"{name}: {message}" if name else message, param=name)

    @staticmethod
    def of_bug() -> "ApiError":
        return ApiError(500, "the server has failed; its log says how")

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


AudioFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm", "mulaw", "alaw"]
SampleRate = Literal[8000, 12000, 16000, 22050, 24000, 32000, 44100, 48000]
OPUS_RATES = (8000, 12000, 16000, 24000, 48000)
TELEPHONY_RATES = {"mulaw": 8000, "alaw": 8000}
"""Default sample rates of formats that have one of their own."""
ALIASES = {"speaker": "voice", "lang_code": "language", "text_lang": "language", "language_id": "language"}
"""Our names for fields of other servers."""
FORMAT_ALIASES = {"ulaw": "mulaw", "g711_ulaw": "mulaw", "g711_alaw": "alaw"}
_PEER_FIELDS = """
user metadata backend volume_multiplier normalization_options return_download_link download_format task_type
max_new_tokens x_vector_only_mode initial_codec_chunk_frames non_streaming_mode repetition_penalty prompt_lang
text_split_method batch_size batch_threshold split_bucket parallel_infer sample_steps fragment_interval
split_granularity exaggeration cfg_weight streaming_chunk_size streaming_strategy streaming_buffer_size
streaming_quality timestamp_granularities
"""
IGNORED_FIELDS = frozenset(_PEER_FIELDS.split())
"""Fields that clients of OpenAI, LocalAI, Kokoro-FastAPI, vLLM-Omni, SGLang-Omni and Chatterbox send, and that mean
nothing here. They are left out with a warning; any other unknown field is refused."""
MAX_CHARACTERS = 4096
"""Longest text in characters, as in OpenAI's API."""
MAX_RECORDING_CHARACTERS = 14 * 2**20
"""Longest recording in characters of base64."""
MAX_BATCH_ITEMS = 32
MAX_TAKES = 8


def is_unicode(text: str) -> bool:
    """Whether a text has no unpaired surrogates, which JSON allows but UTF-8 cannot encode."""
    try:
        return text.isascii() or bool(text.encode())  # a recording in base64 need not be looked through
    except UnicodeEncodeError:
        return False


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _check_unicode(cls, value: Any) -> Any:
        """Refuse unpaired surrogates, which JSON allows but UTF-8 cannot encode."""
        if isinstance(value, str) and not is_unicode(value):
            raise ValueError("this is no Unicode text")
        return value


class VoiceId(_Body):
    """Voice by its id, as OpenAI's client sends custom voices."""

    id: str = Field(max_length=256)


class InlineReference(_Body):
    """Recording of a voice, with its transcript. Without one the recogniser of the server hears its words."""

    audio: str = Field(max_length=MAX_RECORDING_CHARACTERS, description="Recording in base64, or a data URL.")
    text: str = Field(default="", max_length=MAX_CHARACTERS, description="Transcript of the recording.")


class SpeechSettings(_Body):
    """Settings of speech beside its text. All but the first six are our own fields (`extra_body`)."""

    model: str = Field(default="", max_length=256, description="A model or an adapter of /v1/models.")
    voice: str | VoiceId = Field(default="", description="A voice of /v1/audio/voices; empty: the model's own.")
    instructions: str | None = Field(
        default=None, max_length=MAX_CHARACTERS, description="A sentence about the room or the manner (the scene)."
    )
    response_format: AudioFormat = "mp3"
    speed: float = Field(default=1.0, ge=0.25, le=4.0, description="Tempo; the pitch stays.")
    stream_format: Literal["audio", "sse"] = Field(
        default="audio", description="Raw audio as it is made, or server-sent events."
    )
    stream: bool | None = Field(default=None, description="Taken for compatibility: responses are always streamed.")
    seed: int = Field(default=0, ge=0, lt=2**53, description="Same seed, same speech.")
    temperature: float | None = Field(default=None, ge=0.0, le=5.0, description="0 is greedy.")
    top_k: int | None = Field(default=None, ge=0, le=100_000)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    max_seconds: float = Field(default=60.0, gt=0.0, le=600.0, description="Maximum length, at which a runaway is cut.")
    strength: float = Field(default=1.0, ge=0.0, le=4.0, description="Scale of the adapter that `model` names.")
    language: str = Field(default="", max_length=32, description="Language of a long text, to find its sentences.")
    ref_audio: str | None = Field(
        default=None, max_length=MAX_RECORDING_CHARACTERS, description="Recording of the voice, in base64."
    )
    ref_text: str | None = Field(default=None, max_length=MAX_CHARACTERS, description="Transcript of `ref_audio`.")
    reference: InlineReference | Annotated[list[InlineReference], Field(max_length=4)] | None = Field(
        default=None, description="Recording with its transcript; several for [SPEAKER0], [SPEAKER1] tags."
    )

    sample_rate: SampleRate | None = Field(
        default=None, description="Samples a second; by default the model's rate, and 8000 for mulaw and alaw."
    )
    bit_rate: int | None = Field(
        default=None, ge=8000, le=256_000, description="Bits a second of mp3, opus and aac, as near as the format can."
    )
    _ignored: tuple[str, ...] = ()

    @model_validator(mode="wrap")
    @classmethod
    def _read_peers(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Accept what clients of other servers send."""
        if not isinstance(data, dict):
            return handler(data)
        known = {
            ALIASES.get(name, name): value
            for name, value in data.items()
            if name not in IGNORED_FIELDS and value is not None  # null is a field that is not given
        }
        if (format := str(known.get("response_format"))) in FORMAT_ALIASES:
            known["response_format"] = FORMAT_ALIASES[format]
        body = handler(known)
        body._ignored = tuple(sorted(IGNORED_FIELDS & data.keys()))
        return body

    @model_validator(mode="after")
    def _check_rates(self) -> Self:
        if self.response_format == "opus" and self.sample_rate not in (None, *OPUS_RATES):
            raise ValueError(f"opus has the sample rates {', '.join(map(str, OPUS_RATES))}")
        if self.bit_rate is not None and self.response_format not in ("mp3", "opus", "aac"):
            raise ValueError("only mp3, opus and aac have a bit_rate")
        return self

    def output_rate(self, sample_rate: int) -> int:
        """Return the sample rate of the audio, given that of the model."""
        return self.sample_rate or TELEPHONY_RATES.get(self.response_format, sample_rate)

    @property
    def bit_depth(self) -> int:
        return 8 if self.response_format in TELEPHONY_RATES else 16

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields of other servers that were left out."""
        return self._ignored

    @property
    def voice_name(self) -> str:
        return self.voice if isinstance(self.voice, str) else self.voice.id


class SpeechBody(SpeechSettings):
    """Body of `POST /v1/audio/speech`."""

    input: str = Field(description="The text to speak.")
    takes: int = Field(
        default=1,
        ge=1,
        le=MAX_TAKES,
        description="Speak it so often, with `seed` and those after it; answered as JSON.",
    )


class BatchItem(_Body):
    """One text of a batch. Missing fields are those of `defaults`."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    input: str


class SpeechBatchBody(_Body):
    """Body of `POST /v1/audio/speech/batch`."""

    items: list[BatchItem] = Field(min_length=1, max_length=MAX_BATCH_ITEMS)
    defaults: dict[str, Any] = Field(default_factory=dict, description="Fields of a speech request, for all items.")


class LoadAdapterBody(_Body):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    lora_path: str = Field(min_length=1, max_length=4096, description="A folder below one of the allowed folders.")
    load_inplace: bool = False


class UnloadAdapterBody(_Body):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str = Field(min_length=1, max_length=64)
    lora_int_id: int | None = None


class ConsentNameBody(_Body):
    """Body of `POST /v1/audio/voice_consents/ID`."""

    name: str = Field(min_length=1, max_length=64)
