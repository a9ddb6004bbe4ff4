"""Text in, speech out over a WebSocket: sentences are spoken as they are complete, and can be interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from typing import Any

from fastapi import APIRouter
from pydantic import Field, ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect

from myna.serve.api_errors import ApiError, validation_error
from myna.serve.context import ServerContext, server_context
from myna.serve.encoders import AudioEncoder, AudioFormat
from myna.serve.messages import EndSessionMessage
from myna.serve.schemas import SpeechSettings
from myna.serve.speech_routes import submit_speech
from myna.text.normalization import normalise_text
from myna.text.sentences import split_sentences

router = APIRouter()
log = logging.getLogger("myna.serve")


class SessionConfig(SpeechSettings):
    """Fields of `session.config`: those of a speech request, for all that follows."""

    type: str = ""
    response_format: AudioFormat = "pcm"
    stream_audio: bool = Field(default=True, description="Off: each sentence is sent when it is whole.")


class _UtteranceEnd:
    """Stands behind the sentences of one `input.done`."""


@router.websocket("/v1/audio/speech/stream")
async def stream_speech(socket: WebSocket) -> None:
    await socket.accept()
    await SpeechSession(socket, server_context(socket)).run()


class SpeechSession:
    """One connection: text comes in pieces, sentences go to the engine one after another, with those before them in
    their prompts.

    In: `session.config`, `input.text`, `input.done`, `input.cancel`, `session.close`. Out: for each sentence
    `audio.start`, audio in binary messages and `audio.done`; `session.done` behind each `input.done`;
    `audio.cancelled`, `error`.
    """

    def __init__(self, socket: WebSocket, context: ServerContext) -> None:
        self._socket, self._context = socket, context
        self._config = SessionConfig()
        self._id = uuid.uuid4().hex
        self._text = ""
        """What is not a whole sentence yet."""
        self._characters = 0
        self._sentences: asyncio.Queue[str | _UtteranceEnd] = asyncio.Queue()
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
            except ValueError:
                parsed = None
            if isinstance(parsed, dict):
                return parsed
            await self._send({"type": "error", **ApiError(400, "a message is one JSON object with a type").body})

    def _handle(self, message: dict[str, Any]) -> None:
        match message:
            case {"type": "session.config"}:
                try:
                    self._config = SessionConfig.model_validate(message)
                except ValidationError as error:
                    raise validation_error(error.errors(include_url=False)) from None
            case {"type": "input.text", "text": str(text)}:
                self._add_text(text)
            case {"type": "input.text"}:
                raise ApiError(400, "input.text has a text, a string", param="text")
            case {"type": "input.done"}:
                self._queue_sentences(self._text)
                self._text, self._characters = "", 0
                self._sentences.put_nowait(_UtteranceEnd())
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
        *complete, self._text = split_sentences(rest, self._config.language) or [""]
        for sentence in complete:
            self._queue_sentences(sentence)

    def _queue_sentences(self, text: str) -> None:
        for line in text.splitlines():
            for sentence in split_sentences(normalise_text(line), self._config.language):
                if any(character.isalnum() for character in sentence):
                    self._sentences.put_nowait(sentence.strip())

    async def _cancel(self, speaker: asyncio.Task[None]) -> asyncio.Task[None]:
        """End what is spoken, and forget what waits."""
        speaker.cancel()
        await asyncio.gather(speaker, return_exceptions=True)
        self._sentences, self._text, self._characters = asyncio.Queue(), "", 0
        await self._send({"type": "audio.cancelled", "utterance_index": self._utterance})
        self._utterance, self._sentence = self._utterance + 1, 0
        return self._start_speaker()

    def _start_speaker(self) -> asyncio.Task[None]:
        speaker = asyncio.ensure_future(self._speak_all())
        speaker.add_done_callback(self._speaker_ended)
        return speaker

    def _speaker_ended(self, speaker: asyncio.Task[None]) -> None:
        """It goes on until it is cancelled; else the client has gone, or there is a bug, and a silence without end."""
        if not speaker.cancelled() and (error := speaker.exception()) is not None:
            if not isinstance(error, WebSocketDisconnect):
                log.error("a WebSocket session failed", exc_info=error)
            self._closing = asyncio.ensure_future(self._close(1011))

    async def _close(self, code: int = 1000) -> None:
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # it may have gone meanwhile
            await self._socket.close(code)

    async def _speak_all(self) -> None:
        while True:
            sentence = await self._sentences.get()
            if isinstance(sentence, _UtteranceEnd):
                counts = {"utterance_index": self._utterance, "total_sentences": self._sentence}
                await self._send({"type": "session.done", **counts})
                self._utterance, self._sentence = self._utterance + 1, 0
                continue
            place = {"utterance_index": self._utterance, "sentence_index": self._sentence}
            try:
                await self._speak(sentence, place)
            except ApiError as error:
                await self._send({"type": "audio.done", **place, "total_bytes": 0, **error.body})
            self._sentence += 1

    async def _speak(self, sentence: str, place: dict[str, int]) -> None:
        config, context = self._config, self._context
        prepared = await context.prepare(config, sentence, session=self._id)
        job = submit_speech(context, prepared)
        encoder, given, waiting, sent = AudioEncoder(config.response_format, context.sample_rate), bytearray(), b"", 0
        form = {"format": config.response_format, "sample_rate": context.sample_rate}
        try:
            await self._send({"type": "audio.start", **place, "sentence_text": sentence, **form})
            async for pcm in job.pieces():
                given += pcm
                waiting += encoder.push(pcm)
                if config.stream_audio and waiting:
                    await self._socket.send_bytes(waiting)
                    sent, waiting = sent + len(waiting), b""
            waiting += encoder.finish()
            if waiting:
                await self._socket.send_bytes(waiting)
            assert job.end is not None
            end = {"finish_reason": job.end.finish_reason, "warnings": list(job.end.warnings), "error": None}
            await self._send({"type": "audio.done", **place, "total_bytes": sent + len(waiting), **end})
        finally:
            job.cancel()
            encoder.close()
            if given:
                reason = job.end.finish_reason if job.end is not None else "cancelled"
                await asyncio.shield(context.log(prepared.origin, bytes(given), {"finish_reason": reason}))

    async def _send(self, message: dict[str, Any]) -> None:
        await self._socket.send_text(json.dumps(message))
