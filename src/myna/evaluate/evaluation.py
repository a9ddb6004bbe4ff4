"""Evaluation results: metrics with intervals, differences from the base, groups of items, and diagnoses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from myna.core.statistics import Estimate, RatioPart, estimate, paired_difference
from myna.evaluate.diagnostics import Diagnosis, diagnose
from myna.evaluate.metrics import METRICS, METRICS_BY_KEY, Metric
from myna.evaluate.pipeline import SystemScores
from myna.evaluate.scorers import Scorers
from myna.evaluate.scoring import ItemScores
from myna.evaluate.seen_items import seen_warnings
from myna.evaluate.systems import BASE, REAL, ROUND_TRIP

GROUPED_METRICS = tuple(
    METRICS_BY_KEY[key]
    for key in ("wer", "cer", "loop_rate", "similarity", "similarity_rank1", "distillmos", "stop_rate", "early_rate")
)
"""Metrics of groups of items."""
GROUPS: Mapping[str, Callable[[ItemScores], str]] = {
    "speaker": lambda row: row.speaker or "unnamed",
    "language": lambda row: row.language or "unnamed",
    "length": lambda row: {"word": "one word", "sentence": "usual", "long": "very long"}[row.length_class],
}
NOT_APPLICABLE_REASONS = {
    "similarity": "no item has a recording of its speaker",
    "similarity_rank1": "there is only one speaker to choose from",
    "similarity_to_others": "there is only one speaker",
}
MetricEstimates = dict[str, Estimate]
"""By the key of the metric."""


@dataclass(frozen=True)
class Evaluation:
    """Everything that is known of one system beside the recordings and its base."""

    scores: SystemScores
    scorers: Scorers
    system: str
    """The one that the evaluation is about."""
    folder: Path
    metadata: Mapping[str, Mapping[str, Any]]
    """By system."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def estimates(self) -> dict[str, MetricEstimates]:
        """By system."""
        return {name: estimate_metrics(rows) for name, rows in self.scores.rows.items()}

    @cached_property
    def deltas(self) -> dict[str, MetricEstimates]:
        """Of each model against the base, on the items that both have spoken."""
        rows = self.scores.rows
        models = [name for name in rows if name not in (BASE, REAL, ROUND_TRIP)]
        return {name: estimate_differences(rows[name], rows[BASE]) for name in models} if BASE in rows else {}

    @cached_property
    def groups(self) -> dict[str, dict[str, dict[str, MetricEstimates]]]:
        """By kind of group, group and system."""
        return {kind: _groups(self.scores.rows, group_of) for kind, group_of in GROUPS.items()}

    @cached_property
    def diagnoses(self) -> list[Diagnosis]:
        return diagnose(self.scores.rows, self.estimates, self.deltas, self.metadata)

    @cached_property
    def missing(self) -> dict[str, str]:
        """Metrics that could not be computed, and why."""
        missing = {}
        for metric in METRICS:
            if metric.scorer in self.scorers.missing:
                missing[metric.key] = self.scorers.missing[metric.scorer]
            elif not any(estimates[metric.key].n for estimates in self.estimates.values()):
                missing[metric.key] = NOT_APPLICABLE_REASONS.get(metric.key, "it applies to no item")
        if REAL in self.scores.rows and not self.scores.rows[REAL]:
            missing[REAL] = "these items have no recordings; give --data with what was really spoken"
        return missing

    @property
    def notes(self) -> tuple[str, ...]:
        """For people: items without a reference or a language, scorers on another device, and what is not known of a
        run."""
        known = [note for metadata in self.metadata.values() for note in metadata.get("notes", ())]
        return (*self.scores.eval_set.notes, *self.scorers.notes, *known)

    @property
    def warnings(self) -> list[str]:
        """What belongs above every figure: items that a system had seen before."""
        return seen_warnings(self.scores.rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "warnings": self.warnings,
            "model": self.system,
            "settings": dict(self.settings),
            "items": len(self.scores.eval_set.items),
            "trained_on": {
                name: {row.id: row.trained_on for row in rows if row.trained_on}
                for name, rows in self.scores.rows.items()
            },
            "looped": {name: count_looped(rows) for name, rows in self.scores.rows.items()},
            "systems": estimates_to_json(self.estimates),
            "deltas": estimates_to_json(self.deltas),
            "groups": {
                kind: {group: estimates_to_json(systems) for group, systems in groups.items()}
                for kind, groups in self.groups.items()
            },
            "diagnoses": [asdict(diagnosis) for diagnosis in self.diagnoses],
            "missing": self.missing,
            "scorers": dict(self.scorers.names),
            "metadata": {name: dict(metadata) for name, metadata in self.metadata.items()},
            "notes": list(self.notes),
        }


def estimates_to_json(systems: Mapping[str, MetricEstimates]) -> dict[str, Any]:
    return {name: {key: value.to_json() for key, value in of.items()} for name, of in systems.items()}


def count_looped(rows: Iterable[ItemScores]) -> int:
    """Items whose transcript loops; they are wholly wrong in the error rates."""
    return sum(bool(row.looped) for row in rows)


def estimate_metrics(rows: Sequence[ItemScores], metrics: Iterable[Metric] = METRICS) -> MetricEstimates:
    return {metric.key: estimate_metric(metric, rows) for metric in metrics}


def estimate_metric(metric: Metric, rows: Sequence[ItemScores]) -> Estimate:
    return estimate([part for row in rows if (part := metric.ratio(row)) is not None])


def estimate_differences(rows: Sequence[ItemScores], base: Sequence[ItemScores]) -> MetricEstimates:
    """Of all metrics, on the items that both have spoken."""
    return {metric.key: estimate_difference(metric.ratio, rows, base) for metric in METRICS}


def estimate_difference(
    ratio: Callable[[ItemScores], RatioPart | None], rows: Sequence[ItemScores], base: Sequence[ItemScores]
) -> Estimate:
    known = {row.id: ratio(row) for row in base}
    pairs = [(ours, theirs) for row in rows if (ours := ratio(row)) and (theirs := known.get(row.id))]
    return paired_difference([ours for ours, _ in pairs], [theirs for _, theirs in pairs])


def _groups(
    rows: Mapping[str, Sequence[ItemScores]], group_of: Callable[[ItemScores], str]
) -> dict[str, dict[str, MetricEstimates]]:
    """Nothing where there is but one group, which would only repeat the figures of all items."""
    groups = sorted({group_of(row) for of in rows.values() for row in of})
    if len(groups) < 2:
        return {}
    return {
        group: {
            system: estimate_metrics([row for row in of if group_of(row) == group], GROUPED_METRICS)
            for system, of in rows.items()
        }
        for group in groups
    }
