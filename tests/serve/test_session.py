"""One WebSocket session, with an engine that speaks at once."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from starlette.websockets import WebSocket

from myna.serve import speech_routes
from myna.serve.messages import EndSessionMessage
from myna.serve.speech_routes import SpeechSession
from tests.serve.stub_engine import StubClient, spoken, stub_of, stub_server
from tests.serve.test_voice_faults import store_voice


class Connection:
    """Two ends of a WebSocket: what is put in is received by the session, and its events come out."""

    def __init__(self, client: StubClient) -> None:
        self.client = client
        self._in, self._out = asyncio.Queue[dict[str, Any]](), asyncio.Queue[dict[str, Any]]()

    async def receive(self) -> dict[str, Any]:
        return await self._in.get()

    async def send_out(self, message: Any) -> None:
        if message.get("text"):
            self._out.put_nowait(json.loads(message["text"]))

    def raw(self, text: str) -> None:
        self._in.put_nowait({"type": "websocket.receive", "text": text})

    def send(self, kind: str, **fields: Any) -> None:
        self.raw(json.dumps({"type": kind, **fields}))

    async def until(self, *kinds: str) -> dict[str, Any]:
        """Return the next event of one of these kinds."""
        while True:
            event = await asyncio.wait_for(self._out.get(), 20)
            if event["type"] in kinds:
                return event


@asynccontextmanager
async def session(folder: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[Connection]:
    async with stub_server(folder, patch) as (context, _):
        connection = Connection(stub_of(context))
        connection._in.put_nowait({"type": "websocket.connect"})
        socket = WebSocket({"type": "websocket"}, connection.receive, connection.send_out)
        await socket.accept()
        running = asyncio.create_task(SpeechSession(socket, context).run())
        yield connection
        connection.send("session.close")
        await asyncio.wait_for(running, 20)


def test_no_voice_continues_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("anna", "marta"):
        store_voice(tmp_path, name)
    file = io.BytesIO()
    soundfile.write(file, np.random.default_rng(0).normal(0, 0.1, 24_000), 24_000, format="WAV")
    inline = {"ref_audio": base64.b64encode(file.getvalue()).decode(), "ref_text": "as I said"}

    async def run() -> None:
        async with session(tmp_path, monkeypatch) as one:
            configs: list[dict[str, Any]] = [{"voice": "anna"}, {"voice": "marta"}, {}, inline, inline | {"seed": 3}]
            for config in configs:
                one.send("session.config", **config)
                one.send("input.text", text="Yes. No. ")
                one.send("input.done")
                await one.until("session.done")
            sessions = [message.request.session for message in one.client.requests]
            assert len(sessions) == 10 and all(sessions)
            assert [len(set(sessions[n : n + 2])) for n in range(0, 10, 2)] == [1] * 5
            assert len(set(sessions)) == 4 and sessions[6:8] == sessions[8:], "another seed is the same voice"
            ended = [message.session for message in one.client.sent if isinstance(message, EndSessionMessage)]
            assert set(sessions[:6]) <= set(ended), "nothing of an earlier voice is kept"

    asyncio.run(run())


def test_settings_are_those_of_the_moment_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with session(tmp_path, monkeypatch) as one:
            one.client.answer = lambda _: []
            one.send("session.config", seed=1)
            one.send("input.text", text="First. Second. Third.\n")
            one.send("session.config", seed=2)
            one.send("input.text", text="Fourth.\n")
            await one.until("audio.start")
            one.client.answer = lambda message: spoken(message) if hasattr(message, "request") else []
            for event in spoken(one.client.requests[0]):
                one.client._deliver(event)
            one.send("input.done")
            await one.until("session.done")
            assert [message.request.seed for message in one.client.requests] == [1, 1, 1, 2]

    asyncio.run(run())


def test_the_queue_of_a_session_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_routes, "MAX_WAITING_SENTENCES", 20)
    monkeypatch.setattr(speech_routes, "MAX_WAITING_CONFIGS", 3)

    async def run() -> None:
        async with session(tmp_path, monkeypatch) as one:
            one.client.answer = lambda _: []
            for _ in range(25):
                one.send("input.text", text="Yes. ")
            assert (await one.until("error"))["error"]["code"] == "queue_full"
            one.send("input.cancel")
            await one.until("audio.cancelled")
            for seed in range(6):
                one.send("session.config", seed=seed)
                one.send("input.text", text="Yes. Yes. ")
            assert "configurations" in (await one.until("error"))["error"]["message"]
            one.send("input.cancel")
            await one.until("audio.cancelled")
            for _ in range(25):
                one.send("input.done")
            await one.until("session.done")

    asyncio.run(run())


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '{"type": "input.text", "text": "a \\ud800 b.\\n"}']
)
def test_a_malformed_text_gets_an_error_and_the_session_goes_on(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with session(tmp_path, monkeypatch) as one:
            one.raw(text)
            assert (await one.until("error", "audio.done"))["type"] == "error"
            one.send("input.text", text="Yes.\n")
            assert (await one.until("audio.done"))["error"] is None

    asyncio.run(run())


def test_a_pause_between_sentences_loses_no_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with session(tmp_path, monkeypatch) as one:
            one.send("input.text", text='Hello. <break time="1s"/> World. <break/>\n')
            one.send("input.done")
            await one.until("session.done")
            spoken_texts = [message.request.text for message in one.client.requests]
            assert spoken_texts == ['Hello. <break time="1s"/>', "World. <break/>"]

    asyncio.run(run())
