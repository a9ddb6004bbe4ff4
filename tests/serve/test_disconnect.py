"""A client that leaves at any moment ends its speech."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from unittest import mock

import pytest
from starlette.types import Message

from myna.provenance.speech_log import SpeechOrigin
from myna.serve.context import PreparedSpeech
from myna.serve.schemas import SpeechBody
from myna.serve.speech_routes import SpeechResponse
from myna.speak.request import SpeechRequest


class LongJob:
    """Stand-in for a request to the engine, with more audio than any test reads."""

    end = None

    def __init__(self) -> None:
        self.cancelled = self.ended = False

    async def pieces(self) -> AsyncIterator[bytes]:
        for _ in range(200):
            await asyncio.sleep(0)
            yield bytes(480)
        self.ended = True

    def cancel(self) -> None:
        self.cancelled = True


@pytest.mark.parametrize("turns", range(24))
def test_speech_ends_in_any_turn_of_the_loop_in_which_its_client_leaves(turns: int) -> None:
    """One of these turns is that in which a piece of audio has just been sent."""
    job = LongJob()
    context = mock.Mock(sample_rate=24_000, log=mock.AsyncMock())
    context.submit = mock.AsyncMock(return_value=[job])
    origin = SpeechOrigin("fledgling", "", "", "", "", "Yes.", 0, "")
    body = SpeechBody(model="fledgling", input="Yes.", voice="default", response_format="pcm")
    response = SpeechResponse(context, body, PreparedSpeech(SpeechRequest("Yes."), origin))

    async def receive() -> Message:
        for _ in range(turns):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        await asyncio.sleep(0)

    async def run() -> None:
        await response({"type": "http"}, receive, send)

    asyncio.run(run())
    assert job.cancelled and not job.ended, "it was spoken on without its client"
