"""Fields, models and paths as clients of OpenAI send them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from myna.serve.messages import EngineSettings
from tests.serve.stub_engine import stub_of, stub_server

SPEECH = "/v1/audio/speech"


def test_a_field_that_is_null_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with stub_server(tmp_path, monkeypatch) as (context, web):
            nulls = dict.fromkeys(("voice", "speed", "seed", "stream_format", "response_format", "takes", "model"))
            assert (await web.post(SPEECH, json={"input": "Yes.", **nulls})).status_code == 200
            items = [{"input": "Yes.", **nulls}]
            batch = await web.post(f"{SPEECH}/batch", json={"items": items, "defaults": {"seed": 3}})
            assert batch.json()["succeeded"] == 1
            assert [message.request.speed for message in stub_of(context).requests] == [1.0, 1.0]
            missing = await web.post(SPEECH, json={"input": None})
            assert missing.status_code == 400 and "input: Field required" in missing.text

    asyncio.run(run())


@pytest.mark.parametrize("model", ["tts-1", "tts-1-1106", "tts-1-hd-1106", "gpt-4o-mini-tts-2025-12-15"])
def test_dated_models_of_openai_are_the_model_that_is_served(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with stub_server(tmp_path, monkeypatch) as (_, web):
            assert (await web.post(SPEECH, json={"input": "Yes.", "model": model})).status_code == 200
            assert (await web.post(SPEECH, json={"input": "Yes.", "model": f"{model}-x"})).status_code == 404

    asyncio.run(run())


def test_a_model_of_the_hub_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineSettings("someone/some-model", watermark=False)

    async def run() -> None:
        async with stub_server(tmp_path, monkeypatch, engine=engine) as (_, web):
            (listed,) = (await web.get("/v1/models")).json()["data"]
            assert listed["id"] == "someone/some-model"
            for path in ("someone/some-model", "someone%2Fsome-model"):
                assert (await web.get(f"/v1/models/{path}")).json() == listed
            assert (await web.get("/v1/models/someone/else")).status_code == 404

    asyncio.run(run())


@pytest.mark.parametrize(
    "body", ['{"\\ud800": 1, "input": "Yes."}', '{"input": "\\ud800"}', '{"input": "Yes.", "x": ' + "[" * 100_000]
)
def test_a_body_that_is_no_text_or_too_deep_is_refused(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> Any:
        async with stub_server(tmp_path, monkeypatch) as (_, web):
            return await web.post(SPEECH, content=body, headers={"content-type": "application/json"})

    answer = asyncio.run(run())
    assert answer.status_code == 400 and answer.json()["error"]["message"]
