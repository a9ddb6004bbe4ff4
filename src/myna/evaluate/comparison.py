"""Comparison of systems on the items that all of them have spoken: metrics, paired differences, and blind trials."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from myna.core.errors import DataError
from myna.core.io import bytes_hash
from myna.data.hash_rng import string_hash
from myna.evaluate.evaluation import MetricEstimates, count_looped, estimate_differences, estimate_metrics
from myna.evaluate.metrics import METRICS
from myna.evaluate.preferences import ListeningTrial, Preferences
from myna.evaluate.scoring import ItemScores
from myna.evaluate.seen_items import seen_warnings

ID_LENGTH = 16
"""Hex digits of ids that do not reveal the system."""


@dataclass(frozen=True, slots=True)
class ComparedSystem:
    """One system: the scores of its items, and the folder of its audio."""

    name: str
    rows: Sequence[ItemScores]
    folder: Path


@dataclass(frozen=True, slots=True)
class Comparison:
    """Systems side by side, as `myna compare` writes them into `folder`."""

    folder: Path
    systems: tuple[ComparedSystem, ...]
    """With the same items in the same order; differences are from the first system."""
    real: ComparedSystem | None
    """The recordings of those items, if there are any."""
    trials: tuple[ListeningTrial, ...]
    estimates: dict[str, MetricEstimates]
    differences: dict[str, MetricEstimates]
    missing: dict[str, str]
    """Metrics that cannot be compared, and why."""
    notes: tuple[str, ...]
    settings: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        return [system.name for system in self.systems]

    @property
    def id(self) -> str:
        """Differs where the audio differs: answers to one comparison do not count for another."""
        return bytes_hash(repr([trial.id for trial in self.trials]).encode())[:ID_LENGTH]

    @property
    def warnings(self) -> list[str]:
        """What belongs above every figure: items that a system had seen before."""
        return seen_warnings({system.name: system.rows for system in self.systems})

    def to_json(self, preferences: Preferences) -> dict[str, Any]:
        def plain(by_system: Mapping[str, MetricEstimates]) -> dict[str, Any]:
            return {
                name: {key: estimate.to_json() for key, estimate in metrics.items()}
                for name, metrics in by_system.items()
            }

        return {
            "warnings": self.warnings,
            "comparison": self.id,
            "names": self.names,
            "settings": dict(self.settings),
            "items": len(self.systems[0].rows),
            "looped": {system.name: count_looped(system.rows) for system in self.systems},
            "systems": plain(self.estimates),
            "differences": plain(self.differences),
            "missing": self.missing,
            "notes": list(self.notes),
            "trials": [trial.to_json() for trial in self.trials],
            "preferences": preferences.to_json(),
        }


def build_comparison(
    systems: Sequence[ComparedSystem],
    real: ComparedSystem | None,
    *,
    folder: Path,
    seed: int,
    trials: int,
    missing: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> Comparison:
    """Compare `systems` on their common items, with blind trials on at most `trials` of these."""
    compared, item_notes = common_items(systems)
    if real is not None:
        recordings = {row.id: row for row in real.rows}
        rows = [recordings[row.id] for row in compared[0].rows if row.id in recordings]
        real = ComparedSystem(real.name, rows, real.folder) if rows else None
    scored = [*([real] if real is not None else []), *compared]
    incomparable = _different_scorers(scored)
    chosen, identical = _trials(compared, seed, trials)
    for (first, second), count in identical.items():
        item_notes.append(f"{first} and {second} have the very same audio for {count} items, which are not in the test")

    def comparable(metrics: MetricEstimates) -> MetricEstimates:
        return {key: estimate for key, estimate in metrics.items() if key not in incomparable}

    return Comparison(
        folder=folder,
        systems=tuple(compared),
        real=real,
        trials=tuple(chosen),
        estimates={system.name: comparable(estimate_metrics(system.rows)) for system in scored},
        differences={
            system.name: comparable(estimate_differences(system.rows, compared[0].rows))
            for system in scored
            if system.name != compared[0].name
        },
        missing={**(missing or {}), **incomparable},
        notes=(*notes, *item_notes),
        settings=settings or {},
    )


def common_items(systems: Sequence[ComparedSystem]) -> tuple[list[ComparedSystem], list[str]]:
    """Each system with the items that all have, matched by text, references and language, and notes on the rest."""
    indexed = [
        {(row.id, row.item_key, row.speaker, row.language): row for row in system.rows if row.item_key}
        for system in systems
    ]
    common = [key for key in indexed[0] if all(key in rows for rows in indexed)]
    if not common:
        counts = ", ".join(f"{system.name} has {len(system.rows)}" for system in systems)
        raise DataError(
            f"there is no item that all have spoken: {counts}, and their texts, references or languages differ",
            hint="evaluate them on the same --data or --sentences with the same --seed; or name the runs themselves, "
            "and what is missing is spoken",
        )
    notes = [
        f"{system.name} has {len(rows)} items, of which {len(common)} are compared: the others lack the rest"
        for system, rows in zip(systems, indexed, strict=True)
        if len(rows) > len(common)
    ]
    compared = [
        ComparedSystem(system.name, [rows[key] for key in common], system.folder)
        for system, rows in zip(systems, indexed, strict=True)
    ]
    return compared, notes


def _different_scorers(systems: Iterable[ComparedSystem]) -> dict[str, str]:
    """Metrics that different scorers have measured, which says nothing about the systems."""
    found: dict[str, str] = {}
    for scorer in {metric.scorer for metric in METRICS if metric.scorer}:
        names = sorted({getattr(row, f"{scorer}_model") for system in systems for row in system.rows} - {""})
        if len(names) > 1:
            reason = f"measured by different scorers or against other clips ({'; '.join(names)}); evaluate them alike"
            found |= {metric.key: reason for metric in METRICS if metric.scorer == scorer}
    return found


def _trials(
    systems: Sequence[ComparedSystem], seed: int, limit: int
) -> tuple[list[ListeningTrial], dict[tuple[str, str], int]]:
    """Every pair of systems on some of the items, in an order that follows from the seed, each system first equally
    often; and how many items of a pair are identical audio."""
    rows = {system.name: {row.id: row for row in system.rows} for system in systems}
    ids = sorted(rows[systems[0].name], key=lambda id: string_hash(f"{seed}/listen/{id}"))
    trials: list[ListeningTrial] = []
    identical: dict[tuple[str, str], int] = {}
    for first, second in itertools.combinations(rows, 2):
        differing = [id for id in ids if rows[first][id].audio_hash != rows[second][id].audio_hash]
        if len(differing) < len(ids):
            identical[first, second] = len(ids) - len(differing)
        start = string_hash(f"{seed}/first/{first}/{second}") % 2
        for number, id in enumerate(differing[:limit]):
            pair = (first, second) if (number + start) % 2 == 0 else (second, first)
            sounds = (_sound_id(pair[0], rows[pair[0]][id]), _sound_id(pair[1], rows[pair[1]][id]))
            trial_id = bytes_hash(repr(sorted(sounds)).encode())[:ID_LENGTH]
            trials.append(ListeningTrial(trial_id, id, rows[first][id].text, sounds, pair))
    return sorted(trials, key=lambda trial: string_hash(f"{seed}/order/{trial.id}")), identical


def _sound_id(system: str, row: ItemScores) -> str:
    """Of one system's audio of an item: two systems with identical audio have two ids."""
    return bytes_hash(repr((system, row.item_key, row.id, row.audio_hash)).encode())[:ID_LENGTH]
