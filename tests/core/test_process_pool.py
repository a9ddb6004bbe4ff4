"""The pool of processes: a process that is killed costs nothing, whatever it was at."""

from __future__ import annotations

import multiprocessing
import os
import random
import time

from myna.core.pools import ProcessPool


def _square(_worker: str, number: int) -> tuple[int, int]:
    time.sleep(0.02)
    return os.getpid(), number**2


def _make_worker() -> str:
    return "worker"


def test_a_process_that_dies_with_nothing_to_do_is_replaced() -> None:
    with ProcessPool(_make_worker, 2) as pool:
        first = dict(pool.map(_square, range(8)))
        for process in multiprocessing.active_children():
            process.kill()
            process.join()
        time.sleep(0.5)  # until the pool has noticed
        second = dict(pool.map(_square, range(8)))
    assert [result[1] for _, result in sorted(second.items())] == [number**2 for number in range(8)]
    assert not {result[0] for result in first.values()} & {result[0] for result in second.values()}


def test_processes_that_are_killed_at_random_moments_cost_nothing() -> None:
    moments = {random.randrange(60), 59}
    results: dict[int, int] = {}
    with ProcessPool(_make_worker, 2) as pool:
        for number, result in pool.map(_square, range(60)):
            if len(results) in moments and (processes := multiprocessing.active_children()):
                random.choice(processes).kill()
            results[number] = result[1]
    assert results == {number: number**2 for number in range(60)}
