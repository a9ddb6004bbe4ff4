"""Engine of the first pass on a Ray cluster: the same functions over the same items, by actors on many machines.

The only module that imports Ray. Nothing is committed by it: actors write results into the shared folder, each under a
temporary name and then renamed, so that a call that Ray repeats after a node was lost does no harm. Items are paths and
small records; samples never travel.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from myna.curate.engine import Worker, WorkerContext
from myna.curate.recordings import DecodedRecording
from myna.curate.refine import Part
from myna.errors import ConfigError, MynaError
from myna.evaluate.dependencies import import_optional

INSTALL = 'pip install "myna[cluster]"'
RETRY_FOREVER = -1


class ClusterPool:
    """Maps the work over the CPUs, or with a CUDA device the GPUs, of a cluster. Use it as a context manager."""

    def __init__(self, context: WorkerContext, address: str, workers: int | None = None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._context, self._address, self._workers = context, address, workers
        self._ray = import_optional("ray", INSTALL)
        self._actors: list[Any] = []

    def __enter__(self) -> ClusterPool:
        ray = self._ray
        if not ray.is_initialized():
            try:
                ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"there is no Ray cluster at {self._address}: {error}",
                    hint="start one: ray start --head, and on the others ray start --address=HEAD:6379",
                ) from None
        on_gpu = self._context.settings.listen.device.startswith("cuda")
        available = int(ray.cluster_resources().get("GPU" if on_gpu else "CPU", 0))
        if not available:
            raise ConfigError(
                f"the Ray cluster has no {'GPU' if on_gpu else 'CPU'}",
                hint="add nodes to it, or change listen.device",
            )
        # Restarted on another node where one is lost; the call it was in is made again.
        actor = ray.remote(
            num_cpus=1, num_gpus=int(on_gpu), max_restarts=RETRY_FOREVER, max_task_retries=RETRY_FOREVER
        )(Worker)
        self._actors = [actor.remote(self._context) for _ in range(min(self._workers or available, available))]
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []

    def model_names(self) -> list[str]:
        """Of the models that parts are refined with. Every worker is asked: nodes may hold different ones."""
        names = self._ray.get([actor.model_names.remote(None) for actor in self._actors])
        if different := [one for one in names if one != names[0]]:
            raise ConfigError(
                f"nodes of the cluster have different models: {names[0]} and {different[0]}",
                hint="copy one folder of models to all of them; myna doctor prints versions",
            )
        return list(names[0])

    def decode(self, paths: Iterable[Path]) -> Iterator[tuple[Path, DecodedRecording]]:
        """Each recording as it is done."""
        return self._map("decode", list(paths))

    def refine(self, parts: Iterable[Part]) -> Iterator[tuple[Part, str]]:
        """Each part as it is committed."""
        return self._map("refine", list(parts))

    def _map(self, method: str, items: list[Any]) -> Iterator[tuple[Any, Any]]:
        waiting, idle = list(reversed(items)), list(self._actors)
        running: dict[Any, tuple[Any, Any]] = {}
        while waiting or running:
            while waiting and idle:
                actor, item = idle.pop(), waiting.pop()
                running[getattr(actor, method).remote(item)] = actor, item
            done, _ = self._ray.wait(list(running), num_returns=1)
            for call in done:
                actor, item = running.pop(call)
                yield item, self._result(call)
                idle.append(actor)
            if not waiting and running and method == "refine":
                # An actor whose node was lost needs a place to be restarted in.
                while idle:
                    self._actors.remove(actor := idle.pop())
                    self._ray.kill(actor)

    def _result(self, call: Any) -> Any:
        try:
            return self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, MynaError) else error from None
