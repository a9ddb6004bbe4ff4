"""Checks of a Ray cluster: equal software and models on all nodes, and a shared folder."""

import platform
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from myna.core.check import Check
from myna.core.errors import MynaError
from myna.core.io import absolute_folder, atomic_write, bytes_hash, curation_models_folder, file_hash, fsync
from myna.core.pools import connect_cluster

SHARED_FACTS = ("python", "transformers", "myna", "codec")
"""Facts that must be equal on this machine as well. Its torch may be a CPU build, since it only shares out work."""
HINTS = {
    "node": "`ray start` there within the environment of Myna; /tmp/ray/session_latest/logs on that node say more",
    "python": "make every environment with the same Python: python3.12 -m venv FOLDER, and install Myna there",
    "torch": "pip install --constraint constraints.txt torch, on every node",
    "transformers": "pip install --constraint constraints.txt transformers, on every node",
    "myna": "install the same Myna on every node, or one environment on a shared disk; then start Ray again",
    "curation models": "copy one folder of models to every node, under the same path, or put it on a shared disk",
    "recogniser": "copy one Whisper to every node, under the same path, and name its folder: --asr /path/to/whisper",
    "codec": "copy one model to every node, under the same path, and name its folder: --model /path/to/model",
}
"""Hints for differences between nodes, by fact."""
NODE_SECONDS = 300.0
"""Seconds for a node to answer: the first call starts a process there and imports torch, perhaps from a slow disk."""
SHARED_SECONDS = 10.0
"""Seconds in which the other nodes must see a file that one node has written."""
HERE = "here"

NodeFacts = dict[str, str]
"""Values that should be equal on all nodes, by name."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Resources of a node of a cluster, and the facts found on it."""

    name: str
    cpus: int
    gpus: int
    facts: NodeFacts


def check_cluster(
    address: str, *, shared: Path | None = None, model: str | None = None, asr: str | None = None
) -> tuple[list[NodeReport], list[Check]]:
    """Compare the nodes of a cluster with one another and with this machine. Nothing is changed on them.

    `model` adds its codec to the comparison, `asr` the recogniser of `myna curate`. `shared` must be one folder on all
    nodes.
    """
    from myna.models import is_model_name

    cluster = connect_cluster(address)
    nodes = {}
    for node in cluster.nodes():
        resources = node["Resources"]
        if node["Alive"] and resources.get("CPU", 0):
            name = f"{node['NodeManagerHostname']} {node['NodeID'][:6]}"  # there may be two on one machine
            nodes[node["NodeID"]] = NodeReport(name, int(resources["CPU"]), int(resources.get("GPU", 0)), {})
    if not nodes:
        hint = "add nodes to it: ray start --address=HEAD:6379"
        return [], [Check("nodes", "failed", f"the cluster at {address} has no CPUs", hint)]
    reports = sorted(nodes.values(), key=lambda node: node.name)
    call = partial(_call_on_nodes, cluster, sorted(nodes, key=lambda id: nodes[id].name))
    total = f"{sum(node.cpus for node in reports)} CPUs and {sum(node.gpus for node in reports)} GPUs"
    checks = [Check("nodes", "passed", f"{len(reports)} with {total}")]
    sources = [one if one is None or is_model_name(one) else absolute_folder(one) for one in (model, asr)]
    models = curation_models_folder().absolute()
    for node, answer in zip(reports, call(node_facts, models, *sources), strict=True):
        if isinstance(answer, dict):
            node.facts.update(answer)
        else:
            checks.append(Check(f"node {node.name}", "failed", answer, HINTS["node"]))
    here = NodeReport(HERE, 0, 0, node_facts(models, *sources))
    checks += compare_nodes(here, [report for report in reports if report.facts])
    if shared is None:
        hint = f"myna doctor --ray {address} --shared DIR"
        checks.append(Check("shared folder", "warning", "not looked at", hint))
    else:
        checks.append(check_shared_folder(shared.absolute(), [node.name for node in reports], call))
    return reports, checks


def compare_nodes(here: NodeReport, nodes: Sequence[NodeReport]) -> list[Check]:
    """Compare the facts of the nodes, and the `SHARED_FACTS` of this machine."""
    names = dict.fromkeys(name for report in (here, *nodes) for name in report.facts)
    checks = [_compare(name, [here, *nodes] if name in SHARED_FACTS else nodes) for name in names if nodes]
    for node in nodes:
        if node.gpus and node.facts["torch"].endswith("CPU build"):
            detail = f"{node.name} has {node.gpus}, and a torch that cannot use them"
            hint = "pip install torch there, in the build that https://pytorch.org/get-started names for the GPU"
            checks.append(Check("GPUs", "failed", detail, hint))
    return checks


def node_facts(models: Path, model: str | None, asr: str | None) -> NodeFacts:
    """Return the facts of the machine that this runs on. `models` is the folder of the models of `myna curate`."""
    import torch

    from myna.curate.models import NO_ASR, CurationModels
    from myna.curate.settings import ListenSettings
    from myna.listen.asr import ASR
    from myna.models import open_family

    def value_or_problem(value: Callable[[], str]) -> str:
        try:
            return value() or "none"
        except MynaError as error:
            return f"cannot be opened: {error.what}"

    def curation_models() -> str:
        networks = CurationModels.open(ListenSettings(asr=NO_ASR, models=str(models)))
        return ", ".join(sorted(f"{name} {version}" for name, version in networks.versions.items()))

    package = Path(__file__).parents[1]
    source = bytes_hash("".join(file_hash(file) for file in sorted(package.rglob("*.py"))).encode())
    facts = {
        "python": platform.python_version(),
        "torch": f"{torch.__version__}{'' if torch.version.cuda or torch.version.hip else ', CPU build'}",
        "transformers": metadata.version("transformers"),
        "myna": f"{metadata.version('myna')} {source[:8]}",
        "curation models": value_or_problem(curation_models),
    }
    if asr is not None:
        facts["recogniser"] = value_or_problem(lambda: ASR.open(asr).name)
    if model is not None:
        facts["codec"] = value_or_problem(lambda: open_family(model).load_encoder().revision[:16])
    return facts


def _compare(name: str, reports: Sequence[NodeReport]) -> Check:
    first, *others = reports
    value = first.facts[name]
    for other in others:
        if other.facts.get(name) != value:
            first_place, other_place = (HERE if one.name == HERE else f"on {one.name}" for one in (first, other))
            detail = f"{value} {first_place}, and {other.facts.get(name)} {other_place}"
            return Check(name, "failed", detail, HINTS[name])
    if value.startswith("cannot be opened"):
        return Check(name, "failed", value, HINTS[name])
    absent = "none on any node: myna setup curation, for `myna curate`"
    return Check(name, "passed", absent if value == "none" else value)


def _call_on_nodes(ray: Any, nodes: Sequence[str], function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function on all nodes at the same time; the answer of a node that fails is the reason as a string."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0, max_retries=0)(function)
    calls = [
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*arguments)
        for node in nodes
    ]
    ray.wait(calls, num_returns=len(calls), timeout=NODE_SECONDS)
    answers: list[Any] = []
    for call in calls:
        try:
            answers.append(ray.get(call, timeout=0))
        except ray.exceptions.GetTimeoutError:
            answers.append(f"no answer within {NODE_SECONDS:g} s")
        except ray.exceptions.RayError as error:
            answers.append(str(error).strip().splitlines()[-1])
    return answers


def check_shared_folder(folder: Path, names: Sequence[str], call: Callable[..., list[Any]]) -> Check:
    """Let every node write a file, which all others have to see under its final name."""
    content = uuid.uuid4().hex
    mount = f"mount the same folder at {folder} on every node, writable, then: myna doctor --ray ADDRESS --shared DIR"
    written = call(write_shared, folder, content)
    try:
        for name, file in zip(names, written, strict=True):
            if not isinstance(file, Path):
                return Check("shared folder", "failed", f"{name} cannot write to {folder}: {file}", mount)
        for name, missing in zip(names, call(unseen_files, written, content), strict=True):
            if missing:
                if isinstance(missing, str):  # there was no answer
                    return Check("shared folder", "failed", f"{name}: {missing}", mount)
                writer = names[written.index(missing[0])]
                detail = f"{name} does not see in {folder} what {writer} has written"
                return Check("shared folder", "failed", detail, mount)
    finally:
        call(remove_shared, [file for file in written if isinstance(file, Path)])
    return Check("shared folder", "passed", f"{folder}: what one node writes, all others see")


def write_shared(folder: Path, content: str) -> Path | str:
    """Write a file as workers write their results; return it, or the reason why that failed."""
    path = folder / f".{uuid.uuid4().hex[:12]}.tmp"
    try:
        if not folder.is_dir():
            return "there is no such folder"
        with atomic_write(path) as temporary:
            temporary.write_text(content, encoding="utf-8")
            fsync(temporary)
    except OSError as error:
        return error.strerror or str(error)
    return path


def unseen_files(paths: Sequence[Path], content: str) -> list[Path]:
    """Return the files that do not appear on this node in time with this content."""
    deadline = time.monotonic() + SHARED_SECONDS
    while (unseen := [path for path in paths if not _holds(path, content)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return unseen


def _holds(path: Path, content: str) -> bool:
    try:
        return path.read_text(encoding="utf-8") == content
    except OSError:
        return False


def remove_shared(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
