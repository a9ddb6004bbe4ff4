"""Examples of deployment: what they name exists."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from myna.cli import app
from myna.serve.messages import EngineSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
OPTIONS = {
    name
    for parameter in typer.main.get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    for name in parameter.opts
}


@pytest.mark.parametrize("name", ["Containerfile", "nginx.conf", "kserve.yaml"])
def test_options_are_those_of_the_command(name: str) -> None:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    own = re.findall(r"myna serve[^\n]*|ENTRYPOINT[^\n]*|args: \[[^\n]*", text)
    used = {option for line in own for option in re.findall(r"--[a-z-]+", line)}
    assert used and used <= OPTIONS


def test_the_container_of_kubernetes_listens_where_it_is_probed() -> None:
    service: Any = yaml.safe_load((DEPLOY / "kserve.yaml").read_text(encoding="utf-8"))
    container = service["spec"]["predictor"]["containers"][0]
    port = container["ports"][0]["containerPort"]
    assert f'"--port", "{port}"' in (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == port
    drain = float(container["args"][container["args"].index("--drain-seconds") + 1])
    assert service["spec"]["predictor"]["terminationGracePeriodSeconds"] > drain


def test_arguments_of_ray_are_known() -> None:
    application = yaml.safe_load((DEPLOY / "ray.yaml").read_text(encoding="utf-8"))["applications"][0]
    module, function = application["import_path"].split(":")
    source = Path(__file__).parents[2] / "src" / f"{module.replace('.', '/')}.py"
    assert f"def {function}(" in source.read_text(encoding="utf-8")
    known = {field.name for field in fields(EngineSettings)} | {"sources", "deployment"}
    assert set(application["args"]) <= known
