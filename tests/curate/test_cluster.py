"""A Ray cluster of two nodes gives the bytes of one process, even if a node is lost."""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from myna.curate.curation import run_curation
from tests.curate.scripted import Truth, contents, scripted_models, settings, write_recording
from tests.ray_nodes import Nodes, ray_nodes

pytestmark = [pytest.mark.extras, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Truth]:
    folder = tmp_path_factory.mktemp("raw")
    truth = {folder / f"{n}.flac": write_recording(folder / f"{n}.flac", 10, seed=n, first=10 * n) for n in range(3)}
    return folder, truth


@pytest.fixture(scope="module")
def expected(source: tuple[Path, Truth], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "out"
    run_curation([source[0]], out, settings(out), workers=1, open_models=scripted_models(source[1]))
    return contents(out)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with ray_nodes(2) as made:
        yield made


def test_two_nodes_give_the_bytes_of_one_process(
    cluster: Nodes, source: tuple[Path, Truth], expected: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run_curation([source[0]], out, settings(out), ray=cluster.address, open_models=scripted_models(source[1]))
    assert contents(out) == expected


def _curate(source: Path, out: Path, truth: Truth, address: str) -> None:
    run_curation([source], out, settings(out), ray=address, open_models=scripted_models(truth))


def test_a_killed_driver_goes_on_where_it_was(
    cluster: Nodes, source: tuple[Path, Truth], expected: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = (source[0], out, source[1], cluster.address)
    for done in (1, 2):
        process = multiprocessing.get_context("spawn").Process(target=_curate, args=arguments)
        process.start()
        while process.is_alive() and len(list(out.glob("parts/*.parquet"))) < done:
            time.sleep(0.01)
        time.sleep(random.random() / 10)
        process.kill()
        process.join()
    assert list(out.glob("parts/*.parquet"))
    _curate(*arguments)
    assert contents(out) == expected


def test_a_lost_node_costs_nothing(
    cluster: Nodes, source: tuple[Path, Truth], expected: dict[str, bytes], tmp_path: Path
) -> None:
    """The lost actor is restarted on the other node, in the place of an idle one."""
    out = tmp_path / "out"
    lost = threading.Event()

    def lose_a_node() -> None:
        while not list(out.glob("parts/*.parquet")):
            time.sleep(0.01)
        time.sleep(random.random() / 10)
        cluster.kill()
        lost.set()

    threading.Thread(target=lose_a_node, daemon=True).start()
    run_curation([source[0]], out, settings(out), ray=cluster.address, open_models=scripted_models(source[1]))
    assert lost.wait(10)
    assert contents(out) == expected
