"""Pool of actors on a Ray cluster, and calls on each of its nodes.

Actors restart on other nodes by themselves, and the call they were in is made again; nothing is committed by Ray.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from myna.core.errors import ConfigError, DataError, MynaError
from myna.core.ray_cluster import connect_cluster

RETRY_FOREVER = -1
"""Restarts of an actor, and repeats of its call. A call to an actor that waits for a place uses up any other number."""
MAX_STARTS = 5
"""Of a call that never ends: one that a node was lost with is begun again, one that ends its process is given up."""
WAIT_SECONDS = 5.0
"""Between looks at the nodes of the cluster."""
NODE_SECONDS = 300.0
"""For a node to answer: the first call starts a process there and imports torch, which may lie on a slow disk."""
W = TypeVar("W")
T = TypeVar("T")
R = TypeVar("R")


class _Actor:
    """A worker in a process of the cluster."""

    def __init__(self, make_worker: Callable[[], Any]) -> None:
        self._worker = make_worker()

    def call(self, function: Callable[..., Any], *item: Any) -> Any:
        return function(self._worker, *item)

    def call_counted(self, starts: Any, work: str, function: Callable[..., Any], item: Any) -> Any:
        import ray

        if ray.get(starts.add.remote(work)) > MAX_STARTS:
            raise DataError(
                f"the process that was to {work} died {MAX_STARTS} times",
                hint="it may have run out of memory: try fewer with --workers; what is done stays done",
            )
        return self.call(function, item)


class _Starts:
    """How often each call was begun, in a process of its own, which none of them can end."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, work: str) -> int:
        self._counts[work] += 1
        return self._counts[work]


class RayPool(Generic[W]):
    """Maps functions over the CPUs, or GPUs, of a cluster; also over those of nodes that join later."""

    def __init__(self, make_worker: Callable[[], W], address: str, workers: int | None, device: str) -> None:
        self._make_worker, self._address, self._workers = make_worker, address, workers
        self._ray = ray = connect_cluster(address)
        has_gpus = ray.cluster_resources().get("GPU", 0) >= 1
        self.uses_gpus = device.startswith("cuda") or (device == "auto" and has_gpus)
        self._actor_class = ray.remote(
            num_cpus=1, num_gpus=int(self.uses_gpus), max_restarts=RETRY_FOREVER, max_task_retries=RETRY_FOREVER
        )(_Actor)
        self._actors: list[Any] = []
        if not self._places():
            raise ConfigError(
                f"the Ray cluster has no {'GPU' if self.uses_gpus else 'CPU'}",
                hint="add nodes to it: ray start --address=HEAD:6379",
            )

    def __enter__(self) -> RayPool[W]:
        self._start_actors()
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []

    def call_each(self, function: Callable[[W], R]) -> list[R]:
        calls = [actor.call.remote(function) for actor in self._actors]
        return [self._result(call, function.__name__) for call in calls]

    def map(
        self, function: Callable[[W, T], R], items: Iterable[T], *, describe: Callable[[T], str] = str
    ) -> Iterator[tuple[T, R]]:
        waiting, idle = list(reversed(list(items))), list(self._actors)
        running: dict[Any, tuple[Any, T, str]] = {}
        starts = self._ray.remote(num_cpus=0, max_restarts=RETRY_FOREVER, max_task_retries=RETRY_FOREVER)(_Starts)
        counter = starts.remote()
        while waiting or running:
            if waiting:
                idle += self._start_actors()
            while waiting and idle:
                actor, item = idle.pop(), waiting.pop()
                work = f"{function.__name__} {describe(item)}"
                running[actor.call_counted.remote(counter, work, function, item)] = actor, item, work
            # An actor whose node was lost needs a place to be restarted in: that of one with nothing left to do.
            while idle and len(self._actors) > self._places():
                self._actors.remove(actor := idle.pop())
                self._ray.kill(actor)
            done, _ = self._ray.wait(list(running), num_returns=1, timeout=WAIT_SECONDS)
            for call in done:
                actor, item, work = running.pop(call)
                yield item, self._result(call, work)
                idle.append(actor)

    def _places(self) -> int:
        """Actors that there is room for now."""
        resources = self._ray.cluster_resources()
        return int(min(resources.get(kind, 0) for kind in (("CPU", "GPU") if self.uses_gpus else ("CPU",))))

    def _start_actors(self) -> list[Any]:
        """An actor for each place that has none, up to the number that was asked for."""
        places = self._places()
        missing = min(self._workers or places, places) - len(self._actors)
        started = [self._actor_class.remote(self._make_worker) for _ in range(missing)]
        self._actors += started
        return started

    def _result(self, call: Any, work: str) -> Any:
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, MynaError) else error from None
        except self._ray.exceptions.RayActorError as error:
            raise ConfigError(
                f"no worker of the cluster could {work}: {error}",
                hint=f"compare the nodes: myna doctor --ray {self._address}; if they are alike, it may have run out of "
                "memory: try fewer with --workers; what is done stays done",
            ) from error


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of a cluster."""

    id: str
    name: str
    cpus: int
    gpus: int


def cluster_nodes(address: str) -> list[Node]:
    """Nodes that can do work, by name."""
    nodes = []
    for node in connect_cluster(address).nodes():
        resources = node["Resources"]
        if node["Alive"] and resources.get("CPU", 0):
            name = f"{node['NodeManagerHostname']} {node['NodeID'][:6]}"  # there may be two on one machine
            nodes.append(Node(node["NodeID"], name, int(resources["CPU"]), int(resources.get("GPU", 0))))
    return sorted(nodes, key=lambda node: node.name)


def call_on_nodes(address: str, nodes: Iterable[Node], function: Callable[..., R], *arguments: Any) -> list[R | str]:
    """What the function returns on each node, all at the same time, or why it did not."""
    ray = connect_cluster(address)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    calls = [
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(*arguments)
        for node in nodes
    ]
    ray.wait(calls, num_returns=len(calls), timeout=NODE_SECONDS)
    answers: list[R | str] = []
    for call in calls:
        try:
            answers.append(ray.get(call, timeout=0))
        except ray.exceptions.GetTimeoutError:
            answers.append(f"no answer within {NODE_SECONDS:g} s")
        except ray.exceptions.RayError as error:
            answers.append(str(error).strip().splitlines()[-1])
    return answers
