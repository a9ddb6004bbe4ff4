"""`myna doctor --ray`: nodes that are alike, and each thing in which they may differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from myna.checks import cluster
from myna.checks.cluster import NodeReport, check_shared_folder, compare_nodes, node_facts
from myna.commands.doctor import show_nodes
from myna.models import save_tiny_model
from tests.command_line import run_command

FACTS = {"python": "3.11.2", "torch": "2.13.0", "transformers": "5.17", "myna": "1 ab", "curation models": "none"}


def report(name: str, gpus: int = 0, **facts: str) -> NodeReport:
    return NodeReport(name, 4, gpus, FACTS | {key.replace("_", " "): value for key, value in facts.items()})


def test_nodes_that_are_alike() -> None:
    checks = compare_nodes(report("here"), [report("a"), report("b", gpus=1)])
    assert {check.status for check in checks} == {"passed"} and len(checks) == len(FACTS)


@pytest.mark.parametrize("name", ["python", "torch", "myna", "curation_models"])
def test_each_difference_is_named(name: str) -> None:
    checks = compare_nodes(report("here"), [report("a"), report("b", 0, **{name: "another"})])
    [failed] = [check for check in checks if check.status == "failed"]
    assert failed.name == name.replace("_", " ")
    assert failed.message.endswith("and another on b") and failed.hint


def test_this_machine_needs_the_software_but_no_models() -> None:
    alike = [report("a", curation_models="music 12"), report("b", curation_models="music 12")]
    assert {check.status for check in compare_nodes(report("here"), alike)} == {"passed"}
    [failed] = [check for check in compare_nodes(report("here", myna="1 cd"), alike) if check.status == "failed"]
    assert failed.message == "1 cd here, and 1 ab on a"


def test_unreadable_models_and_gpus_without_a_cuda_build_fail() -> None:
    broken = "cannot be opened: no such model"
    checks = compare_nodes(report("here", codec=broken), [report("a", codec=broken)])
    assert [check.message for check in checks if check.status == "failed"] == [broken]
    cpu = "2.13.0, CPU build"
    checks = compare_nodes(report("here", torch=cpu), [report("a", gpus=2, torch=cpu)])
    assert [check.message for check in checks if check.status == "failed"] == [
        "a has 2, and a torch that cannot use them"
    ]


def two_disks(shared: Path, own: Path) -> Callable[..., list[Any]]:
    """Calls on two nodes, for the second of which `shared` is a folder of its own."""

    def moved(value: Any, source: Path, target: Path) -> Any:
        if isinstance(value, list):
            return [moved(one, source, target) for one in value]
        return target / value.relative_to(source) if isinstance(value, Path) else value

    def call(function: Callable[..., Any], *arguments: Any) -> list[Any]:
        elsewhere = function(*(moved(one, shared, own) for one in arguments))
        return [function(*arguments), moved(elsewhere, own, shared)]

    return call


def test_a_folder_that_is_shared_and_one_that_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "SHARED_SECONDS", 0.2)
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    assert check_shared_folder(one, ["a", "b"], two_disks(one, one)).status == "passed"
    check = check_shared_folder(one, ["a", "b"], two_disks(one, other))
    assert check.status == "failed" and check.message == f"b cannot write to {one}: there is no such folder"
    other.mkdir()
    check = check_shared_folder(one, ["a", "b"], two_disks(one, other))
    assert check.status == "failed" and check.message == f"a does not see in {one} what b has written"
    assert str(one) in check.hint
    assert not list(one.iterdir()) and not list(other.iterdir()), "nothing is left behind"


def test_facts_of_this_machine(tmp_path: Path) -> None:
    facts = node_facts(tmp_path, str(save_tiny_model(tmp_path / "model")), None)
    assert list(facts) == [*FACTS, "codec"] and facts["curation models"] == "none" and len(facts["codec"]) == 16
    assert node_facts(tmp_path, "./nowhere", None)["codec"].startswith("cannot be opened: ")


def test_the_table_of_nodes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    show_nodes([report("a", codec="12 and a name that is long"), NodeReport("b", 1, 0, {})])
    header, first, second = capsys.readouterr().out.splitlines()
    assert "12 and" not in first and len(first.split()[-1]) == 8, "what is long is hashed"
    assert header.split()[:4] == ["node", "CPUs", "GPUs", "python"]
    assert first.split()[:4] == ["a", "4", "0", "3.11.2"] and second.split()[:4] == ["b", "1", "0", "-"]


def test_a_shared_folder_needs_a_cluster() -> None:
    result = run_command(["doctor", "--shared", "."], catch=True)
    assert result.exit_code == 1 and "--ray" in getattr(result.exception, "hint", "")


@pytest.mark.extras
@pytest.mark.timeout(900)
class TestCluster:
    """Two real nodes of one machine."""

    @pytest.fixture(scope="class")
    def address(self) -> Iterator[str]:
        from tests.ray_nodes import ray_nodes

        with ray_nodes(2) as cluster:
            yield cluster.address

    def test_nodes_of_one_machine_are_alike(self, address: str, tmp_path: Path) -> None:
        model = save_tiny_model(tmp_path / "model")
        words = ["doctor", "--ray", address, "--shared", str(tmp_path), "--model", str(model), "--json"]
        result = run_command(words, catch=True)
        assert result.exit_code == 0, result.output
        tree = json.loads(result.stdout)
        assert len(tree["nodes"]) == 2 and all(node["cpus"] == 1 for node in tree["nodes"])
        statuses = {check["name"]: check["status"] for check in tree["checks"]}
        assert statuses["shared folder"] == statuses["codec"] == statuses["myna"] == "passed"

    def test_a_folder_that_is_not_there_fails(self, address: str, tmp_path: Path) -> None:
        result = run_command(["doctor", "--ray", address, "--shared", str(tmp_path / "none")], catch=True)
        assert result.exit_code == 1
        assert "there is no such folder" in " ".join(result.output.split())
