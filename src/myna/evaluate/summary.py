"""Rows as figures: each with its interval, against the base on the same lines, and by speaker, language and length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from myna.evaluate.diagnostics import Diagnosis, diagnose
from myna.evaluate.metrics import METRICS, Metric
from myna.evaluate.pipeline import SystemScores
from myna.evaluate.scorers import Scorers
from myna.evaluate.scoring import ItemScores
from myna.evaluate.systems import BASE, REAL, ROUND_TRIP
from myna.statistics import Estimate, difference, estimate

GROUPED = ("wer", "cer", "similarity", "similarity_rank1", "distillmos", "stop_rate", "early_rate")
"""Figures of parts of the lines."""
GROUPS: Mapping[str, Callable[[ItemScores], str]] = {
    "speaker": lambda row: row.speaker or "unnamed",
    "language": lambda row: row.language or "unnamed",
    "length": lambda row: {"word": "one word", "line": "usual", "long": "very long"}[row.kind],
}
Figures = dict[str, Estimate]


@dataclass(frozen=True, slots=True)
class Summary:
    judged: SystemScores
    ears: Scorers
    primary: str
    """The system that this is about."""
    about: Mapping[str, Mapping[str, Any]]
    systems: dict[str, Figures]
    deltas: dict[str, Figures]
    """Of each model against the base, on the lines that both said."""
    groups: dict[str, dict[str, dict[str, Figures]]]
    """By kind of group, group and system."""
    faults: list[Diagnosis]
    missing: dict[str, str]
    """Columns that could not be measured, and why."""
    asked: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        def plain(figures: Figures) -> dict[str, Any]:
            return {key: value.to_json() for key, value in figures.items()}

        return {
            "model": self.primary,
            "asked": dict(self.asked),
            "lines": len(self.judged.plan.tasks),
            "systems": {name: plain(figures) for name, figures in self.systems.items()},
            "deltas": {name: plain(figures) for name, figures in self.deltas.items()},
            "groups": {
                kind: {group: {name: plain(figures) for name, figures in of.items()} for group, of in groups.items()}
                for kind, groups in self.groups.items()
            },
            "faults": [fault.to_json() for fault in self.faults],
            "missing": self.missing,
            "ears": dict(self.ears.names),
            "about": {name: dict(told) for name, told in self.about.items()},
            "notes": list(self.judged.plan.notes),
        }


def summarise(
    judged: SystemScores,
    ears: Scorers,
    primary: str,
    about: Mapping[str, Mapping[str, Any]],
    *,
    asked: Mapping[str, Any] | None = None,
) -> Summary:
    rows = judged.rows
    systems = {name: figures_of(heard) for name, heard in rows.items()}
    deltas = {
        name: differences(heard, rows[BASE])
        for name, heard in rows.items()
        if BASE in rows and name not in (BASE, REAL, ROUND_TRIP)
    }
    return Summary(
        judged=judged,
        ears=ears,
        primary=primary,
        about=about,
        systems=systems,
        deltas=deltas,
        groups={kind: _groups(rows, group_of) for kind, group_of in GROUPS.items()},
        faults=diagnose(rows, systems, deltas, about),
        missing=_missing(judged, ears, systems),
        asked=asked or {},
    )


def figures_of(rows: Sequence[ItemScores]) -> Figures:
    return {column.key: _of(column, rows) for column in METRICS}


def differences(rows: Sequence[ItemScores], base: Sequence[ItemScores]) -> Figures:
    """On the lines that both have said."""
    return {column.key: _against(column, rows, base) for column in METRICS}


def _of(column: Metric, rows: Sequence[ItemScores]) -> Estimate:
    return estimate([part for row in rows if (part := column.part(row)) is not None])


def _against(column: Metric, rows: Sequence[ItemScores], base: Sequence[ItemScores]) -> Estimate:
    known = {row.id: column.part(row) for row in base}
    pairs = [(one, other) for row in rows if (one := column.part(row)) and (other := known.get(row.id))]
    return difference([one for one, _ in pairs], [other for _, other in pairs])


def _groups(
    rows: Mapping[str, Sequence[ItemScores]], group_of: Callable[[ItemScores], str]
) -> dict[str, dict[str, Figures]]:
    """Nothing where there is but one group, which would only say again what all lines say."""
    names = sorted({group_of(row) for heard in rows.values() for row in heard})
    if len(names) < 2:
        return {}
    columns = [column for column in METRICS if column.key in GROUPED]
    return {
        name: {
            system: {column.key: _of(column, [row for row in heard if group_of(row) == name]) for column in columns}
            for system, heard in rows.items()
        }
        for name in names
    }


def _missing(judged: SystemScores, ears: Scorers, systems: Mapping[str, Figures]) -> dict[str, str]:
    found = {}
    for column in METRICS:
        if column.ear in ears.missing:
            found[column.key] = ears.missing[column.ear]
        elif not any(figures[column.key].n for figures in systems.values()):
            found[column.key] = {
                "similarity": "no line has a recording of its speaker",
                "similarity_rank1": "there is only one speaker to choose from",
                "similarity_to_others": "there is only one speaker",
            }.get(column.key, "no line can tell")
    if REAL in judged.rows and not judged.rows[REAL]:
        found[REAL] = "these lines have no recordings; give --data with what was really said"
    return found
