"""What all routes of a server share: the engine, its voices and adapters, and how a request becomes a message."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import HTTPConnection

from myna.audio.files import Samples
from myna.core.errors import DataError
from myna.models.ref import ModelRef, display_name, weights_sha256
from myna.provenance.speech_log import SpeechOrigin, check_log, log_speech
from myna.provenance.voice_store import VoiceStore
from myna.serve.adapters import AdapterCatalog
from myna.serve.api_errors import ApiError
from myna.serve.engine_client import EngineClient
from myna.serve.messages import EngineSettings
from myna.serve.metrics import ServerMetrics
from myna.serve.schemas import MAX_CHARACTERS, InlineReference, SpeechSettings
from myna.serve.uploads import UploadDecoder, recording_bytes
from myna.speak.request import ReferenceRecording, SpeechRequest, read_reference

DEFAULT_VOICE = "default"
"""The model's own voice, without a reference."""
OPENAI_VOICES = frozenset(
    ("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse")
)
"""Voices that programs send if nobody has chosen one: the model's own, unless a voice of that name is stored."""
OPENAI_MODELS = frozenset(("tts-1", "tts-1-hd", "gpt-4o-mini-tts"))
"""The same of models."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What is served, where, and to whom."""

    engine: EngineSettings
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_characters: int = MAX_CHARACTERS
    adapter_folders: tuple[Path, ...] = ()
    """Folders below which adapters may be loaded while the server runs; none: it is not allowed."""
    voices: Path | None = None
    """Folder of stored voices, in place of the user's own."""
    asr: str | None = None
    """Recogniser that checks consents; without one none are taken."""
    drain_seconds: float = 30.0
    allowed_hosts: tuple[str, ...] = ()
    """Names of a proxy, to which a server that is bound to this machine answers too."""

    @property
    def model(self) -> str:
        """Id of the model in /v1/models."""
        return display_name(self.engine.source)


@dataclass(frozen=True, slots=True)
class PreparedSpeech:
    """A checked request, and the origin that its audio is logged and signed with."""

    request: SpeechRequest
    origin: SpeechOrigin

    def take(self, number: int) -> PreparedSpeech:
        """Return the same request with another seed."""
        request = self.request.take(number)
        return PreparedSpeech(request, replace(self.origin, seed=request.seed))


@dataclass(eq=False)
class ServerContext:
    """State of a server, one for all requests."""

    settings: ServerSettings
    client: EngineClient
    metrics: ServerMetrics
    store: VoiceStore
    uploads: UploadDecoder
    adapters: AdapterCatalog
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    """Tells servers behind one address apart."""
    started_at: int = field(default_factory=lambda: int(time.time()))
    _voice_samples: dict[str, tuple[Samples, str]] = field(default_factory=dict)
    _weights: dict[str, str] = field(default_factory=dict)
    """Hashes of trained weights, by source."""

    @classmethod
    def create(cls, settings: ServerSettings) -> ServerContext:
        check_log()
        client = EngineClient(settings.engine)
        store = VoiceStore(settings.voices)
        return cls(settings, client, ServerMetrics(client), store, UploadDecoder(), AdapterCatalog(client))

    async def start(self) -> None:
        self.client.start()

    async def close(self) -> None:
        self.uploads.close()
        await self.client.close()

    async def change_adapter(self, name: str, source: str | None) -> None:
        """Add an adapter, or remove it where there is no source."""
        await (self.adapters.remove(name) if source is None else self.adapters.add(name, source))

    async def render_metrics(self) -> bytes:
        return self.metrics.render()

    @property
    def sample_rate(self) -> int:
        assert self.client.known is not None, "a model has been loaded"
        return self.client.known.sample_rate

    def resolve_model(self, name: str) -> str:
        """Name of the adapter that a request asks for, empty for the model itself."""
        base, adapters = self.settings.model, self.adapters.sources
        adapter = name.removeprefix(f"{base}:")
        if adapter in adapters:
            return adapter
        if name in ("", base) or name in OPENAI_MODELS:
            return ""
        raise ApiError(
            404,
            f"there is no model {name[:80]!r}; there are: {', '.join((base, *adapters))}",
            param="model",
            code="model_not_found",
        )

    async def prepare(self, body: SpeechSettings, text: str, *, priority: int = 0, session: str = "") -> PreparedSpeech:
        """Check the body of a request, and make the request of it."""
        if len(text) > self.settings.max_characters:
            limit = f"at most {self.settings.max_characters} characters are spoken at a time, these are {len(text)}"
            raise ApiError(400, limit, param="input", code="string_above_max_length")
        if not text.strip():
            raise ApiError(400, "there is no text to speak", param="input")
        await self.client.wait_until_loaded()
        adapter = self.resolve_model(body.model)
        request = SpeechRequest(
            text,
            await self._references(body),
            scene=body.instructions,
            language=body.language,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            max_seconds=body.max_seconds,
            seed=body.seed,
            adapter=adapter,
            strength=body.strength,
            speed=body.speed,
            priority=priority,
            session=session,
            watermark=self.settings.engine.watermark,
        )
        source = self.adapters.sources.get(adapter, self.settings.engine.source)
        weights = await self._weights_hash(source)
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
        if adapter:
            await self.adapters.load(adapter)
        return PreparedSpeech(request, origin)

    async def _references(self, body: SpeechSettings) -> tuple[ReferenceRecording, ...]:
        """Return the recordings that a request carries, or that of its stored voice."""
        given = body.reference if isinstance(body.reference, list) else [body.reference] if body.reference else []
        if body.ref_audio is not None:
            given = [InlineReference.model_construct(audio=body.ref_audio, text=body.ref_text or ""), *given]
        elif body.ref_text is not None:
            raise ApiError(400, "ref_text is the transcript of ref_audio, which is missing", param="ref_audio")
        if given:
            decoded = []
            for reference in given:
                if not reference.text.strip():
                    raise ApiError(400, "a reference needs its transcript", param="ref_text")
                data = recording_bytes(reference.audio, param="ref_audio")
                samples = await self.uploads.decode(data, self.sample_rate, param="ref_audio")
                decoded.append(ReferenceRecording(samples, reference.text))
            return tuple(decoded)
        return await self._stored_voice(body.voice_name)

    async def _stored_voice(self, name: str) -> tuple[ReferenceRecording, ...]:
        if name in ("", DEFAULT_VOICE):
            return ()
        try:
            voice = await asyncio.to_thread(self.store.get_voice, name)
        except DataError:
            if name in OPENAI_VOICES:
                return ()
            names = await asyncio.to_thread(self.voice_names)
            raise ApiError(
                400,
                f"there is no voice {name[:80]!r}; there are: {', '.join(names)}",
                param="voice",
                code="voice_not_found",
            ) from None
        if voice.id not in self._voice_samples:
            self._voice_samples[voice.id] = await asyncio.to_thread(self._read_voice, name)
        samples, text = self._voice_samples[voice.id]
        return (ReferenceRecording(samples, text, voice=voice.name, consent=voice.consent.id),)

    def _read_voice(self, name: str) -> tuple[Samples, str]:
        recording, text = self.store.reference(self.store.get_voice(name))
        return read_reference(recording, self.sample_rate), text

    def voice_names(self) -> list[str]:
        return [DEFAULT_VOICE, *(voice.name for voice in self.store.list_voices())]

    def forget_voice(self, id: str) -> None:
        self._voice_samples.pop(id, None)

    async def _weights_hash(self, source: str) -> str:
        """Of the weights of a run or an adapter; empty for an untuned model."""
        if source not in self._weights:
            ref = await asyncio.to_thread(ModelRef.find, source, self.settings.engine.model)
            weights = ref.weights if ref.is_trained else None
            self._weights[source] = await asyncio.to_thread(weights_sha256, weights) if weights is not None else ""
        return self._weights[source]

    async def log(self, origin: SpeechOrigin, audio: bytes, details: Mapping[str, Any]) -> None:
        """Add what was given out to the speech log."""
        await asyncio.to_thread(log_speech, "streamed", origin, audio, **details)


def server_context(connection: HTTPConnection) -> ServerContext:
    context: ServerContext = connection.app.state.context
    return context


async def unless_disconnected(receive: Callable[[], Awaitable[Any]], work: Awaitable[Result]) -> Result | None:
    """The result of a coroutine, which is cancelled if the client goes away; None then."""

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
