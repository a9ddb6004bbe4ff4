"""Worker processes that build batches: values arrive unchanged, and no process outlives its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from myna.core.errors import DataError
from myna.data.workers import WorkerPool
from tests.data.workers_helper import UnloadableBuilder, arrays, fail, turned, who

ARRAYS, TURNED, FAIL, WHO = range(4)


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    with closing(WorkerPool(1, [arrays, turned, fail, who])) as workers:
        yield workers


def is_there(pid: int) -> bool:
    """Whether the process runs; a zombie does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + 60
    while any(map(is_there, pids)):
        assert time.monotonic() < deadline, "somebody is left"
        time.sleep(0.01)


def test_arrays_arrive_as_they_were_and_are_ours_to_change(workers: WorkerPool) -> None:
    sizes = [0, 1, 700_000, 0, 3]
    for _ in range(2):
        for size, array in zip(sizes, workers.build(ARRAYS, sizes), strict=True):
            assert array.dtype == np.int64 and np.array_equal(array, np.arange(size))
            array += 1
    made, expected = workers.build(TURNED, 5), turned(5)
    assert np.array_equal(made["turned"], expected["turned"]) and made["turned"].dtype == np.uint16
    assert (float(made["number"]), made["word"]) == (3.0, "x")


def test_a_worker_is_another_process_and_sees_no_card(workers: WorkerPool) -> None:
    pid, cards = workers.build(WHO, None)
    assert pid != os.getpid() and cards == ""


def test_errors_arrive_and_the_worker_goes_on(workers: WorkerPool) -> None:
    with pytest.raises(DataError, match=r"^marta_0412 is bad") as caught:
        workers.build(FAIL, "ours")
    assert caught.value.hint == "remove it"
    with pytest.raises(KeyError, match="marta_0412") as bug:
        workers.build(FAIL, "bug")
    assert 'raise KeyError("marta_0412")' in bug.value.__notes__[0], "with the place where it happened"
    with pytest.raises(RuntimeError, match=r"UnpicklableError: marta_0412"):
        workers.build(FAIL, "untold")
    with pytest.raises((AttributeError, RuntimeError), match="pickle"):
        workers.build(FAIL, "an answer that cannot be sent")
    assert workers.build(WHO, None)


@pytest.mark.parametrize(("how", "told"), [("killed", "was ended by SIGKILL"), ("gone", "ended with code 3")])
def test_one_that_dies_is_told_of(how: str, told: str) -> None:
    with closing(WorkerPool(1, [fail])) as workers:
        for _ in range(2):
            with pytest.raises(DataError, match=told) as caught:
                workers.build(0, how)
    assert "data.workers=0" in caught.value.hint


def test_what_cannot_be_opened_there_is_told_when_it_is_asked_for() -> None:
    with closing(WorkerPool(1, [UnloadableBuilder()])) as workers, pytest.raises(DataError, match="marta_0412 is bad"):
        workers.build(0, None)


def test_all_are_kept_busy_and_closing_ends_them() -> None:
    together = 3
    workers, begun = WorkerPool(together, [who]), threading.Barrier(together)

    def ask(_: int) -> Any:
        begun.wait()
        return workers.build(0, None)[0]

    with closing(workers), ThreadPoolExecutor(together) as threads:
        pids = set(threads.map(ask, range(together)))
        assert pids == {worker._process.pid for worker in workers._workers}, "each of them was asked once"
    assert not any(map(is_there, pids))
    workers.close()  # twice is no mistake


def helper() -> tuple[subprocess.Popen[str], list[int]]:
    command = [sys.executable, "-c", "from tests.data.workers_helper import main; main()"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def test_nobody_outlives_a_process_that_was_killed() -> None:
    process, pids = helper()
    with process:
        assert len(pids) == 2 and all(map(is_there, pids))
        process.kill()
        wait_until_gone(*pids)


def test_an_interrupt_is_for_whoever_trains() -> None:
    process, pids = helper()
    with process:
        assert process.stdin is not None and process.stdout is not None
        for _ in range(2):  # while they import, and when they are ready
            os.killpg(process.pid, signal.SIGINT)
            process.stdin.write("\n")
            process.stdin.flush()
            assert int(process.stdout.readline()) in pids
        process.stdin.close()
        wait_until_gone(*pids)
