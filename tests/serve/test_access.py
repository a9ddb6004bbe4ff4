"""Access to a server: keys, addresses and names of this machine."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from myna.core.errors import ConfigError
from myna.serve.context import ServerSettings
from myna.serve.messages import EngineSettings
from myna.serve.ray_server import settings_of_arguments
from myna.serve.server import OPEN_PATHS, RequestGuard, bind, create_app, local_hosts
from tests.command_line import run_command
from tests.serve.stub_engine import stub_server

ENGINE = EngineSettings("fledgling")


def pass_guard(scope: dict[str, Any]) -> int:
    """Return the status of a guard with a key, for a request without one; 200 if it lets the request through."""
    sent: list[dict[str, Any]] = []

    async def app(*_: Any) -> None:
        sent.append({"status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    guard = RequestGuard(app, hosts=frozenset(), api_key="secret", observe=lambda *_: None)
    known = {"method": "GET", "headers": [], "extensions": {"websocket.http.response": {}}}
    asyncio.run(guard(known | scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize("prefix", ["", "/speech", "/a/b"])
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_no_prefix_of_a_proxy_gets_around_the_key(prefix: str, kind: str) -> None:
    """Ray leaves its `route_prefix` in the path."""
    for path in ("/v1/models", "/v1/audio/speech", "/v1/audio/speech/stream", "/new", "", "//health", "/health/"):
        scope = {"type": kind, "path": prefix + path, "root_path": prefix}
        assert pass_guard(scope) == 401, path
    assert pass_guard({"type": kind, "path": f"{prefix}/health", "root_path": prefix}) == 200
    assert pass_guard({"type": kind, "path": "/speech/health", "root_path": ""}) == 401
    assert pass_guard({"type": kind, "path": "/health", "root_path": "/"}) == 200
    assert pass_guard({"type": kind, "path": "/v1/models", "root_path": "/"}) == 401


def test_every_route_but_pages_and_monitoring_asks_for_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with stub_server(tmp_path, monkeypatch, api_key="secret") as (context, web):
            known = create_app(context).openapi()["paths"]
            paths = {(method, path) for path, methods in known.items() for method in methods}
            assert len(paths) > 15
            for method, path in {*paths, *(("get", path) for path in OPEN_PATHS)}:
                status = (await web.request(method.upper(), path)).status_code
                assert (status == 401) != (path in OPEN_PATHS), (method, path, status)
            assert (await web.get("/v1/models", headers={"authorization": "Bearer secret"})).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize("open_to_others", [{"host": "0.0.0.0"}, {"host": "speech.local"}, {"allowed_hosts": ("a.b",)}])
def test_a_server_for_other_machines_needs_a_key(open_to_others: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="everybody who can reach") as caught:
        ServerSettings(ENGINE, **open_to_others)
    assert "MYNA_API_KEY" in caught.value.hint and "--no-api-key" in caught.value.hint
    ServerSettings(ENGINE, **open_to_others, api_key="secret")
    ServerSettings(ENGINE, **open_to_others, no_api_key=True)
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        ServerSettings(ENGINE, host=host)


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="the API key is empty"):
        ServerSettings(ENGINE, api_key=key)


def test_the_command_refuses_other_machines_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MYNA_API_KEY", raising=False)
    command = ["serve", "fledgling", "--port", "0", "--allow-host", "speech.example.com"]
    error = run_command(command, catch=True).exception
    assert isinstance(error, ConfigError) and "--no-api-key" in error.hint
    monkeypatch.setenv("MYNA_API_KEY", "")
    assert "is empty" in str(run_command(command, catch=True).exception)


def test_a_ray_worker_without_the_key_in_its_environment_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process than `serve run` builds the application on an existing cluster."""
    monkeypatch.delenv("MYNA_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="without an API key"):
        settings_of_arguments({"sources": ["fledgling"]})
    with pytest.raises(ConfigError, match="the API key is empty"):
        settings_of_arguments({"sources": ["fledgling"], "api_key": ""})
    assert settings_of_arguments({"sources": ["fledgling"], "api_key": "own"}).api_key == "own"
    assert settings_of_arguments({"sources": ["fledgling"], "no_api_key": True}).api_key is None


def test_folders_of_a_ray_file_are_paths() -> None:
    arguments = {"api_key": "own", "voices": "/voices", "adapter_folders": ["/runs"]}
    settings = settings_of_arguments({"sources": ["fledgling"], **arguments})
    assert settings.voices == Path("/voices") and settings.adapter_folders == (Path("/runs"),)
    with pytest.raises(ConfigError, match=r"Ray argument engine\.rows"):
        settings_of_arguments({"sources": ["fledgling"], "api_key": "own", "rows": "many"})


def test_a_server_answers_to_its_address_and_without_the_port_that_clients_leave_out() -> None:
    assert "127.0.0.2:8000" in local_hosts("127.0.0.2", 8000)
    assert {"localhost", "127.0.0.1", "localhost:80"} <= local_hosts("127.0.0.1", 80)
    assert "localhost" not in local_hosts("127.0.0.1", 8000)


def test_two_servers_on_windows_do_not_share_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """There SO_REUSEADDR lets a second one listen on the port of the first."""
    options = []

    class Listener(socket.socket):
        def setsockopt(self, *option: Any) -> None:
            options.append(option[1])

    monkeypatch.setattr(socket, "socket", Listener)
    monkeypatch.setattr(socket, "SO_EXCLUSIVEADDRUSE", -5, raising=False)
    monkeypatch.setattr("sys.platform", "win32")
    bind("127.0.0.1", 0).close()
    assert options == [-5]
