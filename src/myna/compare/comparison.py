"""Systems side by side: the lines that all of them said, figures against the first, and pairs to hear blindly."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from myna.compare.preferences import Preferences, Trial
from myna.data.hash_rng import hash_of
from myna.errors import DataError
from myna.evaluate.metrics import METRICS
from myna.evaluate.scoring import ItemScores
from myna.evaluate.summary import Figures, differences, figures_of
from myna.io import bytes_hash

ID = 16
"""Characters of a name that tells nothing."""


@dataclass(frozen=True, slots=True)
class ComparedSystem:
    """One system: what it said, and the folder in which its sounds lie."""

    name: str
    rows: Sequence[ItemScores]
    folder: Path


@dataclass(frozen=True, slots=True)
class Comparison:
    sides: tuple[ComparedSystem, ...]
    """On the same lines in the same order; the others are measured against the first."""
    real: ComparedSystem | None
    """The recordings of those lines, as far as there are some."""
    trials: tuple[Trial, ...]
    figures: dict[str, Figures]
    deltas: dict[str, Figures]
    missing: dict[str, str]
    """Columns that cannot be compared, and why."""
    notes: tuple[str, ...]
    asked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [side.name for side in self.sides]

    @property
    def id(self) -> str:
        """Another one for other sounds: answers to one are none to the other."""
        return bytes_hash(repr([trial.id for trial in self.trials]).encode())[:ID]

    def to_json(self, preferences: Preferences) -> dict[str, Any]:
        def plain(figures: Figures) -> dict[str, Any]:
            return {key: value.to_json() for key, value in figures.items()}

        return {
            "comparison": self.id,
            "names": self.names,
            "asked": dict(self.asked),
            "lines": len(self.sides[0].rows),
            "systems": {name: plain(figures) for name, figures in self.figures.items()},
            "deltas": {name: plain(figures) for name, figures in self.deltas.items()},
            "missing": self.missing,
            "notes": list(self.notes),
            "trials": [trial.to_json() for trial in self.trials],
            "preferences": preferences.to_json(),
        }


def compare_sides(
    sides: Sequence[ComparedSystem],
    real: ComparedSystem | None,
    *,
    seed: int,
    listen: int,
    missing: Mapping[str, str] | None = None,
    asked: Mapping[str, Any] | None = None,
) -> Comparison:
    """Lines that all sides said, `listen` of which are to be heard; `missing` says which ears were not there."""
    kept, notes = same_lines(sides)
    ids = [row.id for row in kept[0].rows]
    if real is not None:
        of = {row.id: row for row in real.rows}
        real = ComparedSystem(real.name, [of[id] for id in ids if id in of], real.folder)
    shown = [*([real] if real is not None and real.rows else []), *kept]
    different = _heard_by_different_ears(shown)
    trials, equal = _trials(kept, seed, listen)
    for (one, other), count in equal.items():
        notes.append(f"{one} and {other} say {count} lines with the very same sound; they are not asked about")
    return Comparison(
        sides=tuple(kept),
        real=real if real is not None and real.rows else None,
        trials=tuple(trials),
        figures={side.name: _without(figures_of(side.rows), different) for side in shown},
        deltas={
            side.name: _without(differences(side.rows, kept[0].rows), different)
            for side in shown
            if side.name != kept[0].name
        },
        missing={**(missing or {}), **different},
        notes=tuple(notes),
        asked=asked or {},
    )


def same_lines(sides: Sequence[ComparedSystem]) -> tuple[list[ComparedSystem], list[str]]:
    """Each side with the lines that all have, known by words, references and language, not by their names alone."""
    of = [{(row.id, row.line, row.speaker, row.language): row for row in side.rows if row.line} for side in sides]
    common = [key for key in of[0] if all(key in rows for rows in of)]
    if not common:
        counts = ", ".join(f"{side.name} has {len(side.rows)}" for side in sides)
        raise DataError(
            f"there is no line that all have said: {counts}, and their words, references or languages differ",
            hint="evaluate them on the same --data or --lines with the same --seed; or name the runs themselves, and "
            "what is missing is said",
        )
    notes = [
        f"{side.name} has {len(rows)} lines, of which {len(common)} are compared: the others lack the rest"
        for side, rows in zip(sides, of, strict=True)
        if len(rows) > len(common)
    ]
    kept = [
        ComparedSystem(side.name, [rows[key] for key in common], side.folder)
        for side, rows in zip(sides, of, strict=True)
    ]
    return kept, notes


def _heard_by_different_ears(sides: Iterable[ComparedSystem]) -> dict[str, str]:
    """Columns whose figures come from different ears, which says nothing about the systems."""
    found: dict[str, str] = {}
    for ear in {column.ear for column in METRICS if column.ear}:
        names = sorted({getattr(row, f"{ear}_by") for side in sides for row in side.rows} - {""})
        if len(names) > 1:
            why = f"heard by different ears, or beside other voices ({'; '.join(names)}); evaluate them alike"
            found |= {column.key: why for column in METRICS if column.ear == ear}
    return found


def _without(figures: Figures, different: Mapping[str, str]) -> Figures:
    return {key: figure for key, figure in figures.items() if key not in different}


def _trials(sides: Sequence[ComparedSystem], seed: int, listen: int) -> tuple[list[Trial], dict[tuple[str, str], int]]:
    """Every pair on some of the lines, in an order that follows from the seed. Each side comes first equally often."""
    rows = {side.name: {row.id: row for row in side.rows} for side in sides}
    lines = sorted(rows[sides[0].name], key=lambda id: hash_of(f"{seed}/listen/{id}"))
    trials: list[Trial] = []
    equal: dict[tuple[str, str], int] = {}
    for one, other in itertools.combinations(rows, 2):
        differ = [id for id in lines if rows[one][id].sound_hash != rows[other][id].sound_hash]
        if same := len(lines) - len(differ):
            equal[one, other] = same
        start = hash_of(f"{seed}/first/{one}/{other}") % 2
        for number, id in enumerate(differ[:listen]):
            pair = (one, other) if (number + start) % 2 == 0 else (other, one)
            sounds = (_sound(pair[0], rows[pair[0]][id]), _sound(pair[1], rows[pair[1]][id]))
            trial = bytes_hash(repr(sorted(sounds)).encode())[:ID]
            trials.append(Trial(trial, id, rows[one][id].text, sounds, pair))
    return sorted(trials, key=lambda trial: hash_of(f"{seed}/order/{trial.id}")), equal


def _sound(system: str, row: ItemScores) -> str:
    """A name for what a system made of a line. Two of three may have made the same of it, and are still two."""
    return bytes_hash(repr((system, row.line, row.id, row.sound_hash)).encode())[:ID]
