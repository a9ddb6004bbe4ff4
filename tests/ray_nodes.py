"""Ray clusters of several nodes on this machine, for tests; skipped without Ray, unless extras are required."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

if os.environ.get("MYNA_EXTRAS") == "required":
    import ray
else:
    ray = pytest.importorskip("ray")

__all__ = ["Nodes", "ray", "ray_nodes"]


AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
"""Ports of a node's helper processes. A node waits for ports that they choose, on a busy machine not long enough."""


class Nodes:
    """A cluster whose head has no CPUs, and nodes with one each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        self.cluster.add_node(num_cpus=0, include_dashboard=False, **_free_ports())
        self.nodes: list[Any] = []

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> None:
        """Add a node; Ray wants this on the main thread."""
        self.nodes.append(self.cluster.add_node(num_cpus=1, **_free_ports()))

    def kill(self) -> None:
        """End the oldest node at once, with all of its processes."""
        self.cluster.remove_node(self.nodes.pop(0), allow_graceful=False)


@contextmanager
def ray_nodes(count: int) -> Iterator[Nodes]:
    nodes = Nodes()
    try:
        for _ in range(count):
            nodes.add()
        yield nodes
    finally:
        ray.shutdown()
        nodes.cluster.shutdown()


def _free_ports() -> dict[str, int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in AGENT_PORTS]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return dict(zip(AGENT_PORTS, (one.getsockname()[1] for one in sockets), strict=True))
