"""Server on a Ray cluster (`myna serve --ray`), and the registry that its replicas share."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from myna.core.errors import ConfigError, SpeakError
from myna.core.io import absolute_folder
from myna.core.pools import connect_cluster
from myna.serve.context import ServerSettings, resolve_sources
from myna.serve.messages import EngineInfo, EngineSettings

REPORT_SECONDS = 1.0
"""Seconds between two reports of a replica when nothing changes."""
LOST_SECONDS = 10.0
"""Seconds without a report, after which a replica is no longer waited for."""
CHANGE_SECONDS = 120.0
"""Seconds all replicas have to load an adapter."""


@dataclass(frozen=True)
class AdapterVersion:
    """Adapters of all replicas, and how often they have changed."""

    number: int
    sources: Mapping[str, str]


@dataclass(frozen=True)
class ReplicaReport:
    """Report of a replica about itself."""

    id: str
    adapters: AdapterVersion
    """Last version that it has applied."""
    failures: Mapping[str, str]
    """Adapters of that version that it could not load, and why."""
    metrics: bytes


class ReplicaRegistry:
    """Actor that knows the adapters of all replicas and their last figures."""

    def __init__(self, adapters: Mapping[str, str]) -> None:
        self._adapters = AdapterVersion(0, dict(adapters))
        self._reports: dict[str, tuple[float, ReplicaReport]] = {}
        self._changed = asyncio.Condition()

    async def report(self, report: ReplicaReport) -> AdapterVersion:
        """Return the adapters that a replica should have: immediately if its own list is outdated, otherwise after a
        change or REPORT_SECONDS."""
        if report.adapters.number > self._adapters.number:  # this actor was started anew
            self._adapters = report.adapters
        self._reports[report.id] = time.monotonic(), report
        async with self._changed:
            self._changed.notify_all()
            if report.adapters.number == self._adapters.number:
                with suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_SECONDS):
                        await self._changed.wait_for(lambda: self._adapters.number != report.adapters.number)
        return self._adapters

    async def change_adapter(self, name: str, source: str | None) -> str:
        """Add an adapter to all replicas, or remove it if there is no source. Return why a replica could not load it,
        in which case none keeps it; otherwise an empty text."""
        deadline = time.monotonic() + CHANGE_SECONDS
        await self._wait_for(lambda: bool(self._live()), deadline)  # which also tells a new registry what there is
        if source is not None and name in self._adapters.sources:
            return f"there is a model named {name} already"
        number = self._apply(name, source)
        is_done = await self._wait_for(lambda: all(one.adapters.number >= number for one in self._live()), deadline)
        if source is None:
            return ""
        problems = [one.failures[name] for one in self._live() if name in one.failures]
        if not is_done:
            problems.append(f"a replica has not loaded it within {CHANGE_SECONDS:g} s")
        if not problems:
            return ""
        self._apply(name, None)
        await self._notify()
        return problems[0]

    def _apply(self, name: str, source: str | None) -> int:
        sources = {one: folder for one, folder in self._adapters.sources.items() if one != name}
        if source is not None:
            sources[name] = source
        self._adapters = AdapterVersion(self._adapters.number + 1, sources)
        return self._adapters.number

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for(self, is_met: Callable[[], bool], deadline: float) -> bool:
        """Wait for reports. Replicas that are lost in the meantime are no longer waited for."""
        while not is_met():
            await self._notify()
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    def _live(self) -> list[ReplicaReport]:
        now = time.monotonic()
        self._reports = {id: one for id, one in self._reports.items() if now - one[0] < LOST_SECONDS}
        return [report for _, report in self._reports.values()]

    async def metrics(self) -> dict[str, bytes]:
        return {report.id: report.metrics for report in self._live()}


def merge_metrics(texts: Mapping[str, bytes]) -> bytes:
    """Merge the figures of several servers into one text, each sample with its `server`."""
    families: dict[str, list[str]] = {}
    for server, text in sorted(texts.items()):
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
            samples = families.setdefault(family, [])
            if not line.startswith("#"):
                name, brace, rest = re.split(r"(\W)", line, maxsplit=1)
                line = f'{name}{{server="{server}"{"," if brace == "{" else "} "}{rest}'
            if line not in samples:
                samples.append(line)
    return "".join(f"{line}\n" for samples in families.values() for line in samples).encode()


ENGINE_FIELDS = tuple(field.name for field in fields(EngineSettings))
SERVER_FIELDS = tuple(
    field.name for field in fields(ServerSettings) if field.name not in ("engine", "host", "port", "allowed_hosts")
)
BUSY_SHARE = 0.75
"""Share of a replica's streams above which, on average, another replica is started."""
UPSCALE_SECONDS = 5.0
"""Seconds the load must be that high before another replica is started."""
HAPROXY_VARIABLES = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",  # this process, which has no event loop, asks a replica too
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
}
"""Environment variables of every process of Ray Serve. The last is the time HAProxy has to forget a replica."""


def run_on_ray(
    settings: ServerSettings, address: str, replicas: str, *, haproxy: bool, on_ready: Callable[[EngineInfo], None]
) -> None:
    """Serve on a Ray cluster until SIGTERM or SIGINT, and then finish current speech within `drain_seconds`. `on_ready`
    is called when the first replicas are loaded and warm."""
    counts = parse_replicas(replicas)
    variables = HAPROXY_VARIABLES if haproxy else {}
    os.environ.update(variables)  # before Serve is imported
    ray = connect_cluster(address, **({"runtime_env": {"env_vars": variables}} if haproxy else {}))
    from ray import serve

    from myna.serve.ray_app import APPLICATION, application

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if serve.status().proxies:
        raise ConfigError(
            "Ray Serve runs on this cluster already",
            hint="serve shutdown ends it; or add an application with `import_path: myna.serve.ray_app:build`",
        )
    options = deployment_options(settings, counts, ray.cluster_resources())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        serve.start(http_options={"host": settings.host, "port": settings.port})
        try:
            handle = serve.run(application(_absolute(settings), **options), name=APPLICATION, route_prefix="/")
        except RuntimeError as error:
            deployments = serve.status().applications[APPLICATION].deployments.values()
            problem = "; ".join(one.message for one in deployments) or str(error)
            raise SpeakError(problem, hint="myna serve without --ray tells more") from error
        on_ready(handle.engine_info.remote().result())
        with suppress(KeyboardInterrupt):
            while APPLICATION in serve.status().applications:
                time.sleep(1)
            raise SpeakError("the application was removed from the cluster", hint="serve status tells what it runs")
    finally:
        with suppress(TimeoutError):  # Ray waits for a minute here, and `drain_seconds` may be more
            serve.delete(APPLICATION)
        while APPLICATION in serve.status().applications:
            time.sleep(0.5)
        serve.shutdown()
        ray.shutdown()


def parse_replicas(text: str) -> tuple[int, int]:
    """Return the least and the most replicas of `2` or `1-4`."""
    match = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ConfigError(f"{text!r} is no number of replicas", hint="--replicas 2, or --replicas 1-4")
    return int(match[1]), int(match[2] or match[1])


def deployment_options(
    settings: ServerSettings, replicas: tuple[int, int], resources: Mapping[str, float]
) -> dict[str, Any]:
    """Return options of Ray's deployment: a card for each replica if there are any, and how their number follows
    load."""
    device = settings.engine.device
    kind = "GPU" if device.startswith("cuda") or (device == "auto" and resources.get("GPU")) else "CPU"
    least, most = replicas
    if least > (available := int(resources.get(kind, 0))):
        raise ConfigError(
            f"{least} replicas need {least} {kind}s, and the cluster has {available}",
            hint=f"--replicas {max(available, 1)}, or add machines: ray start --address=HEAD:6379",
        )
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": 1, "num_gpus": int(kind == "GPU")}}
    if least == most:
        return options | {"num_replicas": least}
    scaling = {
        "min_replicas": least,
        "max_replicas": most,
        "target_ongoing_requests": BUSY_SHARE * settings.engine.rows,
        "upscale_delay_s": UPSCALE_SECONDS,
    }
    return options | {"autoscaling_config": scaling}


def _absolute(settings: ServerSettings) -> ServerSettings:
    """Make all paths absolute: replicas have working directories of their own."""
    engine, voices = settings.engine, settings.voices
    named = {name: getattr(engine, name) for name in ("source", "model", "codec")}
    paths: dict[str, Any] = {name: absolute_folder(source) for name, source in named.items() if source is not None}
    paths["adapters"] = {name: absolute_folder(folder) for name, folder in engine.adapters.items()}
    return replace(
        settings,
        engine=replace(engine, **paths),
        adapter_folders=tuple(folder.absolute() for folder in settings.adapter_folders),
        voices=voices.absolute() if voices is not None else None,
        asr=absolute_folder(settings.asr) if settings.asr is not None else None,
    )


def settings_of_arguments(options: dict[str, Any]) -> ServerSettings:
    """Return the settings of a Serve config file: `sources`, fields of `EngineSettings`, and some of
    `ServerSettings`."""
    sources = options.pop("sources", None)
    if not sources:
        raise ConfigError("a Ray application needs sources", hint="sources: [runs/marta], as of myna serve")
    if unknown := sorted(options.keys() - {*ENGINE_FIELDS, *SERVER_FIELDS}):
        raise ConfigError(
            f"Ray arguments that are not known: {', '.join(unknown)}",
            hint=f"known: {', '.join(('sources', 'deployment', *SERVER_FIELDS, *ENGINE_FIELDS))}",
        )
    # A worker of the cluster runs this: its environment need not be that of `serve run`, and without a key it refuses.
    known = {"api_key": os.environ.get("MYNA_API_KEY")} | {one: options[one] for one in SERVER_FIELDS if one in options}
    engine = {"source": ""} | {one: options[one] for one in ENGINE_FIELDS if one in options}
    try:
        # Behind Ray's proxy a replica has names that it does not know.
        settings = TypeAdapter(ServerSettings).validate_python({"engine": engine, "host": "0.0.0.0"} | known)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise ConfigError(
            f"Ray argument {place}: {problem['msg']}", hint="correct it under `args` of the file"
        ) from None
    source, adapters = resolve_sources(sources, settings.engine.model, keep_adapters=bool(settings.adapter_folders))
    rank = settings.engine.adapter_rank or (64 if adapters or settings.adapter_folders else None)
    return replace(settings, engine=replace(settings.engine, source=source, adapters=adapters, adapter_rank=rank))
