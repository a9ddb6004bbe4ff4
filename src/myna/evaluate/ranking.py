"""Ranking of checkpoints by their speech (`RULE`, explained in docs/guides/evaluate.md), and its outcome in words.

A difference within one standard error is not worth more training, and a choice that depends on a few items would be
different on other items. The highest of several scores is too high by chance; a gain is therefore measured on items
that chose nothing.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, stdev
from typing import Any, Self

from myna.core.config import SpeechEvalSettings
from myna.core.statistics import Estimate
from myna.evaluate.metrics import METRICS_BY_KEY, Metric, count_looped, estimate_difference, estimate_metric
from myna.evaluate.scoring import ItemScores

RULE = (
    "The score of an item is its speaker similarity less its character error rate; a checkpoint has the mean over its "
    "items. The first is the best until a later one is better on the same items by more than one standard error. Only "
    "those count that find the end of enough items, have enough quality, and have not become worse at the forgetting "
    "set. Half of the items choose; the others, spoken by the base model and by each checkpoint when it becomes the "
    "best, confirm its gain."
)
MIN_CONFIRMING_ITEMS = 12
"""Minimum number of items to confirm a gain. With fewer items the bootstrap interval is too narrow: it would confirm a
gain by chance in more than 5 % of runs."""
MIN_AUDIBLE_DIFFERENCE = 0.005
"""Smallest difference of scores that can be heard."""
MAX_MOS_DROP = 0.5
"""Maximum drop of DistillMOS below that of the base model, if no `min_mos` is set."""
SHOWN_METRICS = tuple(METRICS_BY_KEY[key] for key in ("wer", "similarity", "distillmos", "stop_rate"))
"""Metrics in the table of steps."""
REPORTED_METRICS = (
    *("wer", "cer", "similarity", "similarity_rank1", "distillmos", "stop_rate", "early_rate", "silent_rate"),
    *("repetition_rate", "prompt_rate", "copy_rate", "loop_rate"),
)
"""Metrics that are logged beside the score."""


@dataclass(frozen=True, slots=True)
class StepScores:
    """Item scores at one training step."""

    step: int
    rows: Sequence[ItemScores]
    forgetting: Sequence[ItemScores] = ()
    """Scores of the forgetting set."""
    confirmation: Sequence[ItemScores] = ()
    """Scores of items that choose nothing, for the base model and for checkpoints that were the best so far."""


@dataclass(frozen=True, slots=True)
class CheckpointScore:
    """Score of a checkpoint, and its gain over the base model."""

    step: int
    score: Estimate
    gain: Estimate
    """Gain on the items that choose; that of the best is too high by chance."""
    confirmed_gain: Estimate
    """Gain on items that chose nothing; empty for a checkpoint that was never the best."""
    forgetting_change: Estimate
    """Gain on the forgetting set; empty without one."""
    violations: tuple[str, ...]
    """Violated constraints in words; empty if it may be the best."""
    item_scores: Mapping[str, float]
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    looped: int = 0
    """Number of items whose transcript loops."""

    def is_better_than(self, other: Self) -> bool:
        """Whether it is better by more than one standard error of the difference, on the items that both have."""
        both = [score - other.item_scores[id] for id, score in self.item_scores.items() if id in other.item_scores]
        return bool(both) and fmean(both) > (stdev(both) / len(both) ** 0.5 if len(both) > 1 else 0.0)

    @property
    def beats_base(self) -> bool:
        """Whether it beats the base model on items that chose nothing, by more than the interval, and audibly."""
        gain = self.confirmed_gain
        is_certain = gain.n >= MIN_CONFIRMING_ITEMS and gain.low is not None and gain.low > 0
        return is_certain and (gain.mean or 0.0) >= MIN_AUDIBLE_DIFFERENCE

    def to_json(self, best_step: int | None) -> dict[str, Any]:
        """Return the row of metrics.jsonl; `best_step` is the best so far."""
        row: dict[str, Any] = {"score": self.score.mean, **self.metrics, "looped": self.looped}
        for name, prefix in (("gain", "gain"), ("confirmed_gain", "confirmed"), ("forgetting_change", "forgetting")):
            found: Estimate = getattr(self, name)
            if found.n:
                row |= {name: found.mean, f"{prefix}_low": found.low, f"{prefix}_high": found.high}
        return row | {"best_step": best_step, "violations": list(self.violations)}


def item_score(row: ItemScores) -> float:
    """Score one item, from -1 to 1. An item without a speaker similarity, as of two speakers, is scored by its words
    alone."""
    if row.character_errors is None:
        cer = 1.0
    else:
        cer = min(1.0, row.character_errors / row.characters) if row.characters else 0.0
    return (row.similarity or 0.0) - cer


SCORE = Metric("score", "score", "speaker similarity less character error rate", item_score, better="higher")


def score_checkpoint(scores: StepScores, base: StepScores, constraints: SpeechEvalSettings) -> CheckpointScore:
    """Score a checkpoint against the base model, which can be scored against itself too."""
    metrics = {key: estimate_metric(METRICS_BY_KEY[key], scores.rows).mean for key in REPORTED_METRICS}
    change = estimate_difference(SCORE, scores.forgetting, base.forgetting)
    is_base = scores.step == base.step
    confirmed = estimate_difference(SCORE, scores.confirmation, base.confirmation)
    return CheckpointScore(
        step=scores.step,
        score=estimate_metric(SCORE, scores.rows),
        gain=Estimate() if is_base else estimate_difference(SCORE, scores.rows, base.rows),
        confirmed_gain=Estimate() if is_base else confirmed,
        forgetting_change=Estimate() if is_base else change,
        violations=tuple(_violations(scores, base, constraints, metrics, change)),
        item_scores={row.id: item_score(row) for row in scores.rows},
        metrics=metrics,
        looped=count_looped(scores.rows),
    )


def best_checkpoint(checkpoints: Iterable[CheckpointScore]) -> CheckpointScore | None:
    """Return the best, or None if all violate a constraint. The base model is no checkpoint."""
    best: CheckpointScore | None = None
    for checkpoint in sorted(checkpoints, key=lambda checkpoint: checkpoint.step):
        if checkpoint.step > 0 and not checkpoint.violations and (best is None or checkpoint.is_better_than(best)):
            best = checkpoint
    return best


def required_mos(base: Sequence[ItemScores], constraints: SpeechEvalSettings) -> float | None:
    """Return the DistillMOS that a checkpoint must have; None if the base model has none."""
    if constraints.min_mos is not None:
        return constraints.min_mos
    base_mos = estimate_metric(METRICS_BY_KEY["distillmos"], base).mean
    return base_mos - MAX_MOS_DROP if base_mos is not None else None


def _violations(
    scores: StepScores,
    base: StepScores,
    constraints: SpeechEvalSettings,
    metrics: Mapping[str, float | None],
    change: Estimate,
) -> Iterator[str]:
    """Say which constraints are violated; `change` is the gain on the forgetting set."""
    for key, value in metrics.items():
        if value is not None and not math.isfinite(value):  # such a score would stay the best for ever
            yield f"its {METRICS_BY_KEY[key].title} is not a number"
    stop_rate, mos, min_mos = metrics["stop_rate"] or 0.0, metrics["distillmos"], required_mos(base.rows, constraints)
    if stop_rate < constraints.min_stop_rate:
        yield f"it finds the end of {stop_rate:.0%} of the items, and {constraints.min_stop_rate:.0%} are required"
    if mos is None:  # every item is silent, or ended before there was anything to hear
        yield "there is nothing to hear of it"
    elif min_mos is not None and mos < min_mos:
        yield f"its DistillMOS is {mos:.2f}, and {min_mos:.2f} is required"
    mean, low, high = (value or 0.0 for value in (change.mean, change.low, change.high))
    # A loss rules a checkpoint out even if a few items alone show it: it can be heard, and another checkpoint may do.
    if high < 0 and -mean >= MIN_AUDIBLE_DIFFERENCE:
        yield f"it has become worse at the forgetting set, by {-mean:.3f} [{-high:.3f}, {-low:.3f}]"
    stops = estimate_difference(METRICS_BY_KEY["stop_rate"], scores.forgetting, base.forgetting)
    if stops.excludes_zero and (stops.mean or 0.0) < 0:
        yield f"it finds the end of {-(stops.mean or 0):.0%} fewer items of the forgetting set than the base model"


@dataclass(frozen=True)
class TrainingHistory:
    """Speech evaluations of a run, that of the base model first."""

    name: str
    steps: Sequence[StepScores]
    constraints: SpeechEvalSettings
    recordings: Sequence[ItemScores] = ()
    """Scores of the real recordings of the items, if there are any."""

    @cached_property
    def checkpoints(self) -> list[CheckpointScore]:
        return [score_checkpoint(scores, self.steps[0], self.constraints) for scores in self.steps]

    @property
    def best(self) -> CheckpointScore | None:
        return best_checkpoint(self.checkpoints)

    @property
    def best_step(self) -> int | None:
        return self.best.step if self.best is not None else None

    @property
    def is_highest(self) -> bool:
        """Whether the latest has the highest score of all that satisfy the constraints, certain or not."""
        *before, latest = self.checkpoints
        scores = [one.score.mean or 0.0 for one in before if one.step > 0 and not one.violations]
        return not latest.violations and (latest.score.mean or 0.0) > max(scores, default=-1.0)

    @property
    def min_mos(self) -> float | None:
        return required_mos(self.steps[0].rows, self.constraints)


def step_name(step: int) -> str:
    return f"step {step}" if step else "base model"


def training_conclusion(history: TrainingHistory) -> list[str]:
    """Say which step is the best, what was gained, and likely reasons if nothing was."""
    checkpoints, best = history.checkpoints, history.best
    if len(checkpoints) < 2:
        return ["only the base model was evaluated, so there is nothing to compare it with"]
    # Checkpoints that would be the best if they did not violate a constraint.
    least = best.score.mean if best is not None and best.score.mean is not None else -1.0
    excluded = [
        f"step {one.step} has the score {one.score.mean:.3f} and cannot be the best: {' and '.join(one.violations)}"
        for one in checkpoints
        if one.step > 0 and one.violations and (one.score.mean or -1.0) > least
    ]
    if best is None:
        highest = max(checkpoints[1:], key=lambda one: one.score.mean or -1.0)
        lines = ["no checkpoint may be called the best, so the last one is the result"]
        if not (highest.gain.low or 0.0) > 0:
            lines += [
                f"no checkpoint is better than the base model: the highest is step {highest.step}, score "
                f"{highest.score.mean:.3f}, {SCORE.format_estimate(highest.gain, signed=True)} over it",
                f"likely reasons: {'; '.join(_reasons(history, highest))}",
            ]
        return [*lines, _metrics(highest), *excluded]
    gain = best.confirmed_gain
    measured = f"{SCORE.format_estimate(gain, signed=True)} over the base model on {gain.n} items that chose nothing"
    result = f"step {best.step} is the best: score {best.score.mean:.3f}, {measured if gain.n else 'the only item'}"
    if best.beats_base:
        return [result, _metrics(best), *excluded]
    reasons = f"likely reasons: {'; '.join(_reasons(history, best))}"
    return [f"no gain over the base model is confirmed; {result}", reasons, _metrics(best), *excluded]


def _metrics(checkpoint: CheckpointScore) -> str:
    values = [(metric, checkpoint.metrics[metric.key]) for metric in SHOWN_METRICS]
    shown = [f"{metric.title} {metric.format(value)}" for metric, value in values if value is not None]
    return f"at step {checkpoint.step}: {', '.join(shown)}, ASR loops in {checkpoint.looped} items"


def _reasons(history: TrainingHistory, best: CheckpointScore) -> list[str]:
    """Say why nothing was gained, as far as the scores can tell."""
    tuned, base = [one for one in history.checkpoints if one.step > 0], history.steps[0]
    # The gain on the items that chose the best is too high by chance.
    gain = best.confirmed_gain if best.confirmed_gain.n else best.gain
    hashes = {row.id: row.audio_hash for row in base.rows}
    if all(hashes.get(row.id) == row.audio_hash for scores in history.steps for row in scores.rows):
        return [
            "every item is spoken exactly as by the base model: train.learning_rate is too low, or the run too "
            "short, to change anything"
        ]
    reasons = []
    real = estimate_metric(SCORE, history.recordings).mean
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
