"""Pools of workers: a function mapped over items, by processes of this machine or by actors of a Ray cluster.

A worker commits its results itself, under a temporary name that is then renamed. So a call may be repeated after a
process or a node was lost, and items are paths and small records rather than samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

W = TypeVar("W")
T = TypeVar("T")
R = TypeVar("R")


class Pool(Protocol[W]):
    """Workers that are made once each, when they are first needed. A context manager, which ends them."""

    def __enter__(self) -> Pool[W]: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    @property
    def uses_gpus(self) -> bool:
        """Whether each worker has a GPU to itself."""

    def map(
        self, function: Callable[[W, T], R], items: Iterable[T], *, describe: Callable[[T], str] = str
    ) -> Iterator[tuple[T, R]]:
        """Each item with what `function(worker, item)` returns, as it is done. What a worker raises is raised here."""

    def call_each(self, function: Callable[[W], R]) -> list[R]:
        """What `function(worker)` returns, of a worker on each machine at least."""


def open_pool(make_worker: Callable[[], W], workers: int | None, ray: str | None, device: str = "cpu") -> Pool[W]:
    """`workers` processes here, or at most so many actors of the Ray cluster at the address `ray`.

    `make_worker` must be picklable. With a `device` of `cuda`, or `auto` where the cluster has GPUs, each actor has a
    GPU.
    """
    if ray is not None:
        from myna.core.pools.ray_pool import RayPool

        return RayPool(make_worker, ray, workers, device)
    from myna.core.pools.process_pool import ProcessPool

    return ProcessPool(make_worker, workers or 1)


def absolute_folder(source: str) -> str:
    """A folder under its absolute path, for workers that have another working directory; any other name as it is."""
    return str(Path(source).absolute()) if Path(source).is_dir() else source
