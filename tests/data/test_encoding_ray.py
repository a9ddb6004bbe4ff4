"""Encoding on a Ray cluster of two nodes gives the bytes of one process, also after nodes and drivers were killed."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.data.pooled import SHARDS, DeadlyCodec, encode_pooled, files, write_source
from tests.ray_nodes import Nodes, ray_nodes

pytestmark = [pytest.mark.extras, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("pooled") / "source")


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    encode_pooled(source, out, None)
    assert len(files(out)) >= SHARDS
    return files(out)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with ray_nodes(2) as made:
        yield made


def test_two_nodes_give_the_bytes_of_one_process(
    cluster: Nodes, source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    encode_pooled(source, tmp_path, None, cluster.address)
    assert files(tmp_path) == expected


def test_killed_workers_cost_nothing(cluster: Nodes, source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "deaths").mkdir()
    open_codec = partial(DeadlyCodec, tmp_path / "deaths", 3)
    encode_pooled(source, tmp_path / "out", None, cluster.address, open_codec=open_codec)
    assert list((tmp_path / "deaths").iterdir()), "none was killed"
    assert files(tmp_path / "out") == expected


def test_a_killed_driver_can_go_on(cluster: Nodes, source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    context = multiprocessing.get_context("spawn")
    for _ in range(2):
        process = context.Process(target=encode_pooled, args=(source, out, None, cluster.address))
        process.start()
        before = len(list(out.glob("codes/*/0*.arrow")))
        while process.is_alive() and len(list(out.glob("codes/*/0*.arrow"))) <= before:
            time.sleep(0.01)
        time.sleep(random.random() / 10)
        process.kill()
        process.join()
        assert files(out).items() <= expected.items()
    encode_pooled(source, out, None, cluster.address)
    assert files(out) == expected


def test_a_lost_node_costs_nothing(cluster: Nodes, source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    """The lost actor is not replaced by a new one: it is restarted on the other node."""
    moment = random.randint(1, 20)

    def lose_a_node(_stage: str, done: int, _total: int | None) -> None:
        if done >= moment and len(cluster.nodes) == 2:
            cluster.kill()

    encode_pooled(source, tmp_path, None, cluster.address, progress=lose_a_node)
    assert len(cluster.nodes) == 1
    assert files(tmp_path) == expected
