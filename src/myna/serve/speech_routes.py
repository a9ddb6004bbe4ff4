"""Routes that speak: a text as raw audio, as events or in batches; and text as it is written, over a WebSocket."""

import asyncio
import base64
import json
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, ValidationError
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from myna.provenance.credentials import sign_audio
from myna.provenance.speech_log import SpeechOrigin
from myna.serve.context import Context, PreparedSpeech, ServerContext, unless_disconnected
from myna.serve.engine_client import EngineJob
from myna.serve.messages import EndSessionMessage, RequestEnd
from myna.serve.schemas import ApiError, AudioFormat, BatchItem, SpeechBatchBody, SpeechBody, SpeechSettings, is_unicode
from myna.serve.transcoding import MEDIA_TYPES, AudioEncoder, encode_whole
from myna.text.normalization import normalise_text
from myna.text.sentences import PAUSE, split_sentences

SEND_SECONDS = 60.0
"""Seconds a client may take to read data before it counts as gone."""
QUEUE_RETRY_SECONDS = 0.2
"""Seconds between attempts of a batch to enter the queue."""

router = APIRouter(tags=["speech"])
log = logging.getLogger("myna.serve")


@router.post(
    "/v1/audio/speech",
    response_class=Response,
    responses={200: {"content": {media: {} for media in (*MEDIA_TYPES.values(), "text/event-stream")}}},
)
async def create_speech(body: SpeechBody, request: Request, context: Context) -> Response:
    """Speak a text. Audio is sent as it is generated."""
    prepared = await context.prepare(body, body.input)
    if body.takes == 1:
        return SpeechResponse(context, body, prepared)
    if body.stream_format == "sse":
        raise ApiError(400, "several takes are answered as JSON, not as events", param="takes")
    takes = [prepared.take(number) for number in range(body.takes)]
    jobs = await context.submit(takes)

    async def speak() -> list[dict[str, Any]]:
        async with asyncio.TaskGroup() as group:  # a take that fails ends the others
            work = [group.create_task(_finish(context, *pair, body)) for pair in zip(takes, jobs, strict=True)]
        return [task.result() for task in work]

    try:
        return _results(await unless_disconnected(request.receive, speak()) or [], body.ignored)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        for job in jobs:
            job.cancel()


@router.post("/v1/audio/speech/batch")
async def create_speech_batch(body: SpeechBatchBody, request: Request, context: Context) -> JSONResponse:
    """Speak several texts, and answer when all are spoken. A failed item has an error of its own."""
    items = [_merge_item(item, body.defaults, number) for number, item in enumerate(body.items)]
    turns = asyncio.Semaphore(context.settings.engine.rows)

    async def speak(item: SpeechBody) -> dict[str, Any]:
        async with turns:
            try:
                prepared = await context.prepare(item, item.input, priority=1)
                return await _finish(context, prepared, await _submit_when_free(context, prepared), item)
            except ApiError as error:
                failure = error
            except Exception as error:
                log.error("an item of a batch failed", exc_info=error)
                failure = ApiError.of_bug()
            return _result(item, item.seed, b"", RequestEnd(""), error=failure.body["error"])

    spoken = await unless_disconnected(request.receive, asyncio.gather(*map(speak, items))) or []
    failed = sum(item["error"] is not None for item in spoken)
    counts = {"total": len(spoken), "succeeded": len(spoken) - failed, "failed": failed}
    return _results(spoken, {name for item in items for name in item.ignored}, **counts)


def _results(items: Sequence[dict[str, Any]], ignored: Iterable[str], **counts: int) -> JSONResponse:
    numbered = [{"index": number} | item for number, item in enumerate(items)]
    return JSONResponse({"results": numbered, **counts}, headers=_ignored_header(ignored))


def _ignored_header(names: Iterable[str]) -> dict[str, str]:
    """Return the header that names fields that were left out."""
    known = ", ".join(sorted(names))
    return {"x-ignored-fields": known.encode("ascii", "replace").decode()[:500]} if known else {}


def _merge_item(item: BatchItem, defaults: dict[str, Any], number: int) -> SpeechBody:
    try:
        return SpeechBody.model_validate({**defaults, **item.model_dump()})
    except ValidationError as error:
        problem = ApiError.of_body(error.errors(include_url=False))
        message, param = f"items.{number}: {problem.message}", f"items.{number}.{problem.param}"
        raise ApiError(400, message, param=param) from None


async def _submit_when_free(context: ServerContext, prepared: PreparedSpeech) -> EngineJob:
    """Submit a request of a batch, which waits while the queue is full."""
    while True:
        try:
            return (await context.submit([prepared]))[0]
        except ApiError as error:
            if error.status != 429:
                raise
        await asyncio.sleep(QUEUE_RETRY_SECONDS)


async def _finish(
    context: ServerContext, prepared: PreparedSpeech, job: EngineJob, body: SpeechSettings
) -> dict[str, Any]:
    """Wait for a request, and return its result with the whole file."""
    try:
        pcm, end = await job.result()
    finally:
        job.cancel()
    if not pcm:
        raise _no_speech(prepared)
    content, is_signed = await asyncio.to_thread(_finished_file, pcm, body, context.sample_rate, prepared.origin)
    await context.log(prepared.origin, pcm, finish_reason=end.finish_reason, signed=is_signed)
    return _result(body, prepared.origin.seed, content, end, prepared.warnings)


def _result(
    body: SpeechSettings,
    seed: int,
    content: bytes,
    end: RequestEnd,
    warnings: Sequence[str] = (),
    error: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the result of one text, or of one take."""
    return {
        "audio": base64.b64encode(content).decode(),
        "format": body.response_format,
        "seed": seed,
        "finish_reason": end.finish_reason or "error",
        "warnings": [*warnings, *end.warnings],
        "error": error,
    }


def _finished_file(pcm: bytes, body: SpeechSettings, sample_rate: int, origin: SpeechOrigin) -> tuple[bytes, bool]:
    """Return a whole file, with credentials if its format allows them, and whether it has some."""
    plain = encode_whole(pcm, body.response_format, sample_rate, body.output_rate(sample_rate), body.bit_rate)
    signed = sign_audio(plain, f".{body.response_format}", origin)
    return (plain, False) if signed is None else (signed, True)


def _no_speech(prepared: PreparedSpeech) -> ApiError:
    message = f"the model ended at once with seed {prepared.origin.seed}: there is no speech; try another seed"
    return ApiError(500, message, code="no_speech", headers={"x-should-retry": "false"})


async def encoded_audio(
    context: ServerContext, prepared: PreparedSpeech, body: SpeechSettings, job: EngineJob
) -> AsyncGenerator[bytes, None]:
    """Yield the audio of a request in the format of its body, as it is generated. The audio is logged before its end is
    sent, so that the log has it whatever happens to the server then, and also if the caller leaves early."""
    rate = context.sample_rate
    encoder = AudioEncoder(body.response_format, rate, body.output_rate(rate), body.bit_rate)
    given = bytearray()
    try:
        async for pcm in job.pieces():
            given += pcm
            if data := encoder.push(pcm):
                yield data
        if not given:
            raise _no_speech(prepared)
        if data := encoder.finish():
            yield data
    finally:
        job.cancel()  # cancel first: the slot is freed with the next step, while writing the log may wait
        encoder.close()
        if given:
            reason = job.end.finish_reason if job.end is not None else "cancelled"
            await asyncio.shield(context.log(prepared.origin, bytes(given), finish_reason=reason))


class SpeechResponse(Response):
    """Response of streamed speech. The status is sent with the first audio, so that an earlier failure has a status of
    its own. A later failure aborts the connection, or is an event. A client that goes away ends its request."""

    def __init__(self, context: ServerContext, body: SpeechBody, prepared: PreparedSpeech) -> None:
        super().__init__()
        self._context, self._body, self._prepared = context, body, prepared
        self._is_sse = body.stream_format == "sse"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        began = time.monotonic()
        (job,) = await self._context.submit([self._prepared])
        try:
            await unless_disconnected(receive, self._stream(job, send, began))
        finally:
            job.cancel()

    async def _stream(self, job: EngineJob, send: Send, began: float) -> None:
        is_started = False

        async def send_body(data: bytes, *, more: bool = True) -> None:
            nonlocal is_started
            if not is_started:
                is_started = True
                self._context.metrics.first_audio.observe(time.monotonic() - began)
                await send({"type": "http.response.start", "status": 200, "headers": self._response_headers()})
            message = {"type": "http.response.body", "body": data, "more_body": more}
            # Not `wait_for`: in Python 3.11 it forgets that it was cancelled where what it waits for has just ended,
            # and the speech would go on without its client.
            async with asyncio.timeout(SEND_SECONDS):
                await send(message)

        try:
            async with aclosing(encoded_audio(self._context, self._prepared, self._body, job)) as audio:
                async for data in audio:
                    await send_body(
                        _event("speech.audio.delta", audio=base64.b64encode(data).decode()) if self._is_sse else data
                    )
            assert job.end is not None
            await send_body(self._done_event(job.end) if self._is_sse else b"", more=False)
        except ApiError as error:
            if not is_started:
                raise
            log.error("request %s failed after its first audio: %r", self._prepared.origin.id, error.message)
            if self._is_sse:
                await send_body(_event("speech.audio.error", **error.body), more=False)
            # No last chunk is sent, which aborts the connection: raw audio that ended as usual would look complete.
        except TimeoutError:
            log.warning("request %s: its client no longer reads", self._prepared.origin.id)

    def _response_headers(self) -> list[tuple[bytes, bytes]]:
        origin, format = self._prepared.origin, self._body.response_format
        headers = {
            "content-type": "text/event-stream; charset=utf-8" if self._is_sse else MEDIA_TYPES[format],
            "cache-control": "no-store",
            "x-accel-buffering": "no",
            "x-request-id": origin.id,
            "x-server-id": self._context.id,
            "x-sample-rate": str(self._body.output_rate(self._context.sample_rate)),
            "x-channels": "1",
            "x-bit-depth": str(self._body.bit_depth),
            "x-watermark": origin.watermark or "none",
            **_ignored_header(self._body.ignored),
        }
        return [(name.encode(), value.encode()) for name, value in headers.items()]

    def _done_event(self, end: RequestEnd) -> bytes:
        usage = {
            "input_tokens": end.input_tokens,
            "output_tokens": end.output_tokens,
            "total_tokens": end.input_tokens + end.output_tokens,
        }
        warnings = [*self._prepared.warnings, *end.warnings]
        return _event("speech.audio.done", usage=usage, finish_reason=end.finish_reason, warnings=warnings)


def _event(kind: str, **content: Any) -> bytes:
    return f"data: {json.dumps({'type': kind, **content})}\n\n".encode()


MAX_WAITING_SENTENCES, MAX_WAITING_CONFIGS = 1000, 8
"""Sentences of one session that wait, about an hour of speech, and different configurations of them, which may each
hold a recording. More is refused until some were spoken."""


def _session_full(what: str) -> ApiError:
    return ApiError(
        429, f"{what} wait to be spoken, and no more are taken; send more after audio.done", code="queue_full"
    )


class SessionConfig(SpeechSettings):
    """Fields of `session.config`: those of a speech request, for all following text."""

    type: str = ""
    response_format: AudioFormat = "pcm"
    stream_audio: bool = Field(default=True, description="Off: each sentence is sent when it is whole.")


@router.websocket("/v1/audio/speech/stream")
async def stream_speech(socket: WebSocket, context: Context) -> None:
    await socket.accept()
    await SpeechSession(socket, context).run()


def _sentences(text: str, language: str) -> list[str]:
    """Split text into sentences. A pause belongs to the sentence before it, and without one is left out."""
    found: list[str] = []
    for sentence in split_sentences(text, language):
        while (pause := PAUSE.match(sentence)) is not None:
            if found:
                found[-1] = f"{found[-1].rstrip()} {pause[0]} "
            sentence = sentence[pause.end() :].lstrip()
        if sentence:
            found.append(sentence)
    return found


class SpeechSession:
    """One WebSocket connection: its sentences go to the engine one after another, each with earlier ones in its prompt.

    In: `session.config`, `input.text`, `input.done`, `input.cancel`, `session.close`. Out: `audio.start`, audio in
    binary messages and `audio.done` for each sentence; `session.done` after each `input.done`; `audio.cancelled`,
    `error`.
    """

    def __init__(self, socket: WebSocket, context: ServerContext) -> None:
        self._socket, self._context = socket, context
        self._config = SessionConfig()
        self._id = uuid.uuid4().hex
        self._text = ""
        """Text that is not a whole sentence yet."""
        self._characters = 0
        self._waiting: deque[tuple[str, SessionConfig] | None] = deque()
        """Sentences that wait, with the settings of the moment; None after those of one `input.done`."""
        self._has_come = asyncio.Event()
        self._voice: tuple[str, ...] = ()
        """Adapter, voice and consent of the sentences in the prompt: those of another one are never continued."""
        self._utterance = self._sentence = 0

    async def run(self) -> None:
        speaker = self._start_speaker()
        try:
            while (message := await self._receive()) is not None:
                kind = message.get("type")
                if kind == "session.close":
                    break
                if kind == "input.cancel":
                    speaker = await self._cancel(speaker)
                    continue
                try:
                    self._handle(message)
                except ApiError as error:
                    await self._send({"type": "error", **error.body})
        except WebSocketDisconnect:
            return
        finally:
            speaker.cancel()
            await asyncio.gather(speaker, return_exceptions=True)
            self._context.client.send(EndSessionMessage(self._id))
        await self._close()

    async def _receive(self) -> dict[str, Any] | None:
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return None
            try:
                parsed = json.loads(message.get("text") or "")
            except (ValueError, RecursionError):
                parsed = None
            if isinstance(parsed, dict):
                return parsed
            await self._send({"type": "error", **ApiError(400, "a message is one JSON object with a type").body})

    def _handle(self, message: dict[str, Any]) -> None:
        match message:
            case {"type": "session.config"}:
                if len({id(one[1]) for one in self._waiting if one is not None}) >= MAX_WAITING_CONFIGS:
                    raise _session_full(f"sentences of {MAX_WAITING_CONFIGS} configurations")
                try:
                    self._config = SessionConfig.model_validate(message)
                except ValidationError as error:
                    raise ApiError.of_body(error.errors(include_url=False)) from None
            case {"type": "input.text" | "input.done"} if len(self._waiting) >= MAX_WAITING_SENTENCES:
                raise _session_full(f"{MAX_WAITING_SENTENCES} sentences")
            case {"type": "input.text", "text": str(text)} if is_unicode(text):
                self._add_text(text)
            case {"type": "input.text"}:
                raise ApiError(400, "input.text has a text, a string of Unicode", param="text")
            case {"type": "input.done"}:
                self._queue_sentences(self._text)
                self._text, self._characters = "", 0
                self._waiting.append(None)
                self._has_come.set()
            case _:
                kinds = "session.config, input.text, input.done, input.cancel and session.close"
                raise ApiError(400, f"there are messages of type {kinds}", param="type")

    def _add_text(self, text: str) -> None:
        limit = self._context.settings.max_characters
        if self._characters + len(text) > limit:
            message = f"an utterance has at most {limit} characters; input.done ends one"
            raise ApiError(400, message, param="text", code="string_above_max_length")
        self._characters += len(text)
        self._text += text
        # A line that has ended is complete, and so are all sentences but the last: it may go on.
        lines, newline, rest = self._text.rpartition("\n")
        if newline:
            self._queue_sentences(lines)
        *complete, self._text = _sentences(rest, self._config.language) or [""]
        for sentence in complete:
            self._queue_sentences(sentence)

    def _queue_sentences(self, text: str) -> None:
        for line in text.splitlines():
            for sentence in _sentences(normalise_text(line), self._config.language):
                if any(character.isalnum() for character in sentence):
                    self._waiting.append((sentence.strip(), self._config))
                    self._has_come.set()

    async def _cancel(self, speaker: asyncio.Task[None]) -> asyncio.Task[None]:
        """End current speech, and forget waiting sentences."""
        speaker.cancel()
        await asyncio.gather(speaker, return_exceptions=True)
        self._waiting.clear()
        self._text, self._characters = "", 0
        await self._send({"type": "audio.cancelled", "utterance_index": self._utterance})
        self._utterance, self._sentence = self._utterance + 1, 0
        return self._start_speaker()

    def _start_speaker(self) -> asyncio.Task[None]:
        speaker = asyncio.ensure_future(self._speak_all())
        speaker.add_done_callback(self._speaker_ended)
        return speaker

    def _speaker_ended(self, speaker: asyncio.Task[None]) -> None:
        """Close the connection if the speaker failed: it runs until it is cancelled or its client has gone."""
        if not speaker.cancelled() and (error := speaker.exception()) is not None:
            if not isinstance(error, WebSocketDisconnect):
                log.error("a WebSocket session failed", exc_info=error)
            self._closing = asyncio.ensure_future(self._close(1011))

    async def _close(self, code: int = 1000) -> None:
        with suppress(RuntimeError, WebSocketDisconnect):  # it may have gone meanwhile
            await self._socket.close(code)

    async def _speak_all(self) -> None:
        while True:
            while not self._waiting:
                self._has_come.clear()
                await self._has_come.wait()
            waiting = self._waiting.popleft()
            if waiting is None:
                counts = {"utterance_index": self._utterance, "total_sentences": self._sentence}
                await self._send({"type": "session.done", **counts})
                self._utterance, self._sentence = self._utterance + 1, 0
                continue
            place = {"utterance_index": self._utterance, "sentence_index": self._sentence}
            try:
                await self._speak(*waiting, place)
            except ApiError as error:
                await self._send({"type": "audio.done", **place, "total_bytes": 0, **error.body})
            self._sentence += 1

    async def _speak(self, sentence: str, config: SessionConfig, place: dict[str, int]) -> None:
        context = self._context
        prepared = await context.prepare(config, sentence)
        request = prepared.request
        if self._voice != (voice := (request.adapter, request.voice, request.consent)):
            context.client.send(EndSessionMessage(self._id))
            self._voice, self._id = voice, uuid.uuid4().hex
        prepared = replace(prepared, request=replace(request, session=self._id))
        (job,) = await context.submit([prepared])
        form = {"format": config.response_format, "sample_rate": config.output_rate(context.sample_rate)}
        waiting, sent = b"", 0
        try:
            await self._send({"type": "audio.start", **place, "sentence_text": sentence, **form})
            async with aclosing(encoded_audio(context, prepared, config, job)) as audio:
                async for data in audio:
                    waiting += data
                    if config.stream_audio:
                        await self._socket.send_bytes(waiting)
                        sent, waiting = sent + len(waiting), b""
            if waiting:
                await self._socket.send_bytes(waiting)
            assert job.end is not None
            warnings = [*prepared.warnings, *job.end.warnings]
            end = {"finish_reason": job.end.finish_reason, "warnings": warnings, "error": None}
            await self._send({"type": "audio.done", **place, "total_bytes": sent + len(waiting), **end})
        finally:
            job.cancel()

    async def _send(self, message: dict[str, Any]) -> None:
        await self._socket.send_text(json.dumps(message))
