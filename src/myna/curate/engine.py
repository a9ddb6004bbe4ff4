"""Engine of the first pass: decodes recordings and refines parts in a process pool, and commits each result to a file.

A result is written under a temporary name, flushed and renamed: a process that is killed costs only what it held, and
work that is done twice gives the same bytes. Another engine (curate/cluster.py) maps the same two functions.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq

from myna.curate.models import CurationModels
from myna.curate.recordings import PARTS_FOLDER, SAMPLE_RATE, DecodedRecording, decode_recording
from myna.curate.refine import Part, refine
from myna.curate.settings import CurateSettings, ListenSettings
from myna.errors import DataError
from myna.io import atomic_write, fsync
from myna.system_memory import memory_limit

MAX_ATTEMPTS = 3
"""Of an item whose process died each time."""
WORKER_BYTES = 2 << 30
"""Memory that a worker needs, at most."""

OpenModels = Callable[[ListenSettings, int], CurationModels]
"""Opens the models in a worker, with so many threads each; must be picklable."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What every worker needs to know; sent to it once."""

    folder: Path
    settings: CurateSettings
    open_models: OpenModels = CurationModels.open
    threads: int = 1


def default_workers() -> int:
    """A process for every core, as far as the memory allows: one thread each wastes least."""
    return max(1, min(os.cpu_count() or 1, memory_limit() // WORKER_BYTES))


def findings_path(folder: Path, part: Part) -> Path:
    return folder / PARTS_FOLDER / f"{part.id}.parquet"


class Worker:
    """Decodes and refines with models that are opened once, when they are first needed."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._models: CurationModels | None = None

    @property
    def models(self) -> CurationModels:
        if self._models is None:
            import torch

            torch.set_num_threads(self._context.threads)
            self._models = self._context.open_models(self._context.settings.listen, self._context.threads)
        return self._models

    def model_names(self, _: None) -> list[str]:
        return self.models.names

    def decode(self, path: Path) -> DecodedRecording:
        listen = self._context.settings.listen
        find = self.models.find_speech
        return decode_recording(path, self._context.folder, listen, lambda samples: find(samples, SAMPLE_RATE))

    def refine(self, part: Part) -> str:
        """Refine and commit a part; returns its id."""
        folder = self._context.folder
        table = refine(part, part.read(folder), self.models, self._context.settings)
        path = findings_path(folder, part)
        with atomic_write(path) as temporary:
            pq.write_table(table, temporary, compression="zstd")
            fsync(temporary)
        fsync(path.parent)
        return part.id


_worker: Worker | None = None
"""Of this process, where it is one of a pool."""


def _start_worker(context: WorkerContext) -> None:
    global _worker
    _worker = Worker(context)


def _call(method: str, item: Any) -> Any:
    assert _worker is not None
    return getattr(_worker, method)(item)


class CurationEngine(Protocol):
    """Maps the work of a curation over workers."""

    def __enter__(self) -> CurationEngine: ...

    def __exit__(self, *error: object) -> None: ...

    def model_names(self) -> list[str]: ...

    def decode(self, paths: Iterable[Path]) -> Iterator[tuple[Path, DecodedRecording]]: ...

    def refine(self, parts: Iterable[Part]) -> Iterator[tuple[Part, str]]: ...


class ProcessPool:
    """Maps the work over processes; one worker works in this process. Use it as a context manager."""

    def __init__(self, context: WorkerContext, workers: int) -> None:
        self._context, self._workers = context, workers
        self._local = Worker(context) if workers == 1 else None
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def decode(self, paths: Iterable[Path]) -> Iterator[tuple[Path, DecodedRecording]]:
        """Each recording as it is done."""
        return self._map("decode", list(paths))

    def refine(self, parts: Iterable[Part]) -> Iterator[tuple[Part, str]]:
        """Each part as it is committed."""
        return self._map("refine", list(parts))

    def model_names(self) -> list[str]:
        """Of the models that parts are refined with."""
        [(_, names)] = self._map("model_names", [None])
        return list(names)

    def _map(self, method: str, items: list[Any]) -> Iterator[tuple[Any, Any]]:
        if self._local is not None:
            for item in items:
                yield item, getattr(self._local, method)(item)
            return
        waiting, attempts = list(reversed(items)), {id(item): 0 for item in items}
        running: dict[Future[Any], Any] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self._workers:
                    item = waiting.pop()
                    running[self._open_pool().submit(_call, method, item)] = item
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                died = [future for future in done if isinstance(future.exception(), BrokenProcessPool)]
                for future in done.difference(died):
                    yield running.pop(future), future.result()
                if died:
                    self._pool = None  # all that ran in it are lost, and are done again
                    for item in running.values():
                        attempts[id(item)] += 1
                        if attempts[id(item)] >= MAX_ATTEMPTS:
                            raise _died(method, item)
                    waiting += running.values()
                    running.clear()
        finally:
            for future in running:
                future.cancel()

    def _open_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._workers, multiprocessing.get_context("spawn"), _start_worker, (self._context,)
            )
        return self._pool


def _died(method: str, item: Any) -> DataError:
    name = item.audio if isinstance(item, Part) else item
    return DataError(
        f"the process that was to {method} {name} died {MAX_ATTEMPTS} times",
        hint="it may have run out of memory: try --workers 1, or --set listen.part_minutes=10; what is done stays done",
    )
