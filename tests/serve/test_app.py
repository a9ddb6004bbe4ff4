"""The application of the HTTP process."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

from myna.serve.app import create_app
from myna.serve.context import ServerContext, ServerSettings
from myna.serve.messages import EngineSettings

MAX_OBJECTS = 2_000
"""That a full collection of a server without requests may visit: a millisecond."""


async def do_nothing() -> None: ...


def test_a_full_collection_visits_no_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops all streams: 50 ms for the imports of this process, and an underrun for whoever has just begun."""
    monkeypatch.setenv("MYNA_HOME", str(tmp_path))
    context = ServerContext.create(ServerSettings(EngineSettings("fledgling")))
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
