"""Ray Serve application: replicas of the server, one a card, with an engine process each.

    serve run deploy/ray.yaml

Adapters are those of the settings, so that every replica has them; what is loaded while it runs would reach one replica
alone, and is not allowed here.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from fastapi import FastAPI
from ray import serve

from myna.errors import ConfigError
from myna.serve.app import create_app
from myna.serve.context import ServerContext, ServerSettings
from myna.serve.messages import EngineSettings
from myna.serve.sources import resolve_sources

ENGINE_FIELDS = tuple(field.name for field in fields(EngineSettings))
SERVER_FIELDS = ("api_key", "max_characters", "voices", "drain_seconds")


def build(arguments: dict[str, Any]) -> serve.Application:
    """The application of a Serve config file. `arguments` are `sources`, a list as of `myna serve`; the fields of
    `EngineSettings`; `api_key`, `max_characters` and `voices`; and `deployment`, options of Ray's deployment."""
    options = dict(arguments)
    deployment = options.pop("deployment", {})
    settings = _settings(options)
    capacity = settings.engine.rows + settings.engine.max_waiting

    def build_replica() -> FastAPI:
        return create_app(ServerContext.create(settings))

    replica = serve.deployment(
        name="speech",
        # Ray's own limit is 5; what is beyond ours is refused by the replica, with a Retry-After.
        max_ongoing_requests=2 * capacity,
        health_check_period_s=5,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        **deployment,
    )(serve.ingress(build_replica)(type("SpeechReplica", (), {"__doc__": "One server with its engine process."})))
    return replica.bind()


def _settings(options: dict[str, Any]) -> ServerSettings:
    sources = options.pop("sources", None)
    if not sources:
        raise ConfigError("a Ray application needs sources", hint="sources: [runs/marta], as of myna serve")
    engine = EngineSettings("", **{name: options.pop(name) for name in ENGINE_FIELDS if name in options})
    served = resolve_sources(sources, engine.model)
    rank = engine.adapter_rank or (64 if served.adapters else None)
    engine = replace(engine, source=served.source, adapters=served.adapters, adapter_rank=rank)
    known = {name: options.pop(name) for name in SERVER_FIELDS if name in options}
    if options:
        raise ConfigError(
            f"Ray arguments that are not known: {', '.join(sorted(options))}",
            hint=f"known: {', '.join(('sources', 'deployment', *SERVER_FIELDS, *ENGINE_FIELDS))}",
        )
    # Behind Ray's proxy a replica has names that it does not know.
    return ServerSettings(engine, host="0.0.0.0", **known)
