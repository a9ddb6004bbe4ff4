"""State that all routes of a server share, and how the body of a request becomes a speech request."""

import asyncio
import hashlib
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Depends
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import HTTPConnection
from starlette.types import Scope

from myna.audio.files import Samples
from myna.core.errors import ConfigError, MynaError, SpeakError
from myna.models.ref import ModelRef, display_name, weights_sha256
from myna.provenance.speech_log import SpeechOrigin, check_log, log_speech, new_id
from myna.provenance.voice_store import NotStoredError, StoredVoice, VoiceStore
from myna.serve.engine_client import AdapterCatalog, EngineClient, EngineJob
from myna.serve.messages import AudioPiece, EngineSettings, RequestEnd, SpeakMessage, StepReport
from myna.serve.schemas import MAX_CHARACTERS, ApiError, InlineReference, SpeechSettings
from myna.serve.transcoding import UploadDecoder, recording_bytes
from myna.speak.references import hear_reference
from myna.speak.request import ReferenceRecording, SpeechRequest, read_reference

log = logging.getLogger("myna.serve")
LATENCY_BUCKETS = (0.02, 0.03, 0.045, 0.06, 0.08, 0.12, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STEP_BUCKETS = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.04, 0.1, 0.5)
LISTENING = ThreadPoolExecutor(1, "listening")
"""Thread of recognisers, which take seconds. The threads of asyncio write the speech log of running streams."""
MAX_HEARD = 1024
"""Maximum number of recordings whose transcripts are kept, of those that came without any."""


class ServerMetrics:
    """Figures of a running server for Prometheus, under `myna_`."""

    def __init__(self, client: EngineClient) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("myna_http_requests", "Requests.", ["path", "status"], registry=registry)
        self.first_audio = Histogram(
            "myna_first_audio_seconds", "Seconds to the first audio.", buckets=LATENCY_BUCKETS, registry=registry
        )
        self._seconds = Histogram(
            "myna_speech_request_seconds", "Seconds to the last audio.", buckets=LATENCY_BUCKETS, registry=registry
        )
        self._audio = Counter("myna_audio_seconds", "Seconds of speech made.", registry=registry)
        self._ends = Counter("myna_requests_finished", "Ends of requests.", ["finish_reason"], registry=registry)
        self._steps = Histogram("myna_step_seconds", "Seconds of one step.", buckets=STEP_BUCKETS, registry=registry)
        gauges = {
            "myna_streams_speaking": ("Requests that are being spoken.", lambda: client.load.speaking),
            "myna_requests_waiting": ("Requests that wait for a slot.", lambda: client.load.waiting),
            "myna_requests_in_flight": ("Requests that were taken and have not ended.", lambda: client.in_flight),
            "myna_rows": ("Maximum number of requests that are spoken at a time.", lambda: client.settings.rows),
            "myna_engine_restarts": ("Times that the engine process was started again.", lambda: client.restarts),
            "myna_engine_ready": ("Whether the model is loaded and warm.", lambda: client.ready),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=registry).set_function(value)
        self._client = client
        client.on_report = self._on_report

    def observe_request(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a request. All paths that are no routes count as one."""
        route = scope.get("route")
        self._requests.labels(getattr(route, "path", "other"), str(status)).inc()
        if getattr(route, "path", "") == "/v1/audio/speech" and status == 200:
            self._seconds.observe(seconds)

    def render(self) -> bytes:
        """Return all figures in the text format."""
        return generate_latest(self._registry)

    def _on_report(self, report: StepReport) -> None:
        self._steps.observe(report.seconds)
        for event in report.events:
            match event:
                case AudioPiece():
                    assert self._client.known is not None
                    self._audio.inc(len(event.pcm) / 2 / self._client.known.sample_rate)
                case RequestEnd():
                    self._ends.labels("error" if event.failure is not None else event.finish_reason or "done").inc()


NAMED_SOURCE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})=(.+)")
"""Pattern of NAME=SOURCE; the name of a folder may match too."""


def resolve_sources(
    sources: Sequence[str], model: str | None, *, keep_adapters: bool = False
) -> tuple[str, dict[str, str]]:
    """Return the model to open, and the adapters to load beside it by name. A single LoRA is merged into its model,
    which speaks fastest. Several, each perhaps as NAME=SOURCE, are loaded beside their one base model. With
    `keep_adapters` a single one is loaded beside it too, so that others can join it."""
    named = [_split_name(source) for source in sources]
    refs = [ModelRef.find(source, model) for _, source in named]
    has_lora = [ref.adapter is not None for ref in refs]
    if len(named) == 1 and (model is None or has_lora[0]) and not (keep_adapters and has_lora[0]):
        return named[0][1], {}
    first = 0 if has_lora[0] else 1
    if (first == 1 and model is not None) or not all(has_lora[first:]):
        others = ", ".join(source for (_, source), is_lora in zip(named, has_lora, strict=True) if not is_lora)
        raise ConfigError(
            f"only one base model can be served, and {others} is no LoRA",
            hint="myna serve MODEL RUN ..., or myna serve RUN ... [--model BASE]; another server serves another model",
        )
    base = named[0][1] if first else refs[0].base_source
    adapters = dict[str, str]()
    for name, source in named[first:]:
        if name in adapters or name == display_name(base):
            raise ConfigError(f"two models are named {name}", hint=f"give a name of your own: NAME={source}")
        adapters[name] = source
    return base, adapters


def _split_name(source: str) -> tuple[str, str]:
    match = NAMED_SOURCE.fullmatch(source)
    if match is not None and not Path(source).exists():
        return match[1], match[2]
    return display_name(source).rpartition("/")[2], source


DEFAULT_VOICE = "default"
"""Name of the model's own voice, without a reference."""
OPENAI_VOICES = frozenset(
    ("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse")
)
"""Default voices of OpenAI's clients: the model's own, unless a voice of that name is stored."""
OPENAI_MODELS = re.compile(r"(tts-1|tts-1-hd|gpt-4o-mini-tts)(-\d{4}(-\d\d-\d\d)?)?")
"""Pattern of the models of OpenAI's clients, some of which have dates: the model that is served."""

SHARED_FIELDS = {"language", "temperature", "top_k", "top_p", "max_seconds", "seed", "strength", "speed"}
"""Fields of a body that are fields of `SpeechRequest` too."""


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of a server: model, address, limits and folders."""

    engine: EngineSettings
    _: KW_ONLY
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    """Key that clients must send. A server that other machines can reach needs one, unless `no_api_key` is set."""
    no_api_key: bool = False
    max_characters: int = MAX_CHARACTERS
    adapter_folders: tuple[Path, ...] = ()
    """Folders below which adapters may be loaded while the server runs; none forbids it."""
    voices: Path | None = None
    """Folder of stored voices, instead of the user's own."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Words that are spelled otherwise for the model, in every request."""
    asr: str | None = None
    """Recogniser that checks consents; without one no consents are accepted."""
    drain_seconds: float = 30.0
    allowed_hosts: tuple[str, ...] = ()
    """Host names of a proxy, accepted even by a server that is bound to this machine."""
    allowed_origins: tuple[str, ...] = ()
    """Sites such as https://app.example.com whose pages may ask from browsers; `*` is all."""

    def __post_init__(self) -> None:
        hint = (
            'export MYNA_API_KEY="$(openssl rand -hex 32)" (`api_key` in a file for Ray); or --no-api-key, where '
            "something else checks who asks"
        )
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("the API key is empty, and would be none", hint=hint)
        if self.api_key is None and not self.no_api_key and (not is_loopback(self.host) or self.allowed_hosts):
            raise ConfigError("without an API key, everybody who can reach this server could use it", hint=hint)

    @property
    def model(self) -> str:
        """Id of the model in /v1/models."""
        return display_name(self.engine.source)


@dataclass(frozen=True, slots=True)
class PreparedSpeech:
    """Checked request, with the origin that its audio is logged and signed with."""

    request: SpeechRequest
    origin: SpeechOrigin
    warnings: tuple[str, ...] = ()
    """Problems of its references."""

    def take(self, number: int) -> "PreparedSpeech":
        """Return the same request with another seed and id."""
        request = self.request.take(number)
        return replace(self, request=request, origin=replace(self.origin, seed=request.seed, id=new_id()))


class ServerContext:
    """State of a server, shared by all requests."""

    def __init__(self, settings: ServerSettings) -> None:
        check_log()
        self.settings, self.client = settings, EngineClient(settings.engine)
        self.metrics, self.adapters = ServerMetrics(self.client), AdapterCatalog(self.client)
        self.store, self.uploads = VoiceStore(settings.voices), UploadDecoder()
        self.id, self.started_at = uuid.uuid4().hex[:8], int(time.time())
        """Random id that tells servers at one address apart, and the start in seconds since 1970."""
        self.voices: dict[str, ReferenceRecording] = {}
        """Recordings of stored voices that were read, by id."""
        self._told: set[str] = set()
        """Names of ignored fields that are in the log already."""
        self._heard: dict[tuple[str, str], str] = {}
        """Transcripts of recordings that came without any, by recording and language."""
        self._weights: dict[str, str] = {}
        """Hashes of trained weights, by source."""

    async def start(self) -> None:
        self.client.start()

    async def close(self) -> None:
        self.uploads.close()
        await self.client.close()

    async def change_adapter(self, name: str, source: str | None) -> None:
        """Add an adapter, or remove it if there is no source. Its files may be others than at an earlier time."""
        self._weights.pop(source or self.adapters.sources.get(name, ""), None)
        await (self.adapters.remove(name) if source is None else self.adapters.add(name, source))

    async def render_metrics(self) -> bytes:
        return self.metrics.render()

    @property
    def sample_rate(self) -> int:
        assert self.client.known is not None, "a model has been loaded"
        return self.client.known.sample_rate

    def resolve_model(self, name: str) -> str:
        """Return the name of the requested adapter; empty for the model itself."""
        base, adapters = self.settings.model, self.adapters.sources
        adapter = name.removeprefix(f"{base}:")
        if adapter in adapters:
            return adapter
        if name in ("", base) or OPENAI_MODELS.fullmatch(name):
            return ""
        raise ApiError(
            404,
            f"there is no model {name[:80]!r}; there are: {', '.join((base, *adapters))}",
            param="model",
            code="model_not_found",
        )

    async def prepare(self, body: SpeechSettings, text: str, *, priority: int = 0) -> PreparedSpeech:
        """Make a checked request of a body."""
        if new := sorted(set(body.ignored) - self._told):
            self._told.update(new)
            log.warning("fields of other servers are left out, here and from now on: %s", ", ".join(new))
        if len(text) > self.settings.max_characters:
            limit = f"at most {self.settings.max_characters} characters are spoken at a time, these are {len(text)}"
            raise ApiError(400, limit, param="input", code="string_above_max_length")
        if not text.strip():
            raise ApiError(400, "there is no text to speak", param="input")
        await self.client.wait_until_loaded()
        adapter = self.resolve_model(body.model)
        references, problems = await self._references(body)
        request = SpeechRequest(
            text,
            references,
            scene=body.instructions,
            spellings=self.settings.spellings,
            adapter=adapter,
            **body.model_dump(include=SHARED_FIELDS),
            priority=priority,
            watermark=self.settings.engine.watermark,
        )
        source = self.adapters.sources.get(adapter, self.settings.engine.source)
        try:
            weights = await self._weights_hash(source)
        except MynaError as error:
            log.error("the weights of %s cannot be read: %s", adapter or self.settings.model, error)
            message = "the weights cannot be read; the log of this server says why"
            raise ApiError(503, message, code="adapter_unavailable") from None
        origin = SpeechOrigin(
            self.settings.model,
            adapter or (display_name(source) if weights else ""),
            weights,
            voice=request.voice,
            consent=request.consent,
            text=text,
            seed=body.seed,
            watermark=self.client.known.watermark if self.client.known is not None else "",
        )
        return PreparedSpeech(request, origin, problems)

    async def _references(self, body: SpeechSettings) -> tuple[tuple[ReferenceRecording, ...], tuple[str, ...]]:
        """Return the recordings of a request, or that of its stored voice; and problems of the former."""
        given = body.reference if isinstance(body.reference, list) else [body.reference] if body.reference else []
        if body.ref_audio is not None:
            given = [InlineReference.model_construct(audio=body.ref_audio, text=body.ref_text or ""), *given]
        elif body.ref_text is not None:
            raise ApiError(400, "ref_text is the transcript of ref_audio, which is missing", param="ref_audio")
        if given:
            decoded, problems = [], list[str]()
            for reference in given:
                data = recording_bytes(reference.audio, param="ref_audio")
                checked = await self.uploads.decode_reference(data, self.sample_rate, param="ref_audio")
                name = f"reference sha256:{hashlib.sha256(data).hexdigest()}"
                text = reference.text
                if not text.strip():
                    text = await self._hear(checked.samples, name, body.language)
                    problems.append(f'heard "{text}"')
                decoded.append(ReferenceRecording(checked.samples, text, voice=name))
                problems += checked.problems
            return tuple(decoded), tuple(problems)
        return await self._stored_voice(body.voice_name), ()

    async def _hear(self, samples: Samples, name: str, language: str) -> str:
        """Return the words of a recording that came without its transcript."""
        if (known := self._heard.get((name, language))) is not None:
            return known
        arguments = (samples, self.sample_rate, self.settings.asr, language)
        try:
            text = await asyncio.get_running_loop().run_in_executor(LISTENING, hear_reference, *arguments)
        except SpeakError as error:
            raise ApiError(400, f"{error.what} (send its transcript: ref_text)", param="ref_text") from None
        except MynaError as error:
            log.error("the recogniser of references cannot be used: %s", error)
            raise ApiError(
                503, "references cannot be heard now; send a transcript: ref_text", param="ref_text"
            ) from None
        while len(self._heard) >= MAX_HEARD:
            del self._heard[next(iter(self._heard))]
        self._heard[name, language] = text
        return text

    async def _stored_voice(self, name: str) -> tuple[ReferenceRecording, ...]:
        if name in ("", DEFAULT_VOICE):
            return ()
        try:
            voice = await asyncio.to_thread(self.store.get_voice, name)
            if voice.id not in self.voices:
                self.voices[voice.id] = await asyncio.to_thread(self._read_voice, voice)
            return (self.voices[voice.id],)
        except NotStoredError:
            if name in OPENAI_VOICES:
                return ()
            names = [DEFAULT_VOICE, *(voice.name for voice in await asyncio.to_thread(self.store.list_voices))]
            raise ApiError(
                400,
                f"there is no voice {name[:80]!r}; there are: {', '.join(names)}",
                param="voice",
                code="voice_not_found",
            ) from None
        except MynaError as error:
            raise ApiError.of(error, param="voice") from None

    def _read_voice(self, voice: StoredVoice) -> ReferenceRecording:
        recording, text = self.store.reference(voice)
        samples = read_reference(recording, self.sample_rate)
        return ReferenceRecording(samples, text, voice=voice.name, consent=voice.consent.id)

    async def _weights_hash(self, source: str) -> str:
        """Return the hash of the weights of a run or an adapter; empty for an untuned model."""
        if source not in self._weights:
            ref = await asyncio.to_thread(ModelRef.find, source, self.settings.engine.model)
            weights = ref.weights if ref.is_trained else None
            self._weights[source] = await asyncio.to_thread(weights_sha256, weights) if weights is not None else ""
        return self._weights[source]

    async def submit(self, takes: Sequence[PreparedSpeech]) -> list[EngineJob]:
        """Send takes of one request to the engine, all or none, under the ids of their origins. Its adapter is loaded
        here, where no other request can take its place."""
        if adapter := takes[0].request.adapter:
            try:
                await self.adapters.load(adapter)
            except ApiError as error:
                if error.status != 400:
                    raise
                log.error("the adapter %s cannot be loaded: %r", adapter, error.message)
                message = f"the adapter {adapter} cannot be loaded; the log of this server says why"
                raise ApiError(503, message, code="adapter_unavailable") from None
        return self.client.submit_all([SpeakMessage(take.request, id=take.origin.id) for take in takes])

    async def log(self, origin: SpeechOrigin, audio: bytes, **details: Any) -> None:
        """Add audio that was sent to the speech log."""
        await asyncio.to_thread(log_speech, "streamed", origin, audio, **details)


async def _server_context(connection: HTTPConnection) -> ServerContext:
    context: ServerContext = connection.app.state.context
    return context


Context = Annotated[ServerContext, Depends(_server_context)]
"""Parameter of a route: the state of its server."""


Result = TypeVar("Result")


async def unless_disconnected(receive: Callable[[], Awaitable[Any]], work: Awaitable[Result]) -> Result | None:
    """Return the result of a coroutine, or None if the client goes away, which cancels it."""

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    gone, task = asyncio.ensure_future(wait_for_disconnect()), asyncio.ensure_future(work)
    try:
        await asyncio.wait({gone, task}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (gone, task):
            one.cancel()
        await asyncio.gather(gone, task, return_exceptions=True)
