"""Several takes of a text, and batches of texts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from myna.models import open_family, save_tiny_model
from myna.provenance.speech_log import LOG_FILE
from myna.serve import speech_routes
from myna.serve.messages import (
    AdapterMessage,
    CancelMessage,
    EngineSettings,
    Failure,
    RequestEnd,
    SpeakMessage,
    StepReport,
    WorkerLoad,
)
from tests.models.helpers import random_adapter
from tests.serve.stub_engine import spoken, stub_of, stub_server

SPEECH = "/v1/audio/speech"
SMALL = EngineSettings("fledgling", rows=2, max_waiting=2, watermark=False)


def test_takes_that_find_no_room_leave_no_orphans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with stub_server(tmp_path, monkeypatch, engine=SMALL) as (context, web):
            client = stub_of(context)
            client.answer = lambda _: []
            held = asyncio.create_task(web.post(SPEECH, json={"input": "Yes."}))
            while not client.in_flight:
                await asyncio.sleep(0.01)
            refused = await web.post(SPEECH, json={"input": "Yes.", "takes": 4})
            assert refused.status_code == 429 and client.in_flight == 1, "none of them was begun"
            never = await web.post(SPEECH, json={"input": "Yes.", "takes": 5})
            assert never.status_code == 400, "a client that tries again would try for ever"
            for event in spoken(client.requests[0]):
                client._deliver(event)
            assert (await held).status_code == 200

    asyncio.run(run())


def test_a_take_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with stub_server(tmp_path, monkeypatch, engine=SMALL) as (context, web):
            client = stub_of(context)

            def fail_the_second(message: Any) -> list[Any]:
                is_second = isinstance(message, SpeakMessage) and message.request.seed == 1
                return [RequestEnd(message.id, failure=Failure("no room"))] if is_second else []

            client.answer = fail_the_second
            answer = await asyncio.wait_for(web.post(SPEECH, json={"input": "Yes.", "takes": 2}), 10)
            assert answer.status_code == 400 and "no room" in answer.text
            assert client.in_flight == 0 and sum(isinstance(one, CancelMessage) for one in client.sent) == 1
            assert len(asyncio.all_tasks()) == 1, "nothing waits for the other one"

    asyncio.run(run())


def test_takes_have_ids_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with stub_server(tmp_path, monkeypatch) as (_, web):
            assert len((await web.post(SPEECH, json={"input": "Yes.", "takes": 3})).json()["results"]) == 3

    asyncio.run(run())
    rows = [json.loads(line) for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows) == 3


@pytest.mark.parametrize("format", ["mp3", "wav", "pcm"])
def test_an_item_without_speech_fails_alone(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> dict[str, Any]:
        async with stub_server(tmp_path, monkeypatch) as (context, web):
            stub_of(context).answer = lambda one: spoken(one, samples=2400 if one.request.text == "Yes." else 0)
            items = [{"input": "Yes."}, {"input": "No."}]
            body = {"items": items, "defaults": {"response_format": format}}
            content: dict[str, Any] = (await web.post(f"{SPEECH}/batch", json=body)).json()
            return content

    content = asyncio.run(run())
    assert (content.get("succeeded"), content.get("failed")) == (1, 1), content
    first, second = content["results"]
    assert first["audio"] and first["error"] is None
    assert second["error"]["code"] == "no_speech" and second["finish_reason"] == "error" and not second["audio"]


def test_an_item_that_finds_a_bug_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = speech_routes._finished_file

    def fail_once(pcm: bytes, body: Any, *rest: Any) -> tuple[bytes, bool]:
        if body.seed == 1:
            raise RuntimeError("a bug")
        return write(pcm, body, *rest)

    monkeypatch.setattr(speech_routes, "_finished_file", fail_once)

    async def run() -> dict[str, Any]:
        async with stub_server(tmp_path, monkeypatch) as (_, web):
            body = {"items": [{"input": "Yes.", "seed": seed} for seed in range(3)]}
            content: dict[str, Any] = (await web.post(f"{SPEECH}/batch", json=body)).json()
            return content

    content = asyncio.run(run())
    assert (content.get("succeeded"), content.get("failed")) == (2, 1) and "a bug" not in json.dumps(content)


def test_no_adapter_is_evicted_between_its_loading_and_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    folder = str(random_adapter(open_family(str(model)), tmp_path / "adapter"))
    settings = EngineSettings(
        str(model), rows=2, adapters=dict.fromkeys("abc", folder), adapter_rank=8, max_adapters=1, watermark=False
    )

    async def run() -> None:
        async with stub_server(tmp_path, monkeypatch, engine=settings) as (context, web):
            client = stub_of(context)

            def answer(message: Any) -> list[Any]:
                loaded = client.load.adapters
                if isinstance(message, AdapterMessage):
                    changed = (*loaded, message.name) if message.source else tuple(set(loaded) - {message.name})
                    client._receive(StepReport((), 0.0, WorkerLoad(adapters=changed)))
                    return [RequestEnd(message.id)]
                if isinstance(message, CancelMessage):
                    return []
                assert message.request.adapter in loaded, "it was evicted"
                asyncio.get_running_loop().call_later(0.05, lambda: [*map(client._deliver, spoken(message))])
                return []

            client.answer = answer
            items = [{"input": "Yes.", "model": name} for name in "abcabc"]
            content = (await web.post(f"{SPEECH}/batch", json={"items": items})).json()
            assert content["succeeded"] == 6, content

    asyncio.run(run())
