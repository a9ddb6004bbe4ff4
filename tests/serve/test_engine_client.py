"""More adapters than an engine holds: loaded on request, in the place of the least recently used."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from myna.models import open_family, save_tiny_model
from myna.serve.engine_client import AdapterCatalog, EngineClient, EngineJob
from myna.serve.messages import EngineSettings, SpeakMessage
from myna.serve.schemas import ApiError
from myna.speak.request import SpeechRequest
from tests.models.helpers import random_adapter

pytestmark = pytest.mark.slow


def test_the_least_recently_used_adapter_makes_room(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    adapter = str(random_adapter(open_family(str(model)), tmp_path / "adapter"))
    named = dict.fromkeys(("one", "two", "three"), adapter)
    settings = EngineSettings(
        str(model), device="cpu", adapters=named, adapter_rank=8, rows=2, max_adapters=2, watermark=False
    )

    async def run() -> None:
        client = EngineClient(settings)
        catalog = AdapterCatalog(client)

        def speak(name: str) -> EngineJob:
            request = SpeechRequest("two words " * 30, adapter=name, max_seconds=20.0)
            return client.submit(SpeakMessage(request))

        client.start()
        try:
            await client.wait_until_loaded()
            assert set(client.load.adapters) == {"one", "two"} and list(catalog.sources) == ["one", "two", "three"]
            await catalog.load("one")
            await catalog.load("three")
            assert set(client.load.adapters) == {"one", "three"}
            jobs = [speak("one"), speak("three")]
            with pytest.raises(ApiError) as full:
                await catalog.load("two")
            assert full.value.status == 429 and full.value.headers["retry-after"]
            jobs.pop().cancel()
            await catalog.load("two")
            assert set(client.load.adapters) == {"one", "two"}, "what is spoken with is kept"
            with pytest.raises(ApiError):
                await catalog.add("broken", str(tmp_path / "nowhere"))
            assert "broken" not in catalog.sources
            await catalog.remove("two")
            with pytest.raises(ApiError, match="unloaded"):
                await catalog.load("two")
            assert set(client.settings.adapters) == {"one"}, "what an engine that is started again would load"
        finally:
            await client.close()

    asyncio.run(run())
