"""`myna doctor` and `myna version`."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from myna.commands.command import command
from myna.commands.display import console
from myna.commands.options import Json, PathLike, option
from myna.core.errors import ConfigError
from myna.core.io import bytes_hash

if TYPE_CHECKING:
    from myna.checks.cluster import NodeReport
    from myna.core.check import Check

STATUS_MARKS = {"passed": ("✓", "+", "green"), "warning": ("!", "!", "yellow"), "failed": ("✗", "x", "red")}
"""Mark of each status, its form in ASCII for terminals that have no more, and its colour."""
MAX_CELL_CHARACTERS = 21
"""Longest fact in the table of a cluster's nodes; of longer ones a hash is shown."""


def doctor(
    model: Annotated[str | None, option("Hub name or folder of a model to check.", "-m")] = None,
    *,
    ray: Annotated[str | None, option("Compare the nodes of the Ray cluster at this address, or auto.")] = None,
    shared: Annotated[PathLike | None, option("With `ray`: a folder that all nodes have to share.")] = None,
    asr: Annotated[str | None, option("With `ray`: the recogniser of `myna curate`, to compare as well.")] = None,
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
    from myna.checks.cluster import check_cluster
    from myna.checks.doctor import run_doctor

    if ray is not None:
        nodes, checks = check_cluster(ray, shared=Path(shared) if shared is not None else None, model=model, asr=asr)
        return nodes, iter(checks)
    if shared is not None or asr is not None:
        raise ConfigError("`shared` and `asr` are for a cluster", hint="name it: --ray auto, or --ray HEAD:6379")
    return (), run_doctor(model)


@command("doctor", doctor, example="myna doctor --model fledgling")
def _(call: partial[list[Check]], *, as_json: Json = False) -> int:
    nodes, checks = _checks(**call.keywords)
    if as_json:
        shown = list(checks)
        found: dict[str, Any] = {"nodes": [asdict(node) for node in nodes]} if nodes else {}
        print(json.dumps(found | {"checks": [asdict(check) for check in shown]}, indent=2))
    else:
        if nodes:
            show_nodes(nodes, console())
        shown = show_checks(checks, console())
    return 1 if any(check.status == "failed" for check in shown) else 0


@command("version", example="myna version")
def _() -> None:
    """Print the version of Myna."""
    from myna import __version__

    print(__version__)


def show_checks(checks: Iterator[Check], console: Console) -> list[Check]:
    """Print each check as it is done, with its hint below."""
    if isinstance(console.file, io.TextIOWrapper):
        console.file.reconfigure(errors="replace")  # an old encoding is no reason to stop
    shown = []
    for check in checks:
        mark, plain, colour = STATUS_MARKS[check.status]
        line = Table.grid(padding=(0, 1))
        line.add_column(width=1)
        line.add_column(width=22)
        line.add_column(overflow="fold")
        mark = mark if console.encoding.startswith("utf") else plain
        line.add_row(Text(mark, colour), Text(check.name, "bold"), Text(check.message))
        if check.hint:
            line.add_row("", "", Text(f"→ {check.hint}", colour))
        console.print(line)
        shown.append(check)
    return shown


def show_nodes(nodes: Sequence[NodeReport], console: Console) -> None:
    """Print the nodes of a cluster side by side. The checks name the differences."""
    facts = list(dict.fromkeys(name for node in nodes for name in node.facts))
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("node", "CPUs", "GPUs", *facts):
        table.add_column(title, overflow="fold")
    for node in nodes:
        cells = [node.facts.get(name, "-") for name in facts]
        # A hash of a long fact shows whether it is the same everywhere.
        short = [one if len(one) <= MAX_CELL_CHARACTERS else bytes_hash(one.encode())[:8] for one in cells]
        table.add_row(node.name, str(node.cpus), str(node.gpus), *short)
    console.print(table)
