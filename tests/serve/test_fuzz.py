"""Any message of a client is answered, over HTTP and over a WebSocket, and the next request is served."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from myna.serve.schemas import SpeechSettings
from tests.serve.stub_engine import stub_server
from tests.serve.test_session import session

ROUTES = ["/v1/audio/speech", "/v1/audio/speech/batch", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
TEXT = st.text(st.characters(), max_size=40) | st.sampled_from(["Yes.", "\ud800", "\0", "<|eot_id|>", "[SPEAKER0]"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
NAMES = sorted({*SpeechSettings.model_fields, "input", "takes", "items", "defaults", "lora_name", "lora_path", "type"})
BODY = st.dictionaries(st.sampled_from(NAMES) | TEXT, JSON | st.sampled_from(["Yes.", 1, 0.5]), max_size=6)
ITEMS = st.builds(lambda items, rest: {**rest, "items": items}, st.lists(BODY, max_size=4), BODY)
KINDS = st.sampled_from(["session.config", "input.text", "input.done", "input.cancel", "nothing"])
MESSAGES = st.builds(lambda kind, rest: {**rest, "type": kind}, KINDS, BODY) | JSON
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(requests=st.lists(st.tuples(st.sampled_from(ROUTES), BODY | ITEMS | JSON), min_size=1, max_size=8))
def test_every_body_is_answered(
    requests: list[tuple[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with stub_server(tmp_path, monkeypatch) as (context, web):
            for route, body in requests:
                content, kind = json.dumps(body), {"content-type": "application/json"}
                answer = await asyncio.wait_for(web.post(route, content=content, headers=kind), 20)
                assert answer.status_code < 500, (route, body, answer.text)
                if answer.status_code >= 400:
                    assert answer.json()["error"]["message"], (route, body)
            assert context.client.in_flight == 0
            assert (await web.post(ROUTES[0], json={"input": "Yes."})).status_code == 200

    asyncio.run(run())


@FUZZ
@given(messages=st.lists(MESSAGES, max_size=8))
def test_every_message_of_a_session_is_answered(
    messages: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with session(tmp_path, monkeypatch) as one:
            for message in messages:
                one.raw(json.dumps(message))
            one.send("input.cancel")
            await one.until("audio.cancelled")
            one.send("session.config")
            one.send("input.text", text="Yes.\n")
            assert (await one.until("audio.done"))["error"] is None

    asyncio.run(run())
