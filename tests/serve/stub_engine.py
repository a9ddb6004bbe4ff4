"""The real application and client, with an engine in this process that speaks noise at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from myna.serve import context as context_module
from myna.serve.context import ServerContext, ServerSettings
from myna.serve.engine_client import EngineClient
from myna.serve.messages import (
    AudioPiece,
    EngineInfo,
    EngineMessage,
    EngineSettings,
    RequestEnd,
    RequestEvent,
    SpeakMessage,
)
from myna.serve.server import create_app

RATE = 24_000


def spoken(message: SpeakMessage, *, samples: int = 2400) -> list[RequestEvent]:
    """Return the events of a request that was spoken."""
    noise = np.random.default_rng(message.request.seed).integers(-3000, 3000, samples)
    pieces: list[RequestEvent] = [AudioPiece(message.id, noise.astype("<i2").tobytes())] if samples else []
    return [*pieces, RequestEnd(message.id, "stop", output_tokens=samples // 960)]


class StubClient(EngineClient):
    """Client without an engine process. `answer` gives the events of a message; by default all is spoken at once."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.sent: list[EngineMessage] = []
        self.answer: Callable[[Any], list[RequestEvent]] = lambda message: (
            spoken(message) if isinstance(message, SpeakMessage) else [RequestEnd(message.id)]
        )

    @property
    def requests(self) -> list[SpeakMessage]:
        """Requests to speak that were sent."""
        return [one for one in self.sent if isinstance(one, SpeakMessage)]

    def start(self) -> None:
        info = EngineInfo(sample_rate=RATE, device="cpu", adapters=tuple(self.settings.adapters))
        self._receive(info)

    def send(self, message: EngineMessage) -> None:
        self.sent.append(message)
        if hasattr(message, "id"):
            for event in self.answer(message):
                self._deliver(event)


@asynccontextmanager
async def stub_server(
    folder: Path, patch: pytest.MonkeyPatch, *, engine: EngineSettings | None = None, **settings: Any
) -> AsyncIterator[tuple[ServerContext, httpx2.AsyncClient]]:
    """Start the application without an engine process; yield its state and a client of it."""
    patch.setenv("MYNA_HOME", str(folder))
    patch.setattr(context_module, "EngineClient", StubClient)
    chosen = engine or EngineSettings("fledgling", watermark=False)
    context = ServerContext(ServerSettings(chosen, **settings))
    await context.start()
    transport = httpx2.ASGITransport(app=create_app(context), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as web:
        yield context, web
    await context.close()


def stub_of(context: ServerContext) -> StubClient:
    assert isinstance(context.client, StubClient)
    return context.client
