"""What the replicas of an application share: their adapters, and the figures of all of them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

REPORT_SECONDS = 1.0
"""Between two reports of a replica, where nothing changes."""
LOST_SECONDS = 10.0
"""Without a report, after which a replica is no longer waited for."""
CHANGE_SECONDS = 120.0
"""That all replicas have to load an adapter."""


@dataclass(frozen=True)
class AdapterVersion:
    """The adapters of all replicas, and how often they have changed."""

    number: int
    sources: Mapping[str, str]


@dataclass(frozen=True)
class ReplicaReport:
    """What a replica tells about itself."""

    id: str
    adapters: AdapterVersion
    """The last that it has applied."""
    failures: Mapping[str, str]
    """Adapters of that version that it could not load, and why."""
    metrics: bytes


class ReplicaRegistry:
    """Actor that knows the adapters of all replicas and their last figures."""

    def __init__(self, adapters: Mapping[str, str]) -> None:
        self._adapters = AdapterVersion(0, dict(adapters))
        self._reports: dict[str, tuple[float, ReplicaReport]] = {}
        self._changed = asyncio.Condition()

    async def report(self, report: ReplicaReport) -> AdapterVersion:
        """Take a replica's report, and answer with the adapters that it should have: at once if it has others."""
        if report.adapters.number > self._adapters.number:  # this actor was started anew
            self._adapters = report.adapters
        self._reports[report.id] = time.monotonic(), report
        async with self._changed:
            self._changed.notify_all()
            if report.adapters.number == self._adapters.number:
                with suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_SECONDS):
                        await self._changed.wait_for(lambda: self._is_new(report))
        return self._adapters

    def _is_new(self, report: ReplicaReport) -> bool:
        return self._adapters.number != report.adapters.number

    async def change_adapter(self, name: str, source: str | None) -> str:
        """Add an adapter to all replicas, or remove it from them where there is no source. The answer is why one of
        them could not load it, in which case none keeps it; otherwise it is empty."""
        deadline = time.monotonic() + CHANGE_SECONDS
        await self._wait_for(lambda: bool(self._live()), deadline)  # which also tells a new registry what there is
        if source is not None and name in self._adapters.sources:
            return f"there is a model named {name} already"
        number = self._apply(name, source)
        is_done = await self._wait_for(lambda: all(one.adapters.number >= number for one in self._live()), deadline)
        if source is None:
            return ""
        problems = [one.failures[name] for one in self._live() if name in one.failures]
        if not is_done:
            problems.append(f"a replica has not loaded it within {CHANGE_SECONDS:g} s")
        if problems:
            self._apply(name, None)
            await self._notify()
        return problems[0] if problems else ""

    def _apply(self, name: str, source: str | None) -> int:
        sources = {one: folder for one, folder in self._adapters.sources.items() if one != name}
        if source is not None:
            sources[name] = source
        self._adapters = AdapterVersion(self._adapters.number + 1, sources)
        return self._adapters.number

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for(self, is_met: Callable[[], bool], deadline: float) -> bool:
        """Wait for reports; replicas that are lost in the meantime are no longer waited for."""
        while not is_met():
            await self._notify()
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    def _live(self) -> list[ReplicaReport]:
        now = time.monotonic()
        self._reports = {id: one for id, one in self._reports.items() if now - one[0] < LOST_SECONDS}
        return [report for _, report in self._reports.values()]

    async def metrics(self) -> dict[str, bytes]:
        return {report.id: report.metrics for report in self._live()}


def merge_metrics(texts: Mapping[str, bytes]) -> bytes:
    """Figures of several servers in one text, each sample with the `server` that it is of."""
    families: dict[str, list[str]] = {}
    for server, text in sorted(texts.items()):
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
            samples = families.setdefault(family, [])
            if not line.startswith("#"):
                name, brace, rest = re.split(r"(\W)", line, maxsplit=1)
                line = f'{name}{{server="{server}"{"," if brace == "{" else "} "}{rest}'
            if line not in samples:
                samples.append(line)
    return "".join(f"{line}\n" for samples in families.values() for line in samples).encode()
