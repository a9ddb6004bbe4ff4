"""Examples of deployment: everything that they name exists."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from myna.commands import build_app
from myna.core.errors import ConfigError, MynaError
from myna.serve.context import ServerContext, ServerSettings
from myna.serve.messages import EngineSettings
from myna.serve.ray_server import settings_of_arguments
from myna.serve.server import create_app
from tests.command_line import run_command

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ARGUMENTS = build_app(["serve"])["serve"].assemble_argument_collection()
OPTIONS = {name for argument in ARGUMENTS for name in (*argument.names, *argument.negatives)}


@pytest.fixture
def routes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.setenv("MYNA_HOME", str(tmp_path))
    server = create_app(ServerContext(ServerSettings(EngineSettings("fledgling"))))
    return set(server.openapi()["paths"])


def instructions() -> list[tuple[str, str]]:
    """The container file's instructions with their arguments."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


@pytest.mark.parametrize("name", ["Containerfile", "nginx.conf", "kserve.yaml", "ray.yaml"])
def test_options_are_those_of_the_command(name: str) -> None:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    own = re.findall(r"myna serve[^\n]*|ENTRYPOINT[^\n]*|args: \[[^\n]*", text)
    used = {option for line in own for option in re.findall(r"--[a-z-]+", line)}
    assert used and used <= OPTIONS


@pytest.mark.parametrize("name", ["Containerfile", "nginx.conf", "kserve.yaml", "ray.yaml"])
def test_every_example_sets_a_key(name: str) -> None:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    assert "--no-api-key" not in text
    for command in re.finditer(r"myna serve|podman run|serve run", text):
        assert "MYNA_API_KEY" in text[: command.end() + 100] or "api_key" in text, command[0]
    assert "MYNA_API_KEY" in text


def test_the_container_file_names_what_there_is(routes: set[str]) -> None:
    given = dict(instructions())
    assert len([name for name, _ in instructions() if name == "FROM"]) == 1 and next(iter(given)) == "FROM"
    version = re.search(r"python:(3\.\d+)", given["FROM"])
    assert version and version[1] in ("3.11", "3.12", "3.13")
    for sources in (text.split()[:-1] for name, text in instructions() if name == "COPY"):
        assert all((ROOT / source).exists() for source in sources)
    installs = next(text for name, text in instructions() if name == "RUN" and "pip install" in text)
    extras = re.search(r'"\.\[(.*)\]"', installs)
    assert extras and set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])
    command, subcommand, *arguments = json.loads(given["ENTRYPOINT"])
    assert command in PROJECT["scripts"] and subcommand == "serve"
    port = arguments[arguments.index("--port") + 1]
    check = json.loads(given["HEALTHCHECK"].split("CMD ", 1)[1])
    compile(check[2], "HEALTHCHECK", "exec")
    probed = re.search(rf"http://127\.0\.0\.1:{port}(/\w+)", check[2])
    assert given["EXPOSE"] == port and probed and probed[1] in routes
    variables = dict(pair.split("=") for pair in shlex.split(given["ENV"]))
    source = (ROOT / "src" / "myna" / "core" / "io.py").read_text(encoding="utf-8")
    assert '"MYNA_HOME"' in source and variables["MYNA_HOME"] == given["VOLUME"]
    assert json.loads(given["CMD"]) == ["fledgling"]


def test_the_container_of_kubernetes_listens_where_it_is_probed(routes: set[str]) -> None:
    service: Any = yaml.safe_load((DEPLOY / "kserve.yaml").read_text(encoding="utf-8"))
    container = service["spec"]["predictor"]["containers"][0]
    port = container["ports"][0]["containerPort"]
    assert f'"--port", "{port}"' in (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == port
        assert container[probe]["httpGet"]["path"] in routes
    drain = float(container["args"][container["args"].index("--drain-seconds") + 1])
    assert service["spec"]["predictor"]["terminationGracePeriodSeconds"] > drain
    assert container["args"][0] in [mount["mountPath"] for mount in container["volumeMounts"]]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in service["spec"]["predictor"]["volumes"]}
    variables = {name for argument in ARGUMENTS for name in argument.parameter.env_var or ()}
    assert {one["name"] for one in container["env"]} <= variables


def test_arguments_of_ray_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    application = yaml.safe_load((DEPLOY / "ray.yaml").read_text(encoding="utf-8"))["applications"][0]
    module, function = application["import_path"].split(":")
    assert f"def {function}(" in (ROOT / "src" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    monkeypatch.setenv("MYNA_API_KEY", "secret")
    arguments = application["args"] | {"sources": ["fledgling"]}
    del arguments["deployment"]
    with pytest.raises(ConfigError, match="API key is empty"):
        settings_of_arguments(dict(arguments))
    del arguments["api_key"]
    settings = settings_of_arguments(dict(arguments))
    assert (settings.engine.rows, settings.drain_seconds, settings.api_key) == (64, 60, "secret")
    with pytest.raises(ConfigError, match="not known: rowz"):
        settings_of_arguments(arguments | {"rowz": 1})
    with pytest.raises(ConfigError, match="needs sources"):
        settings_of_arguments({})


def test_the_command_takes_as_many_streams_as_were_measured() -> None:
    """Options are checked before the model is opened."""
    measured = json.loads((ROOT / "docs/benchmarks/serve.json").read_text(encoding="utf-8"))
    words = measured["settings"]["serve_options"]
    streams = words[words.index("--streams") + 1]
    assert int(streams) >= measured["streams"]["most_listeners"]
    error = run_command(["serve", "./nowhere", "--port", "0", "--streams", streams], catch=True).exception
    assert isinstance(error, MynaError) and "nowhere" in str(error)


@pytest.mark.parametrize("option", [("--replicas", "2"), ("--haproxy",)])
def test_options_of_ray_are_refused_without_it(option: tuple[str, ...]) -> None:
    error = run_command(["serve", "fledgling", *option], catch=True).exception
    assert isinstance(error, ConfigError) and "--ray auto" in error.hint
