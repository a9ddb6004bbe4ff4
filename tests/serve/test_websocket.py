"""Text over a WebSocket: spoken as it is written, and interrupted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from tests.serve.conftest import RunningServer

pytestmark = pytest.mark.slow


@pytest.fixture
def socket(server: RunningServer) -> Iterator[ClientConnection]:
    with connect(f"{server.url.replace('http', 'ws')}/v1/audio/speech/stream", open_timeout=30) as one:
        yield one
    server.wait_for("myna_requests_in_flight", 0)


def send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    socket.send(json.dumps({"type": kind, **fields}))


def receive_until(socket: ClientConnection, kind: str) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Read messages up to one of this type, and the audio of each sentence between them."""
    events, audio = list[dict[str, Any]](), list[bytes]()
    while not events or events[-1]["type"] != kind:
        message = socket.recv(timeout=60)
        if isinstance(message, bytes):
            audio[-1] += message
            continue
        events.append(json.loads(message))
        if events[-1]["type"] == "audio.start":
            audio.append(b"")
    return events, audio


def test_sentences_are_spoken_as_they_are_written(socket: ClientConnection, server: RunningServer) -> None:
    send(socket, "session.config", model="fledgling", seed=0)
    send(socket, "input.text", text="Good morning. ")
    send(socket, "input.text", text="How are")
    events, first = receive_until(socket, "audio.done")
    assert events[0] == {
        "type": "audio.start",
        "utterance_index": 0,
        "sentence_index": 0,
        "sentence_text": "Good morning.",
        "format": "pcm",
        "sample_rate": 24000,
    }
    assert events[-1]["finish_reason"] == "stop" and events[-1]["total_bytes"] == len(first[0])
    body = {"model": "fledgling", "input": "Good morning.", "response_format": "pcm"}
    assert httpx2.post(f"{server.url}/v1/audio/speech", json=body, timeout=60).content == first[0]
    send(socket, "input.text", text=" you?")
    send(socket, "input.done")
    events, second = receive_until(socket, "session.done")
    assert [event["type"] for event in events] == ["audio.start", "audio.done", "session.done"]
    assert events[0]["sentence_text"] == "How are you?" and events[-1]["total_sentences"] == 2
    body["input"] = "How are you?"
    alone = httpx2.post(f"{server.url}/v1/audio/speech", json=body, timeout=60).content
    assert second[0] and second[0] != alone, "the sentence before it is in its prompt"
    send(socket, "input.text", text="Again.")
    send(socket, "input.done")
    assert receive_until(socket, "session.done")[0][0]["utterance_index"] == 1
    send(socket, "session.close")
    with pytest.raises(Exception, match="1000"):
        socket.recv(timeout=10)


def test_an_interruption_frees_the_row(socket: ClientConnection, server: RunningServer) -> None:
    send(socket, "input.text", text="It was a fine day, and they walked along the river, and on, and on. " * 9)
    events, _ = receive_until(socket, "audio.start")
    socket.recv(timeout=60)
    send(socket, "input.cancel")
    events, _ = receive_until(socket, "audio.cancelled")
    server.wait_for("myna_streams_speaking", 0)
    send(socket, "input.text", text="Yes.")
    send(socket, "input.done")
    events, audio = receive_until(socket, "session.done")
    assert events[0]["sentence_text"] == "Yes." and events[0]["utterance_index"] == 1 and audio[0]


def test_a_connection_that_is_lost_frees_the_row(server: RunningServer) -> None:
    socket = connect(f"{server.url.replace('http', 'ws')}/v1/audio/speech/stream")
    send(socket, "input.text", text="It was a fine day, and they walked along the river, and on, and on. " * 9)
    receive_until(socket, "audio.start")
    socket.socket.close()
    server.wait_for("myna_requests_in_flight", 0)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("{", "one JSON object"),
        ("[]", "one JSON object"),
        (b"\0\1", "one JSON object"),
        ('{"type": "nothing"}', "there are messages of type"),
        ('{"type": "input.text"}', "has a text"),
        ('{"type": "input.text", "text": 3}', "has a text"),
        ('{"type": "session.config", "speed": "fast"}', "speed"),
        ('{"type": "session.config", "sead": 3}', "sead"),
        (json.dumps({"type": "input.text", "text": "a" * 5000}), "at most 4096 characters"),
    ],
)
def test_a_malformed_message_gets_an_error(socket: ClientConnection, message: str | bytes, words: str) -> None:
    socket.send(message)
    assert words in receive_until(socket, "error")[0][0]["error"]["message"]
    send(socket, "input.text", text="Yes.")
    send(socket, "input.done")
    assert receive_until(socket, "session.done")[1][0]


def test_a_sentence_that_fails_does_not_end_the_session(socket: ClientConnection) -> None:
    send(socket, "input.text", text="Say <|eot_id|> now. Yes. ")
    send(socket, "input.done")
    events, audio = receive_until(socket, "session.done")
    done = [event for event in events if event["type"] == "audio.done"]
    assert "control token" in done[0]["error"]["message"] and done[1]["error"] is None and audio[-1]


def test_pages_of_other_sites_cannot_connect(server: RunningServer) -> None:
    with pytest.raises(InvalidStatus, match="403"):
        connect(f"{server.url.replace('http', 'ws')}/v1/audio/speech/stream", origin=Origin("https://evil.test"))
