"""Speech evaluations of a training run: the outcome in words, and a page with the steps side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markupsafe import Markup

from myna.core.statistics import Estimate, estimate
from myna.evaluate.metrics import METRICS_BY_KEY
from myna.evaluate.pages import item_section
from myna.evaluate.pipeline import step_folder
from myna.evaluate.ranking import (
    MIN_AUDIBLE_DIFFERENCE,
    MIN_CONFIRMING_ITEMS,
    RULE,
    CheckpointScore,
    Constraints,
    StepScores,
    best_checkpoint,
    item_score,
    required_mos,
    score_checkpoint,
)
from myna.evaluate.scoring import ItemScores
from myna.evaluate.systems import REAL
from myna.report.document import html_document, render_template
from myna.report.plot import Curve, line_plot

SHOWN_ITEMS = 6
"""Items with players, each at several steps; the audio of all lies beside the page."""
SHOWN_METRICS = tuple(METRICS_BY_KEY[key] for key in ("wer", "similarity", "distillmos", "stop_rate"))


@dataclass(frozen=True)
class TrainingHistory:
    """The speech evaluations of a run, that of the base model first."""

    name: str
    steps: Sequence[StepScores]
    constraints: Constraints
    recordings: Sequence[ItemScores] = ()
    """The real recordings of the items, where there are such."""

    @cached_property
    def checkpoints(self) -> list[CheckpointScore]:
        return [score_checkpoint(scores, self.steps[0], self.constraints) for scores in self.steps]

    @property
    def best(self) -> CheckpointScore | None:
        return best_checkpoint(self.checkpoints)

    @property
    def best_step(self) -> int | None:
        best = self.best
        return best.step if best is not None else None

    @property
    def is_highest(self) -> bool:
        """Whether the latest satisfies the constraints and has the highest score of those that do, certain or not."""
        *before, latest = self.checkpoints
        scores = [one.score.mean or 0.0 for one in before if one.step > 0 and not one.violations]
        return not latest.violations and (latest.score.mean or 0.0) > max(scores, default=-1.0)


def training_conclusion(history: TrainingHistory) -> list[str]:
    """The outcome for people: which step is the best, what was gained, and likely reasons if nothing was."""
    checkpoints, best = history.checkpoints, history.best
    if len(checkpoints) < 2:
        return ["only the base model was evaluated, so there is nothing to compare it with"]
    excluded = _excluded(checkpoints, best)
    if best is None:
        highest = max(checkpoints[1:], key=lambda one: one.score.mean or -1.0)
        lines = ["no checkpoint may be called the best, so the last one is the result"]
        if not (highest.gain.low or 0.0) > 0:
            lines += [
                f"no checkpoint is better than the base model: the highest is step {highest.step}, score "
                f"{highest.score.mean:.3f}, {_format(highest.gain, signed=True)} over it",
                f"likely reasons: {'; '.join(_reasons(history, highest))}",
            ]
        return [*lines, _metrics(highest), *excluded]
    gain = best.confirmed_gain
    measured = f"{_format(gain, signed=True)} over the base model on {gain.n} items that chose nothing"
    result = f"step {best.step} is the best: score {best.score.mean:.3f}, {measured if gain.n else 'the only item'}"
    if best.beats_base:
        return [result, _metrics(best), *excluded]
    reasons = f"likely reasons: {'; '.join(_reasons(history, best))}"
    return [f"no gain over the base model is confirmed; {result}", reasons, _metrics(best), *excluded]


def training_page(history: TrainingHistory, folder: Path) -> str:
    """`folder` holds a folder for each step, and `real`."""
    title = f"{history.name}, speech evaluations during training"
    best = history.best_step
    points = [(float(one.step), one.score.mean) for one in history.checkpoints if one.score.mean is not None]
    curve = Curve("score", points, "dots")
    body = render_template(
        "evaluate/history.html",
        title=title,
        conclusion=training_conclusion(history),
        rule=RULE,
        constraints=history.constraints,
        min_mos=required_mos(history.steps[0].rows, history.constraints),
        metrics=SHOWN_METRICS,
        has_forgetting_set=any(one.forgetting_change.n for one in history.checkpoints),
        checkpoints=history.checkpoints,
        best=best,
        step_name=_step_name,
        format_estimate=_format,
        plot=line_plot([curve], title="The score over the steps", x_label="steps", y_label="score"),
        sections=_items(history, best if best is not None else history.steps[-1].step, folder),
    )
    return html_document(title, body)


def _step_name(step: int) -> str:
    return f"step {step}" if step else "base model"


def _format(figure: Estimate, *, signed: bool = False) -> str:
    if figure.mean is None:
        return "not measured"
    sign = "+" if signed else ""
    return f"{figure.mean:{sign}.3f} [{figure.low:{sign}.3f}, {figure.high:{sign}.3f}]"


def _metrics(checkpoint: CheckpointScore) -> str:
    values = [(metric, checkpoint.metrics[metric.key]) for metric in SHOWN_METRICS]
    shown = [f"{metric.title} {metric.format(value)}" for metric, value in values if value is not None]
    return f"at step {checkpoint.step}: {', '.join(shown)}, ASR loops in {checkpoint.looped} items"


def _excluded(checkpoints: Sequence[CheckpointScore], best: CheckpointScore | None) -> list[str]:
    """Checkpoints that would be the best if they did not violate a constraint."""
    least = best.score.mean if best is not None and best.score.mean is not None else -1.0
    return [
        f"step {one.step} has the score {one.score.mean:.3f} and cannot be the best: {' and '.join(one.violations)}"
        for one in checkpoints
        if one.step > 0 and one.violations and (one.score.mean or -1.0) > least
    ]


def _reasons(history: TrainingHistory, best: CheckpointScore) -> list[str]:
    """Why nothing was gained, as far as the scores can tell."""
    tuned, base = [one for one in history.checkpoints if one.step > 0], history.steps[0]
    # What chose the best is too high by chance.
    gain = best.confirmed_gain if best.confirmed_gain.n else best.gain
    hashes = {row.id: row.audio_hash for row in base.rows}
    if all(hashes.get(row.id) == row.audio_hash for scores in history.steps for row in scores.rows):
        return [
            "every item is spoken exactly as by the base model: train.learning_rate is too low, or the run too "
            "short, to change anything"
        ]
    reasons = []
    real = estimate([item_score(row) for row in history.recordings]).mean
    if real is not None and (history.checkpoints[0].score.mean or 0.0) >= real - MIN_AUDIBLE_DIFFERENCE:
        reasons.append("by these metrics the base model is as good as the real recordings, so nothing can be gained")
    if (gain.mean or 0.0) >= MIN_AUDIBLE_DIFFERENCE:
        needed = f", and {MIN_CONFIRMING_ITEMS} are needed in any case" if gain.n < MIN_CONFIRMING_ITEMS else ""
        reasons.append(
            f"{gain.n} items are too few to be sure of so small a difference{needed}: raise speech_eval.limit, half of "
            "which confirm, and see that there are as many items"
        )
    elif gain.high is not None and gain.high < 0:
        reasons.append(
            "training has made it worse: train.learning_rate is too high, or texts do not belong to their recordings"
        )
    if len(tuned) > 1 and best.step == tuned[0].step and (tuned[-1].score.mean or 0.0) < (best.score.mean or 0.0):
        reasons.append("it was best at first and became worse: it overfits, so fewer steps or more data may help")
    if len(tuned) > 1 and best.step == tuned[-1].step:
        reasons.append("it was still becoming better at the end: train for longer")
    return reasons or ["the run is too short, train.learning_rate is too low, or the data does not suit the model"]


def _items(history: TrainingHistory, shown: int, folder: Path) -> list[Markup]:
    """Some items: as recorded, by the base model, and at the best and the latest step."""
    steps = dict.fromkeys((history.steps[0].step, shown, history.steps[-1].step))
    rows = {REAL: {row.id: row for row in history.recordings}}
    rows |= {_step_name(one.step): {row.id: row for row in one.rows} for one in history.steps if one.step in steps}
    folders = {REAL: folder / "real"} | {_step_name(step): folder / step_folder(step) for step in steps}
    order = [REAL, *map(_step_name, steps)]
    return [
        item_section(row, {name: rows[name][row.id] for name in order if row.id in rows[name]}, folders, note=_note)
        for row in history.steps[0].rows[:SHOWN_ITEMS]
    ]


def _note(row: ItemScores) -> str:
    return f"score {item_score(row).numerator:.2f}: “{row.transcript or ''}”"
