"""The registry of replicas: all of them do what one is asked, and their figures are told apart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from myna.serve import ray_server
from myna.serve.ray_server import AdapterVersion, ReplicaRegistry, ReplicaReport, merge_metrics


class Replica:
    """Report as a replica does; it cannot load the adapters in `broken`."""

    def __init__(self, id: str, *broken: str) -> None:
        self.id, self.broken = id, broken
        self.adapters, self.failures = AdapterVersion(-1, {}), dict[str, str]()

    async def follow(self, registry: ReplicaRegistry) -> None:
        while True:
            report = ReplicaReport(self.id, self.adapters, self.failures, b"")
            self.adapters = await registry.report(report)
            self.failures = {name: f"{self.id} has no {name}" for name in self.adapters.sources if name in self.broken}


def run(replicas: list[Replica], scenario: Callable[[ReplicaRegistry], Awaitable[None]]) -> None:
    async def main() -> None:
        registry = ReplicaRegistry({"one": "/one"})
        tasks = [asyncio.create_task(replica.follow(registry)) for replica in replicas]
        await scenario(registry)
        for task in tasks:
            task.cancel()

    asyncio.run(main())


def test_all_replicas_load_and_unload() -> None:
    replicas = [Replica("a"), Replica("b")]

    async def scenario(registry: ReplicaRegistry) -> None:
        assert await registry.change_adapter("two", "/two") == ""
        assert [dict(one.adapters.sources) for one in replicas] == [{"one": "/one", "two": "/two"}] * 2
        assert "already" in await registry.change_adapter("two", "/other")
        assert await registry.change_adapter("one", None) == ""
        assert [dict(one.adapters.sources) for one in replicas] == [{"two": "/two"}] * 2

    run(replicas, scenario)


def test_an_adapter_that_one_replica_cannot_load_is_kept_by_none() -> None:
    replicas = [Replica("a"), Replica("b", "two")]

    async def scenario(registry: ReplicaRegistry) -> None:
        assert await registry.change_adapter("two", "/two") == "b has no two"
        while any(one.adapters.number < 2 for one in replicas):
            await asyncio.sleep(0.01)
        assert [dict(one.adapters.sources) for one in replicas] == [{"one": "/one"}] * 2

    run(replicas, scenario)


def test_a_registry_that_is_started_anew_learns_from_its_replicas() -> None:
    replica = Replica("a")
    replica.adapters = AdapterVersion(7, {"two": "/two"})

    async def scenario(registry: ReplicaRegistry) -> None:
        assert await registry.change_adapter("three", "/three") == ""
        assert replica.adapters == AdapterVersion(8, {"two": "/two", "three": "/three"})

    run([replica], scenario)


def test_a_lost_replica_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_server, "LOST_SECONDS", 0.2)
    monkeypatch.setattr(ray_server, "REPORT_SECONDS", 0.05)

    async def scenario(registry: ReplicaRegistry) -> None:
        await registry.report(ReplicaReport("lost", AdapterVersion(-1, {}), {}, b"x 1\n"))
        assert "lost" in await registry.metrics()
        assert await registry.change_adapter("two", "/two") == ""
        assert list(await registry.metrics()) == ["a"]

    run([Replica("a")], scenario)


def test_figures_of_several_servers_in_one_text() -> None:
    text = "# HELP rows Rows.\n# TYPE rows gauge\nrows 3.0\n# HELP ends_total Ends.\n# TYPE ends_total counter\n"
    text += 'ends_total{{a="{}"}} 2.0\n'
    merged = merge_metrics({"x": text.format("1,} ").encode(), "y": text.format("2").encode()}).decode()
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    assert merged.count("# TYPE") == 2
    assert [(one.labels["server"], one.value) for one in families["rows"].samples] == [("x", 3.0), ("y", 3.0)]
    assert [one.labels for one in families["ends"].samples] == [{"server": "x", "a": "1,} "}, {"server": "y", "a": "2"}]
