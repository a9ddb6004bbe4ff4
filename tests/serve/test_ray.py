"""`myna serve --ray` on a cluster of two nodes on the CPU, which a second replica joins under load."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import psutil  # type: ignore[import-untyped]
import pytest

from myna.audio.files import pcm16
from myna.core.errors import ConfigError
from myna.models import open_family, save_tiny_model
from myna.models.ref import ModelRef
from myna.provenance.speech_log import LOG_FILE
from myna.serve.context import ServerSettings
from myna.serve.messages import EngineSettings
from myna.serve.ray_server import deployment_options, parse_replicas
from myna.speak.loading import load_engine
from myna.speak.request import SpeechRequest
from tests.models.helpers import random_adapter
from tests.ray_nodes import ray_nodes
from tests.serve.conftest import RunningServer, start_server

pytestmark = [pytest.mark.extras, pytest.mark.timeout(900)]
LONG = " ".join(f"Sentence number {number} is here to be spoken slowly." for number in range(40))
VARIABLES = {
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
"""Seconds that suffice on two busy cores; Ray's own limit is too short."""


@dataclass
class Stream:
    """Long speech, read by a thread of its own."""

    url: str
    segment_seconds: float = 8.0
    server: str = ""
    received: int = 0
    is_whole: bool = False
    is_running: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        body = {"input": LONG, "response_format": "pcm", "max_seconds": self.segment_seconds}
        with httpx2.stream("POST", f"{self.url}/v1/audio/speech", json=body, timeout=300) as response:
            self.server = response.headers["x-server-id"]
            try:
                for piece in response.iter_raw():
                    self.received += len(piece)
                    self.is_running.set()
                self.is_whole = True
            except httpx2.TransportError:
                return

    def wait(self) -> None:
        self.thread.join(400)


def start_streams(url: str, count: int, segment_seconds: float = 8.0) -> list[Stream]:
    streams = [Stream(url, segment_seconds) for _ in range(count)]
    assert all(stream.is_running.wait(200) for stream in streams), "audio comes as it is made"
    return streams


@dataclass
class Models:
    """A model, and folders of adapters below one that adapters may be loaded from."""

    root: Path

    def expected(self, adapter: str = "") -> bytes:
        """Return the speech of one process without a server."""
        ref = ModelRef.find(self.root / "adapters" / adapter if adapter else self.root / "tiny")
        engine = load_engine(ref, device="cpu")
        plan = engine.plan(SpeechRequest("two words", id="two words", max_seconds=1.0))
        return pcm16(next(engine.speak_plans([plan]))[1].samples)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    family = open_family(str(save_tiny_model(root / "tiny")))
    for number, name in enumerate(("first", "second")):
        random_adapter(family, root / "adapters" / name, 0.05 + 0.15 * number)
    return Models(root)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def address(home: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (VARIABLES | {"MYNA_HOME": str(home)}).items():
            patch.setenv(name, value)
        with ray_nodes(2) as nodes:
            yield nodes.address


def arguments(models: Models, address: str) -> tuple[str, ...]:
    adapters = models.root / "adapters"
    served = (f"one={adapters / 'first'}", "--allow-adapter-loading", str(adapters), "--no-watermark")
    return *served, "--streams", "4", "--drain-seconds", "50", "--ray", address


@pytest.fixture(scope="module")
def single(models: Models, address: str, home: Path) -> Iterator[RunningServer]:
    """A server of one replica, or of two if there is work for them."""
    options = (*arguments(models, address), "--replicas", "1-2")
    with start_server(home, *options, source=str(models.root / "tiny"), environment=VARIABLES) as server:
        yield server


@pytest.fixture(scope="module")
def server(single: RunningServer) -> RunningServer:
    """Run a server with two replicas, the second of which was started by load on the first."""
    assert single.metric("myna_engine_ready") == 1
    streams = start_streams(single.url, 4)
    deadline = time.monotonic() + 240
    while single.metric("myna_engine_ready") != 2:
        assert time.monotonic() < deadline, "a second replica is started"
        streams += [Stream(single.url) for stream in streams[-4:] if not stream.thread.is_alive()]
        time.sleep(0.2)
    for stream in streams:
        stream.wait()
    assert all(stream.is_whole for stream in streams)
    return single


def speak(url: str, **fields: object) -> httpx2.Response:
    body = {"input": "two words", "response_format": "pcm", "max_seconds": 1.0} | fields
    return httpx2.post(f"{url}/v1/audio/speech", json=body, timeout=180)


def speak_on_both(url: str, name: str) -> bytes:
    """Return the answers of both replicas, asking until each has answered."""
    servers, spoken = set[str](), set[bytes]()
    deadline = time.monotonic() + 120
    while len(servers) < 2:
        assert time.monotonic() < deadline, servers
        with ThreadPoolExecutor(4) as pool:
            for response in pool.map(lambda _: speak(url, model=name), range(4)):
                assert response.status_code == 200, response.text
                servers.add(response.headers["x-server-id"])
                spoken.add(response.content)
    assert len(spoken) == 1
    return spoken.pop()


def ask_often(url: str) -> str:
    """Return the answer of a route, which must be the same from all replicas."""
    (answer,) = {httpx2.get(url, timeout=60).text for _ in range(10)}
    return answer


def test_adapters_are_loaded_and_unloaded_on_both(server: RunningServer, models: Models) -> None:
    url = server.url
    assert speak_on_both(url, "tiny") == models.expected()
    assert speak_on_both(url, "one") == models.expected("first")
    before = ask_often(f"{url}/v1/models")
    assert '"two"' not in before
    wrong = httpx2.post(f"{url}/v1/load_lora_adapter", json={"lora_name": "two", "lora_path": "nowhere"})
    assert wrong.status_code == 404
    body = {"lora_name": "two", "lora_path": "second"}
    assert httpx2.post(f"{url}/v1/load_lora_adapter", json=body, timeout=120).status_code == 200
    assert '"id":"two"' in ask_often(f"{url}/v1/models")
    assert speak_on_both(url, "two") == models.expected("second")
    assert httpx2.post(f"{url}/v1/load_lora_adapter", json=body, timeout=120).status_code == 400
    unload = httpx2.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "two"}, timeout=120)
    assert unload.status_code == 200 and ask_often(f"{url}/v1/models") == before
    assert {speak(url, model="two").status_code for _ in range(8)} == {404}


def test_status_and_figures_are_of_all_replicas(server: RunningServer) -> None:
    assert ask_often(f"{server.url}/ready") == '{"ready":true}'
    assert '"status":"ok"' in ask_often(f"{server.url}/health")
    text = httpx2.get(f"{server.url}/metrics", timeout=60).text
    assert text.count("# TYPE myna_rows gauge") == 1 and text.count("myna_rows{server=") == 2
    assert server.metric("myna_requests_finished_total") > 8


def test_a_client_that_leaves_frees_its_row(server: RunningServer) -> None:
    body = {"input": LONG, "response_format": "pcm"}
    with httpx2.stream("POST", f"{server.url}/v1/audio/speech", json=body, timeout=120) as response:
        next(response.iter_raw())
    deadline = time.monotonic() + 60
    while json.loads((server.home / LOG_FILE).read_text().splitlines()[-1])["finish_reason"] != "cancelled":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    server.wait_for("myna_requests_in_flight", 0)


def test_a_killed_replica_loses_its_own_requests_alone(server: RunningServer) -> None:
    streams = start_streams(server.url, 3, segment_seconds=30.0)
    while len({stream.server for stream in streams}) < 2:  # those that come at once may all go to one
        assert len(streams) < 8
        streams += start_streams(server.url, 1, segment_seconds=30.0)
    own = psutil.Process().children(recursive=True)
    replicas = [one for one in own if "ServeReplica" in " ".join(one.cmdline())]
    assert len(replicas) == 2
    engines = replicas[0].children()
    assert all(stream.thread.is_alive() for stream in streams)
    replicas[0].kill()
    for stream in streams:
        stream.wait()
    broken = {stream.server for stream in streams if not stream.is_whole}
    whole = {stream.server for stream in streams if stream.is_whole}
    lengths = {stream.received for stream in streams if stream.is_whole}
    assert len(broken) == len(whole) == len(lengths) == 1 and not broken & whole
    psutil.wait_procs(engines, timeout=20)
    assert not [one for one in engines if one.is_running()], "its engine ends with it"
    deadline = time.monotonic() + 180
    while len({speak(server.url, model="one").headers["x-server-id"] for _ in range(6)} - broken) < 2:
        assert time.monotonic() < deadline, "another takes its place, with the same adapters"


def test_sigterm_drains(server: RunningServer) -> None:
    streams = start_streams(server.url, 4)
    server.process.send_signal(signal.SIGTERM)
    for stream in streams:
        stream.wait()
    assert all(stream.is_whole for stream in streams) and len({stream.received for stream in streams}) == 1
    assert server.process.wait(120) == 0, server.output
    assert "Traceback" not in server.output


def haproxy_processes() -> list[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=True) if one.name() == "haproxy"]


def test_haproxy_in_front_streams_and_passes_a_disconnect_on(models: Models, address: str, home: Path) -> None:
    """Stream through the HAProxy of Ray Serve, on the cluster of the tests above."""
    options = (*arguments(models, address), "--replicas", "1", "--haproxy")
    with start_server(home, *options, source=str(models.root / "tiny"), environment=VARIABLES) as server:
        port = int(server.url.rpartition(":")[2])
        listeners = {one.laddr.port for process in haproxy_processes() for one in process.net_connections("tcp")}
        assert port in listeners, "it is HAProxy that answers"
        assert speak(server.url).content == models.expected()
        assert speak(server.url, model="one").content == models.expected("first")
        (stream,) = start_streams(server.url, 1, segment_seconds=30.0)
        assert stream.thread.is_alive(), "audio comes before all of it is made"
        body = {"input": LONG, "response_format": "pcm"}
        with httpx2.stream("POST", f"{server.url}/v1/audio/speech", json=body, timeout=120) as response:
            next(response.iter_raw())
        server.wait_for("myna_requests_in_flight", 1, seconds=60)
        server.process.send_signal(signal.SIGTERM)
        stream.wait()
        assert stream.is_whole, "what was begun is spoken to its end"
        assert server.process.wait(120) == 0, server.output
        assert "Traceback" not in server.output
    psutil.wait_procs(haproxy_processes(), timeout=20)
    assert not haproxy_processes()


def test_a_request_goes_first_to_those_that_have_its_adapter() -> None:
    """A replica without a stream to spare reports none; Ray asks the first group, then the second."""
    from myna.serve.ray_app import WarmAdapterRouter

    replicas: Any = [SimpleNamespace(routing_stats={"warm": names}) for names in (("one",), (), ("one", "two"))]
    replicas.append(SimpleNamespace(routing_stats={}))  # it has just been started

    def chosen(name: str) -> list[set[int]]:
        pending: Any = SimpleNamespace(metadata=SimpleNamespace(multiplexed_model_id=name))
        router: Any = None
        groups = asyncio.run(WarmAdapterRouter.choose_replicas(router, replicas, pending))
        return [{replicas.index(one) for one in group} for group in groups]

    warm, anyone = chosen("one")
    assert warm == {0, 2} and len(anyone) == 2
    assert chosen("two")[0] == {2}
    (anyone,) = chosen("")
    assert len(anyone) == 2
    assert {number for _ in range(200) for number in chosen("three")[0]} == {0, 1, 2, 3}


def test_replicas_are_a_number_or_a_range() -> None:
    assert parse_replicas("2") == (2, 2) and parse_replicas("1-4") == (1, 4)
    for text in ("0", "4-1", "many", "1-", "-1", ""):
        with pytest.raises(ConfigError, match="no number of replicas"):
            parse_replicas(text)


def test_each_replica_has_a_card_of_its_own() -> None:
    settings = ServerSettings(EngineSettings("fledgling", rows=64))
    options = deployment_options(settings, (1, 4), {"GPU": 4.0, "CPU": 64.0})
    assert options["ray_actor_options"]["num_gpus"] == 1
    assert options["autoscaling_config"]["target_ongoing_requests"] == 48
    with pytest.raises(ConfigError, match="the cluster has 4"):
        deployment_options(settings, (5, 5), {"GPU": 4.0, "CPU": 64.0})
    on_cpu = replace(settings, engine=EngineSettings("fledgling", device="cpu"))
    assert deployment_options(on_cpu, (2, 2), {"GPU": 4.0, "CPU": 64.0}) == {
        "ray_actor_options": {"num_cpus": 1, "num_gpus": 0},
        "num_replicas": 2,
    }
