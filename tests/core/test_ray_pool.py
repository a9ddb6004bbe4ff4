"""The Ray pool: errors of workers, nodes that are lost and nodes that join."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial

import pytest

from myna.core.errors import ConfigError, DataError
from myna.core.pools import open_pool
from tests.ray_nodes import Nodes, ray, ray_nodes

DEADLY = 1300
pytestmark = [pytest.mark.extras, pytest.mark.timeout(900)]


class Echo:
    """Worker that says on which node it is."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def answer(self, item: int) -> str:
        time.sleep(self._seconds)
        if item == DEADLY:
            os._exit(1)
        if item < 0:
            raise DataError(f"{item} is below zero", hint="give another")
        return self.node()


def refuse() -> Echo:
    raise ModuleNotFoundError("No module named 'nonesuch'")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with ray_nodes(2) as made:
        yield made


def test_every_node_works_and_errors_come_back(cluster: Nodes) -> None:
    with open_pool(Echo, None, cluster.address, "auto") as pool:
        assert not pool.uses_gpus
        assert len(set(pool.call_each(Echo.node))) == 2
        assert sorted(item for item, _ in pool.map(Echo.answer, range(9))) == list(range(9))
        with pytest.raises(DataError, match="-1 is below zero"):
            list(pool.map(Echo.answer, [1, -1]))
    with open_pool(Echo, 1, cluster.address) as pool:
        assert len(pool.call_each(Echo.node)) == 1


def test_a_worker_that_cannot_be_made_is_an_error(cluster: Nodes) -> None:
    with (
        open_pool(refuse, None, cluster.address) as pool,
        pytest.raises(ConfigError, match="nonesuch") as caught,
    ):
        list(pool.map(Echo.answer, [1]))
    assert "myna doctor --ray" in caught.value.hint


def test_an_item_that_ends_its_process_each_time_is_given_up(cluster: Nodes) -> None:
    done = []
    with (
        open_pool(Echo, None, cluster.address) as pool,
        pytest.raises(DataError, match="to answer item 1300 died 5 times"),
    ):
        done += [item for item, _ in pool.map(Echo.answer, [1, 2, DEADLY], describe="item {}".format)]
    assert DEADLY not in done


def test_a_cluster_without_gpus_is_refused(cluster: Nodes) -> None:
    with pytest.raises(ConfigError, match="the Ray cluster has no GPU"):
        open_pool(Echo, None, cluster.address, "cuda")


def test_lost_nodes_are_done_without_and_new_ones_used(cluster: Nodes) -> None:
    done: dict[int, str] = {}
    with open_pool(partial(Echo, 1.0), None, cluster.address) as pool:
        first = set(pool.call_each(Echo.node))
        for item, node in pool.map(Echo.answer, range(40)):
            if not done:
                cluster.kill()
                cluster.add()
                cluster.add()
            done[item] = node
    assert sorted(done) == list(range(40))
    assert len(set(done.values()) - first) == 2, "both new nodes have worked"
