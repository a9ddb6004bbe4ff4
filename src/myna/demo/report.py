"""Result of a demo: its scores, and the page that shows and plays them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from myna.data.manifest import Utterance
from myna.evaluate.items import clip_seconds
from myna.evaluate.metrics import (
    METRICS_BY_KEY,
    MetricEstimates,
    count_looped,
    estimate_differences,
    estimate_metrics,
)
from myna.evaluate.pages import format_difference, item_section
from myna.evaluate.scoring import ItemScores
from myna.evaluate.systems import REAL
from myna.report.document import html_document, render_template
from myna.report.markup import html_table
from myna.report.plot import Curve, line_plot, smooth_curve

BEFORE, AFTER = "before", "after"
SHOWN_METRICS = ("similarity", "wer", "loop_rate", "distillmos", "stop_rate")
LOSS_DECAY = 0.85
"""Of the moving average of the training loss."""


@dataclass(frozen=True, slots=True, eq=False)
class DemoResult:
    """Everything that the page and `scores.json` show."""

    out: Path
    source: str | None
    """None for the voice that comes with Myna."""
    model: str
    strength: float
    speaker: str
    train: Sequence[Utterance]
    reference_text: str
    scores: Mapping[str, Sequence[ItemScores]]
    """By system: real, before and after."""
    unavailable: Mapping[str, str]
    """Why there is no such scorer, by its name."""
    losses: Sequence[Mapping[str, Any]]
    """Rows of the run's metrics.jsonl."""
    recipe: str
    notes: Sequence[str]
    seconds: Mapping[str, float]
    """By stage."""
    peak_memory_bytes: int

    @property
    def texts(self) -> list[str]:
        return [row.text for row in self.scores[REAL]]

    @property
    def estimates(self) -> dict[str, MetricEstimates]:
        return {name: estimate_metrics(rows) for name, rows in self.scores.items()}

    @property
    def differences(self) -> MetricEstimates:
        return estimate_differences(self.scores[AFTER], self.scores[BEFORE])

    @property
    def missing(self) -> dict[str, str]:
        """Why a shown metric was not measured, and what brings it, by its key."""
        scorers = {key: METRICS_BY_KEY[key].scorer for key in SHOWN_METRICS}
        return {key: self.unavailable[scorer] for key, scorer in scorers.items() if scorer in self.unavailable}

    @property
    def unmeasured(self) -> list[str]:
        return [f"{METRICS_BY_KEY[key].title}: not measured. {reason}" for key, reason in self.missing.items()]

    def score_table(self) -> tuple[list[str], list[list[str | Markup]]]:
        """Header and rows; differences are markup."""
        metrics = [METRICS_BY_KEY[key] for key in SHOWN_METRICS]
        rows: list[list[str | Markup]] = [
            [name, *(metric.format_estimate(estimates[metric.key]) for metric in metrics)]
            for name, estimates in self.estimates.items()
        ]
        differences = self.differences
        rows.append(["change", *(format_difference(metric, differences[metric.key]) for metric in metrics)])
        return ["", *(metric.title for metric in metrics)], rows

    def to_json(self) -> dict[str, Any]:
        systems = {}
        for name, estimates in self.estimates.items():
            rows = self.scores[name]
            systems[name] = {
                "similarity": estimates["similarity"].mean,
                "word_error_rate": estimates["wer"].mean,
                "looped": count_looped(rows),
                "metrics": {key: estimate.to_json() for key, estimate in estimates.items()},
                "transcripts": [row.transcript for row in rows],
            }
        return {
            "model": self.model,
            "strength": self.strength,
            "speaker": self.speaker,
            "texts": self.texts,
            "systems": systems,
            "differences": {key: estimate.to_json() for key, estimate in self.differences.items()},
            "missing": self.missing,
            "ended_by_itself": {name: sum(bool(row.stopped) for row in self.scores[name]) for name in (BEFORE, AFTER)},
            "seconds": dict(self.seconds),
        }


def demo_page(result: DemoResult) -> str:
    estimates, out = result.estimates, result.out
    figures = [
        (f"{estimates[BEFORE][key].mean:.{digits}} → {estimates[AFTER][key].mean:.{digits}}", label)
        for key, digits, label in (
            ("similarity", "2f", "similarity to the real voice"),
            ("wer", "0%", "words that are recognized wrongly"),
        )
        if estimates[BEFORE][key].n and estimates[AFTER][key].n
    ]
    figures.append((_minutes(sum(result.seconds.values())), "for all of it"))
    figures.append((f"{result.peak_memory_bytes / 1e9:.1f} GB", "of memory at most"))
    rows = {name: {row.id: row for row in scores} for name, scores in result.scores.items()}
    header, table = result.score_table()
    stages = [(name, f"{seconds:.1f} s") for name, seconds in result.seconds.items()]
    total = sum(result.seconds.values())
    body = render_template(
        "demo/report.html",
        result=result,
        training_minutes=result.seconds["train"] / 60,
        train_length=_minutes(sum(map(clip_seconds, result.train))),
        figures=figures,
        items=[
            item_section(row, {name: by_id[row.id] for name, by_id in rows.items()}, out / "evaluation")
            for row in result.scores[REAL]
        ],
        scores=html_table(header, table, caption="Scores of the real recordings, before and after"),
        losses=_loss_plot(result.losses),
        stages=html_table(
            ("stage", "took"), [*stages, ("in all", f"{total:.1f} s")], caption="How long each stage took"
        ),
        quoted={name: shlex.quote(str(out / name)) for name in ("run", "reference.wav", "recipe.yaml")}
        | {"model": shlex.quote(result.model), "reference_text": shlex.quote(result.reference_text)},
    )
    return html_document(f"Myna demo: {result.speaker}", body)


def _loss_plot(rows: Sequence[Mapping[str, Any]]) -> Markup:
    # A loss that was no number is None.
    train = [(float(row["step"]), float(row["loss"])) for row in rows if row.get("loss") is not None]
    evaluations = [(float(row["step"]), row["evaluation"]["loss"]) for row in rows if "evaluation" in row]
    evaluation = [(step, float(loss)) for step, loss in evaluations if loss is not None]
    curves = [
        Curve("training, every step", train, "faint"),
        Curve("training, smoothed", smooth_curve(train, LOSS_DECAY)),
        Curve("evaluation, on the held-out texts", evaluation, "dots", color=1),
    ]
    return line_plot(curves, title="Loss while training", x_label="optimizer step", y_label="loss")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
