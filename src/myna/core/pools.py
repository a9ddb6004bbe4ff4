"""Pools of workers: a function mapped over items, by processes of this machine or by actors of a Ray cluster.

A worker commits its results itself, under a temporary name that is then renamed, so a call may be repeated after a
process or a node was lost. Items are paths and small records rather than samples.
"""

import logging
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

from myna.core.errors import ConfigError, DataError, MynaError, import_optional

MAX_ATTEMPTS = 3
"""Attempts at an item whose process dies each time."""
RETRY_FOREVER = -1
"""Restarts of an actor, and repeats of its call. Unlimited: a finite number would be used up while a call waits for a
free node."""
MAX_STARTS = 5
"""Maximum number of starts of a call on a cluster: enough for calls that lose their node. A call that ends its process
each time is then given up."""
WAIT_SECONDS = 5.0
"""Seconds between looks at the nodes of the cluster."""
W = TypeVar("W")
T = TypeVar("T")
R = TypeVar("R")

_worker: Any = None
"""Worker of this process, if it belongs to a pool."""


def open_pool(make_worker: Callable[[], W], workers: int | None, ray: str | None, device: str = "cpu") -> "Pool[W]":
    """Open a pool of `workers` processes here, or of at most as many actors of the Ray cluster at the address `ray`.

    `make_worker` must be picklable. Each actor has a GPU if `device` is `cuda`, or `auto` and the cluster has GPUs.
    """
    return ProcessPool(make_worker, workers or 1) if ray is None else RayPool(make_worker, ray, workers, device)


class ProcessPool(Generic[W]):
    """Pool of processes of this machine; a single worker works in this process. Processes that die are replaced, and
    their items are done again."""

    uses_gpus = False
    """Whether each worker has a GPU to itself."""

    def __init__(self, make_worker: Callable[[], W], workers: int) -> None:
        self._make_worker, self._workers = make_worker, workers
        self._local: W | None = None
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "ProcessPool[W]":
        return self

    def __exit__(self, *error: object) -> None:
        """End the workers."""
        if self._pool is None:
            return
        if not any(error):
            # All is done. A process that dies now may hold the lock through which the others are told to end, and
            # `shutdown` would wait for them for ever.
            for process in list(self._pool._processes.values()):
                process.kill()
        self._pool.shutdown(cancel_futures=True)

    def call_each(self, function: Callable[[W], R]) -> list[R]:
        """Return the results of `function(worker)` for at least one worker of each machine: here one, since processes
        of one machine are alike."""
        [(_, result)] = self.map(_call_without_item, [function])
        return [result]

    def map(
        self, function: Callable[[W, T], R], items: Iterable[T], *, describe: Callable[[T], str] = str
    ) -> Iterator[tuple[T, R]]:
        """Yield each item with the result of `function(worker, item)` as soon as it is done. Errors of workers are
        raised here."""
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
                    except BrokenProcessPool:  # an idle process died; calls of the others are lost as well
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
                    self._pool = None  # all calls that ran in it are lost, and are done again
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


def _start_worker(make_worker: Callable[[], Any]) -> None:
    global _worker
    end_with_parent()
    _worker = make_worker()


def end_with_parent() -> None:
    """End this process when its parent ends: a killed parent cannot end its processes, which would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_for_end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()


def _call(function: Callable[[Any, T], R], item: T) -> R:
    return function(_worker, item)


def _call_without_item(worker: W, function: Callable[[W], R]) -> R:
    return function(worker)


class _Actor:
    """A worker in a process of the cluster."""

    def __init__(self, make_worker: Callable[[], Any]) -> None:
        self._worker = make_worker()

    def call(self, function: Callable[..., Any], *item: Any) -> Any:
        return function(self._worker, *item)

    def call_counted(self, starts: Any, work: str, function: Callable[..., Any], item: Any) -> Any:
        import ray

        if ray.get(starts.add.remote(work)) > MAX_STARTS:
            raise DataError(
                f"the process that was to {work} died {MAX_STARTS} times",
                hint="it may have run out of memory: try fewer with --workers; what is done stays done",
            )
        return self.call(function, item)


class _Starts:
    """Number of starts of each call, counted in a process of its own that no call can end."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, work: str) -> int:
        self._counts[work] += 1
        return self._counts[work]


class RayPool(Generic[W]):
    """Pool of actors on the CPUs or GPUs of a cluster, including nodes that join later.

    Ray restarts actors on other nodes and repeats the call they were in; it commits nothing.
    """

    def __init__(self, make_worker: Callable[[], W], address: str, workers: int | None, device: str) -> None:
        self._make_worker, self._address, self._workers = make_worker, address, workers
        self._ray = ray = connect_cluster(address)
        has_gpus = ray.cluster_resources().get("GPU", 0) >= 1
        self.uses_gpus = device.startswith("cuda") or (device == "auto" and has_gpus)
        self._actor_class = ray.remote(
            num_cpus=1, num_gpus=int(self.uses_gpus), max_restarts=RETRY_FOREVER, max_task_retries=RETRY_FOREVER
        )(_Actor)
        self._actors: list[Any] = []
        if not self._places():
            raise ConfigError(
                f"the Ray cluster has no {'GPU' if self.uses_gpus else 'CPU'}",
                hint="add nodes to it: ray start --address=HEAD:6379",
            )

    def __enter__(self) -> "RayPool[W]":
        self._start_actors()
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []

    def call_each(self, function: Callable[[W], R]) -> list[R]:
        calls = [actor.call.remote(function) for actor in self._actors]
        return [self._result(call, function.__name__) for call in calls]

    def map(
        self, function: Callable[[W, T], R], items: Iterable[T], *, describe: Callable[[T], str] = str
    ) -> Iterator[tuple[T, R]]:
        waiting, idle = list(reversed(list(items))), list(self._actors)
        running: dict[Any, tuple[Any, T, str]] = {}
        starts = self._ray.remote(num_cpus=0, max_restarts=RETRY_FOREVER, max_task_retries=RETRY_FOREVER)(_Starts)
        counter = starts.remote()
        while waiting or running:
            if waiting:
                idle += self._start_actors()
            while waiting and idle:
                actor, item = idle.pop(), waiting.pop()
                work = f"{function.__name__} {describe(item)}"
                running[actor.call_counted.remote(counter, work, function, item)] = actor, item, work
            # An actor that lost its node needs a place to be restarted in: free that of one with nothing left to do.
            while idle and len(self._actors) > self._places():
                self._actors.remove(actor := idle.pop())
                self._ray.kill(actor)
            done, _ = self._ray.wait(list(running), num_returns=1, timeout=WAIT_SECONDS)
            for call in done:
                actor, item, work = running.pop(call)
                yield item, self._result(call, work)
                idle.append(actor)

    def _places(self) -> int:
        """Return the number of actors that the cluster has room for now."""
        resources = self._ray.cluster_resources()
        return int(min(resources.get(kind, 0) for kind in (("CPU", "GPU") if self.uses_gpus else ("CPU",))))

    def _start_actors(self) -> list[Any]:
        """Start an actor for each free place, up to the number of workers that was asked for."""
        places = self._places()
        missing = min(self._workers or places, places) - len(self._actors)
        started = [self._actor_class.remote(self._make_worker) for _ in range(missing)]
        self._actors += started
        return started

    def _result(self, call: Any, work: str) -> Any:
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, MynaError) else error from None
        except self._ray.exceptions.RayActorError as error:
            raise ConfigError(
                f"no worker of the cluster could {work}: {error}",
                hint=f"compare the nodes: myna doctor --ray {self._address}; if they are alike, it may have run out of "
                "memory: try fewer with --workers; what is done stays done",
            ) from error


Pool = ProcessPool[W] | RayPool[W]


def connect_cluster(address: str, **options: Any) -> Any:
    """Join the Ray cluster at an address and return the `ray` module. The address is HEAD:PORT, `auto` for the cluster
    that this machine belongs to, or `local` for one that is started here and ends with this process."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = import_optional("ray", 'pip install "myna[cluster]"')
    if not ray.is_initialized():
        if address == "local":
            options["include_dashboard"] = False
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"there is no Ray cluster at {address}: {error}",
                hint="start one: ray start --head, and on the others ray start --address=HEAD:6379; if it asks for a "
                "token: export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=FILE, as on its head",
            ) from None
    return ray
