"""Adapters that requests may name, of which the engine holds the most recently used."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from myna.serve.api_errors import ApiError
from myna.serve.engine_client import EngineClient
from myna.serve.messages import AdapterMessage


class AdapterCatalog:
    """Names and folders of adapters. What is not in the engine is loaded when it is asked for, and the one whose last
    request is the longest ago makes room for it."""

    def __init__(self, client: EngineClient) -> None:
        self._client, self._capacity = client, client.settings.max_adapters
        self.sources: dict[str, str] = dict(client.settings.adapters)
        self._last_use: dict[str, float] = {}
        self._lock = asyncio.Lock()
        first = dict(list(self.sources.items())[: self._capacity])
        client.settings = replace(client.settings, adapters=first)

    async def add(self, name: str, source: str) -> None:
        """Load an adapter; one that cannot be loaded stays unknown."""
        self.sources[name] = source
        try:
            await self.load(name)
        except ApiError:
            del self.sources[name]
            raise

    async def remove(self, name: str) -> None:
        """Forget an adapter. Requests that speak with it go on."""
        async with self._lock:
            del self.sources[name]
            if name in self._client.adapters:
                await self._change(name, None)

    async def load(self, name: str) -> None:
        """Have an adapter in the engine."""
        self._last_use[name] = time.monotonic()
        async with self._lock:
            loaded = self._client.adapters
            if name in loaded:
                return
            if len(loaded) >= self._capacity:
                idle = set(loaded) - self._client.adapters_in_use
                if not idle:
                    message = f"requests speak with {len(loaded)} other adapters, and no more are loaded at a time"
                    raise ApiError(429, message, code="adapters_full", headers={"retry-after": "1"})
                await self._change(min(idle, key=lambda one: self._last_use.get(one, 0.0)), None)
            if (source := self.sources.get(name)) is None:
                raise ApiError(404, f"the adapter {name} has just been unloaded", code="model_not_found")
            await self._change(name, source)

    async def _change(self, name: str, source: str | None) -> None:
        client = self._client
        await client.submit(lambda id: AdapterMessage(id, name, source), counts=False).result()
        # An engine process that is started again loads them again.
        loaded = {one: self.sources[one] for one in client.adapters if one in self.sources}
        client.settings = replace(client.settings, adapters=loaded)
