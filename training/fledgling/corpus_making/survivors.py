"""Work in many processes, any of which may die: a library that crashes takes its process along, not the corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

from myna.errors import DataError

TRIES = 5
"""Deaths of processes after which it is the work and not bad luck."""
A = TypeVar("A")
B = TypeVar("B")


def done_by_survivors(work: Callable[[A], B], items: Sequence[A], jobs: int) -> Iterator[B]:
    """Results as they come. What was not done when a process died is done again by new ones, so `work` must stand
    being cut short and begun again."""
    left = list(enumerate(items))
    for attempt in range(1, TRIES + 1):
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
            print(f"a process died; {len(left)} parts are begun again, attempt {attempt} of {TRIES}", flush=True)
    raise DataError(
        f"processes died {TRIES} times, with {len(left)} parts left to do", hint="run the same command with --jobs 1"
    )
