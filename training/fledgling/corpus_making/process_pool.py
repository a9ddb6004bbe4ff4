"""Process pool that restarts after a crash of a worker, as native libraries cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

from myna.core.errors import DataError

MAX_ATTEMPTS = 5
"""Crashes after which the work itself is taken to be the cause."""
A = TypeVar("A")
B = TypeVar("B")


def map_with_restarts(work: Callable[[A], B], items: Sequence[A], jobs: int) -> Iterator[B]:
    """Results as they are completed. Items that were not done when a process died are given to a new pool, so `work`
    must be repeatable."""
    left = list(enumerate(items))
    for attempt in range(1, MAX_ATTEMPTS + 1):
        finished = set[int]()
        try:
            with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
                numbers = {pool.submit(work, item): number for number, item in left}
                for done in as_completed(numbers):
                    result = done.result()
                    finished.add(numbers[done])
                    yield result
            return
        except BrokenProcessPool:
            left = [(number, item) for number, item in left if number not in finished]
            print(f"a process died; {len(left)} parts are begun again, attempt {attempt} of {MAX_ATTEMPTS}", flush=True)
    raise DataError(
        f"processes died {MAX_ATTEMPTS} times, with {len(left)} parts left to do",
        hint="run the same command with --jobs 1",
    )
