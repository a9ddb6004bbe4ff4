"""The application of the HTTP process."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from myna.serve import server as server_module
from myna.serve.context import ServerContext, ServerSettings
from myna.serve.messages import EngineSettings
from myna.serve.server import create_app

MAX_OBJECTS = 2_000
"""Objects that a full collection of an idle server may visit, which takes a millisecond."""


async def do_nothing() -> None: ...


def test_a_full_collection_visits_no_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection stops all streams: 50 ms for the imports of this process, and a gap for a request that just
    began."""
    monkeypatch.setenv("MYNA_HOME", str(tmp_path))
    context = ServerContext(ServerSettings(EngineSettings("fledgling")))
    monkeypatch.setattr(context, "start", do_nothing)
    monkeypatch.setattr(context, "close", do_nothing)
    app = create_app(context)

    async def visited() -> int:
        async with app.router.lifespan_context(app):
            return len(gc.get_objects())

    try:
        assert asyncio.run(visited()) < MAX_OBJECTS
    finally:
        gc.unfreeze()


class SlowBody:
    """Function `receive` of a client that sends its body in pieces, with pauses, and never ends it."""

    def __init__(self, first: bytes, piece: bytes, pause: float) -> None:
        self._first, self._piece, self._pause, self.pieces = first, piece, pause, 0

    async def __call__(self) -> Message:
        await asyncio.sleep(self._pause)
        self.pieces += 1
        return {"type": "http.request", "body": self._first if self.pieces == 1 else self._piece, "more_body": True}


def answer(path: str, content_type: str, receive: SlowBody) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Return status, headers and error of the answer to a POST whose body has no end."""
    settings = ServerSettings(EngineSettings("fledgling"), host="127.0.0.1", port=80)
    app, sent = create_app(ServerContext(settings)), list[Message]()
    headers = [(b"host", b"127.0.0.1:80"), (b"content-type", content_type.encode())]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    start, *bodies = sent
    told = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], told, json.loads(b"".join(body["body"] for body in bodies))["error"]


FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
BODIES = [
    ("/v1/audio/speech", "application/json", b'{"input": "'),
    ("/v1/audio/assessments", "multipart/form-data; boundary=b", FILE),
]


@pytest.mark.parametrize(("path", "content_type", "first"), BODIES)
def test_a_body_that_comes_too_slowly_is_given_up(
    path: str, content_type: str, first: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYNA_HOME", str(tmp_path))
    monkeypatch.setattr(server_module, "BODY_SECONDS", 0.3)
    body = SlowBody(first, b"a", pause=0.02)
    status, headers, error = answer(path, content_type, body)
    assert (status, error["code"]) == (408, "timeout") and "did not come within 0.3 s" in error["message"]
    assert headers["connection"] == "close" and 1 < body.pieces < 16


@pytest.mark.parametrize(("path", "content_type", "first"), BODIES)
def test_no_more_of_a_body_is_read_than_is_allowed(
    path: str, content_type: str, first: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYNA_HOME", str(tmp_path))
    body = SlowBody(first, b"a" * 2**20, pause=0)
    status, headers, error = answer(path, content_type, body)
    assert (status, error["code"]) == (413, "body_too_large") and "at most 32 MiB" in error["message"]
    assert headers["connection"] == "close" and body.pieces == 33
