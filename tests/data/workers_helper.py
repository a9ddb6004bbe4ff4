"""Functions that workers run in tests, and a process with workers that can be killed."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np

from myna.core.errors import DataError
from myna.data.workers import WorkerPool


class UnpicklableError(Exception):
    """Error that cannot be pickled: its constructor wants two arguments and keeps one."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


def arrays(sizes: list[int]) -> list[Any]:
    return [np.arange(size, dtype=np.int64) for size in sizes]


def turned(size: int) -> Any:
    return {"turned": np.arange(size * 2, dtype=np.uint16).reshape(size, 2).T, "number": np.array(3.0), "word": "x"}


def fail(how: str) -> Any:
    if how == "ours":
        raise DataError("marta_0412 is bad", hint="remove it")
    if how == "bug":
        raise KeyError("marta_0412")
    if how == "untold":
        raise UnpicklableError("marta", "_0412")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "gone":
        os._exit(3)
    return lambda: how  # which cannot be sent


def who(_: Any) -> tuple[int, str]:
    return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"]


class UnloadableBuilder:
    """Builder that cannot be unpickled in the worker."""

    def __reduce__(self) -> tuple[Any, ...]:
        return fail, ("ours",)

    def __call__(self, order: Any) -> Any:
        raise AssertionError(order)


def main() -> None:
    """Start two workers, print their process ids, and build something for every line of standard input."""
    signal.signal(signal.SIGINT, lambda *_: None)  # which, unlike ignoring it, workers would not inherit
    workers = WorkerPool(2, [who])
    print(*(worker._process.pid for worker in workers._workers), flush=True)
    for _ in sys.stdin:
        print(workers.build(0, None)[0], flush=True)
