"""Ray Serve application: replicas of the server, one a card, with an engine process each.

    myna serve runs/marta --ray auto --replicas 1-4
    serve run deploy/ray.yaml

An actor beside the replicas, the registry, knows the adapters that all of them have: what one is asked to load or
unload, all load and unload before it is answered.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from typing import Any

import ray
from ray import serve
from ray.serve.config import DeploymentActorConfig, RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from myna.serve.context import ServerContext, ServerSettings
from myna.serve.messages import EngineInfo
from myna.serve.ray_server import (
    REPORT_SECONDS,
    AdapterVersion,
    ReplicaRegistry,
    ReplicaReport,
    merge_metrics,
    settings_of_arguments,
)
from myna.serve.schemas import ApiError
from myna.serve.server import create_app

APPLICATION = "speech"
REGISTRY = "registry"
ROUTING_SECONDS = 2.0
"""Seconds between two looks of the router at the loaded adapters of a replica."""

log = logging.getLogger("myna.serve")


class ReplicaContext(ServerContext):
    """State of a replica, which has the adapters of the registry."""

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(settings)
        self._version, self._failures = AdapterVersion(-1, {}), dict[str, str]()
        self._follower: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the model and all adapters, before Ray sends requests."""
        if self._follower is not None:
            return
        await super().start()
        await self.client.wait_until_loaded()
        await self._apply(await self._report())
        if self._failures:
            raise ApiError(503, "; ".join(f"{name}: {problem}" for name, problem in self._failures.items()))
        self._follower = asyncio.create_task(self._follow())

    async def close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
        await super().close()

    async def change_adapter(self, name: str, source: str | None) -> None:
        if problem := await _registry().change_adapter.remote(name, source):
            raise ApiError(400, problem, param="lora_name")

    async def render_metrics(self) -> bytes:
        texts = await _registry().metrics.remote()
        return merge_metrics(texts | {self.id: self.metrics.render()})

    async def _report(self) -> AdapterVersion:
        report = ReplicaReport(self.id, self._version, self._failures, self.metrics.render())
        version: AdapterVersion = await _registry().report.remote(report)
        return version

    async def _follow(self) -> None:
        while True:
            try:
                await self._apply(await self._report())
            except (ray.exceptions.RayError, ValueError, ApiError) as error:  # an actor or an engine is started anew
                log.warning("adapters could not be compared with those of the other replicas: %s", error)
                await asyncio.sleep(REPORT_SECONDS)

    async def _apply(self, version: AdapterVersion) -> None:
        if version.number == self._version.number:
            return
        failures = dict[str, str]()
        for name, source in list(self.adapters.sources.items()):
            if version.sources.get(name) != source:
                await self.adapters.remove(name)
        for name, source in version.sources.items():
            if name not in self.adapters.sources:
                try:
                    await self.adapters.add(name, source)
                except ApiError as error:
                    failures[name] = error.message
        self._version, self._failures = version, failures


def _registry() -> Any:
    """Return the registry. It is looked up each time: Ray starts another one if it dies."""
    return serve.get_deployment_actor(REGISTRY)


@serve.ingress()
class SpeechReplica:
    """One server with its engine process."""

    async def __init__(self, settings: ServerSettings, started_at: int) -> None:  # type: ignore[misc]
        self._context = ReplicaContext(settings)
        self._context.started_at = started_at
        await self._context.start()

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self._context)

    def check_health(self) -> None:
        """Raise an error if the engine does not work: Ray then replaces the replica."""
        if not self._context.client.healthy:
            raise RuntimeError("the engine does not do its work")

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the loaded adapters, for `WarmAdapterRouter`."""
        client = self._context.client
        return {"warm": client.load.adapters if client.in_flight < client.settings.rows else ()}

    async def engine_info(self) -> EngineInfo | None:
        return self._context.client.info


class WarmAdapterRouter(RequestRouter):  # type: ignore[misc]
    """Router of requests to the shorter queue of two replicas, as Ray's own. Replicas that have loaded the adapter of
    the header `serve_multiplexed_model_id`, and have a stream to spare, come first."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        name = pending_request.metadata.multiplexed_model_id if pending_request is not None else ""
        warm = [one for one in candidate_replicas if name in one.routing_stats.get("warm", ())]
        groups = [group for group in (warm, candidate_replicas) if group]
        return [random.sample(group, min(2, len(group))) for group in groups]


def build(arguments: dict[str, Any]) -> serve.Application:
    """Return the application of a Serve config file. `arguments` are `sources`, a list as for `myna serve`; fields of
    `EngineSettings`; some of `ServerSettings`; and `deployment`, options of Ray's deployment."""
    options = dict(arguments)
    deployment = options.pop("deployment", {})
    return application(settings_of_arguments(options), **deployment)


def application(settings: ServerSettings, **options: Any) -> serve.Application:
    """Return the application of the settings, with options of Ray's deployment."""
    engine = settings.engine
    registry = DeploymentActorConfig(
        name=REGISTRY,
        actor_class=ray.remote(ReplicaRegistry),
        init_kwargs={"adapters": dict(engine.adapters)},
        actor_options={"num_cpus": 0},
    )
    defaults: dict[str, Any] = {
        # Ray's own limit is 5; what is beyond ours is refused by the replica, with a Retry-After.
        "max_ongoing_requests": 2 * (engine.rows + engine.max_waiting),
        "health_check_period_s": 5,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": settings.drain_seconds,
        "max_constructor_retry_count": 2,
    }
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":  # which knows connections alone, and no adapters
        defaults["request_router_config"] = RequestRouterConfig(
            request_router_class=WarmAdapterRouter, request_routing_stats_period_s=ROUTING_SECONDS
        )
    replica = serve.deployment(name=APPLICATION, deployment_actors=[registry], **(defaults | options))(SpeechReplica)
    return replica.bind(settings, int(time.time()))
