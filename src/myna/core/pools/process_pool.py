"""Pool of processes of this machine. Processes that die are replaced, and what they held is done again."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

from myna.core.errors import DataError

MAX_ATTEMPTS = 3
"""Of an item whose process died each time."""
W = TypeVar("W")
T = TypeVar("T")
R = TypeVar("R")

_worker: Any = None
"""Of this process, where it is one of a pool."""


class ProcessPool(Generic[W]):
    """Maps functions over processes; one worker works in this process."""

    uses_gpus = False

    def __init__(self, make_worker: Callable[[], W], workers: int) -> None:
        self._make_worker, self._workers = make_worker, workers
        self._local: W | None = None
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> ProcessPool[W]:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is None:
            return
        if not any(error):
            # All is done. A process that dies now may hold the lock that others need to be told so: they would wait
            # for ever, and with them `shutdown`.
            for process in list(self._pool._processes.values()):
                process.kill()
        self._pool.shutdown(cancel_futures=True)

    def call_each(self, function: Callable[[W], R]) -> list[R]:
        """Of one worker: processes of one machine are alike."""
        [(_, result)] = self.map(_ignoring_item, [function])
        return [result]

    def map(
        self, function: Callable[[W, T], R], items: Iterable[T], *, describe: Callable[[T], str] = str
    ) -> Iterator[tuple[T, R]]:
        if self._workers == 1:
            self._local = self._local or self._make_worker()
            for item in items:
                yield item, function(self._local, item)
            return
        waiting = list(reversed(list(items)))
        attempts = {id(item): 0 for item in waiting}
        running: dict[Future[R], T] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self._workers:
                    try:
                        future = self._open_pool().submit(_call, function, waiting[-1])
                    except BrokenProcessPool:  # a process died that held nothing; what others held is lost, too
                        if running:
                            break
                        self._pool = None
                        continue
                    running[future] = waiting.pop()
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                died = [future for future in done if isinstance(future.exception(), BrokenProcessPool)]
                for future in done.difference(died):
                    yield running.pop(future), future.result()
                if died:
                    self._pool = None  # all that ran in it are lost, and are done again
                    for item in running.values():
                        attempts[id(item)] += 1
                        if attempts[id(item)] >= MAX_ATTEMPTS:
                            work = f"{function.__name__} {describe(item)}"
                            raise DataError(
                                f"the process that was to {work} died {MAX_ATTEMPTS} times",
                                hint="it may have run out of memory: try --workers 1; what is done stays done",
                            )
                    waiting += running.values()
                    running.clear()
        finally:
            for future in running:
                future.cancel()

    def _open_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._workers, multiprocessing.get_context("spawn"), _start_worker, (self._make_worker,)
            )
        return self._pool


def _ignoring_item(worker: W, function: Callable[[W], R]) -> R:
    return function(worker)


def _start_worker(make_worker: Callable[[], Any]) -> None:
    global _worker
    end_with_parent()
    _worker = make_worker()


def end_with_parent() -> None:
    """End this process when its parent ends: one that is killed cannot end its processes, which would wait for work for
    ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_for_end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()


def _call(function: Callable[[Any, T], R], item: T) -> R:
    return function(_worker, item)
