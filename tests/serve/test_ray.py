"""Ray Serve for real: two replicas on the CPU, streams through its proxy, and a replica that is killed."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx2
import psutil  # type: ignore[import-untyped]
import pytest

from myna.audio.files import pcm16
from myna.models import open_family, save_tiny_model
from myna.speak.engine import SpeechRequest
from myna.speak.loading import load_engine
from tests.models.test_merge import random_adapter

pytestmark = pytest.mark.extras
ray = pytest.importorskip("ray", reason="pip install -c constraints.txt -e '.[cluster]'")
LONG = " ".join(f"Sentence number {number} is here to be spoken slowly." for number in range(40))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("ray")
    model = save_tiny_model(root / "tiny")
    return model, random_adapter(open_family(str(model)), root / "one", 0.1)


@pytest.fixture(scope="module")
def url(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two replicas behind one address, both ready."""
    from ray import serve

    from myna.serve.ray_app import build

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["MYNA_HOME"] = str(tmp_path_factory.mktemp("home"))
    os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "120"  # by default 5, on two busy cores too few
    os.environ["RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S"] = "60"
    ray.init(num_cpus=4, include_dashboard=False, configure_logging=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        model, adapter = folders
        arguments = {"sources": [str(model), f"one={adapter}"], "device": "cpu", "watermark": False, "rows": 4}
        deployment = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5}}
        serve.run(build(arguments | {"deployment": deployment}), route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def speak(url: str, **fields: object) -> httpx2.Response:
    body = {"input": "two words", "response_format": "pcm", "max_seconds": 1.0} | fields
    return httpx2.post(f"{url}/v1/audio/speech", json=body, timeout=180)


def expected(folders: tuple[Path, Path], *, adapted: bool) -> bytes:
    model, adapter = folders
    engine = load_engine(run=adapter, device="cpu") if adapted else load_engine(model=str(model), device="cpu")
    sampling = replace(engine.family.sampling, max_seconds=1.0, seed=0)
    plan = engine.plan(SpeechRequest("two words", id="two words"), sampling)
    return pcm16(next(engine.speak_plans([plan]))[1].samples)


def test_both_replicas_have_the_model_and_its_adapter(url: str, folders: tuple[Path, Path]) -> None:
    wanted = {"tiny": expected(folders, adapted=False), "one": expected(folders, adapted=True)}
    servers: dict[str, set[str]] = {"tiny": set(), "one": set()}
    deadline = time.monotonic() + 240
    while min(map(len, servers.values())) < 2:
        assert time.monotonic() < deadline, servers
        with ThreadPoolExecutor(6) as pool:
            for name, response in pool.map(lambda name: (name, speak(url, model=name)), ["tiny", "one"] * 3):
                assert response.status_code == 200 and response.content == wanted[name]
                servers[name].add(response.headers["x-server-id"])


def test_a_killed_replica_loses_its_own_requests_alone(url: str) -> None:
    results: dict[int, tuple[str, bool]] = {}
    is_running = [threading.Event() for _ in range(8)]

    def read(number: int) -> None:
        body = {"input": LONG, "response_format": "pcm", "max_seconds": 30.0}
        with httpx2.stream("POST", f"{url}/v1/audio/speech", json=body, timeout=180) as response:
            server = response.headers["x-server-id"]
            try:
                for _ in response.iter_raw():
                    is_running[number].set()
                results[number] = server, True
            except httpx2.TransportError:
                results[number] = server, False

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(is_running))]
    for thread in threads:
        thread.start()
    assert all(event.wait(120) for event in is_running), "audio comes as it is made"
    replicas = [
        one for one in psutil.process_iter(["cmdline"]) if "ServeReplica" in " ".join(one.info["cmdline"] or ())
    ]
    assert len(replicas) == 2
    engines = replicas[0].children()
    replicas[0].kill()
    for thread in threads:
        thread.join(240)
    broken = {server for server, whole in results.values() if not whole}
    whole = {server for server, whole in results.values() if whole}
    assert len(results) == 8 and len(broken) == len(whole) == 1 and not broken & whole
    psutil.wait_procs(engines, timeout=20)
    assert not [one for one in engines if one.is_running()], "its engine ends with it"
    deadline = time.monotonic() + 180
    while len({speak(url).headers["x-server-id"] for _ in range(6)} - broken) < 2:
        assert time.monotonic() < deadline, "another takes its place"
