"""Which checkpoint is the best to hear: one rule, written down here, and for people in docs/guides/evaluate.md.

The mark of a line is how alike its voice is, less the share of its letters that was not understood. The mark of a
checkpoint is the mean over its lines. The first checkpoint is the best until a later one has a higher mark, by more
than one standard error of the difference on the same lines: what cannot be told apart is not worth more training,
and a choice that hangs on the luck of a few lines would be another on other lines. Only those count that

- find the end of enough lines by themselves,
- do not sound worse than the quality that was asked for,
- and are not worse than the untuned model, beyond the interval, on the lines of the guard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from myna.evaluate.metrics import BY_KEY
from myna.evaluate.scoring import ItemScores
from myna.statistics import Estimate, RatioPart, difference, estimate

AUDIBLE = 0.005
"""A difference of marks smaller than this is nothing that anyone hears, however sure it is."""
QUALITY_MAY_FALL = 0.5
"""How far the DistillMOS of a checkpoint may lie below the untuned model's, where no floor was asked for."""
TOLD = (
    *("wer", "cer", "similarity", "similarity_rank1", "distillmos", "stop_rate", "early_rate", "silent_rate"),
    *("repetition_rate", "prompt_rate", "copy_rate", "loop_rate"),
)
"""Figures that are told beside the mark."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """What a checkpoint must have to be the best, however well it is understood."""

    stop_rate: float
    quality: float | None = None
    """A DistillMOS; None for what the untuned model has, less `QUALITY_MAY_FALL`."""


@dataclass(frozen=True, slots=True)
class StepScores:
    """What was heard at one step."""

    step: int
    rows: Sequence[ItemScores]
    guard: Sequence[ItemScores] = ()


@dataclass(frozen=True, slots=True)
class CheckpointScore:
    """What is thought of a checkpoint."""

    step: int
    mark: Estimate
    gain: Estimate
    """Of the mark over the untuned model's, on the same lines."""
    guard_change: Estimate
    """The same on the lines of the guard; without a guard nothing."""
    faults: tuple[str, ...]
    """Why it cannot be the best, in words; empty where it can."""
    marks: Mapping[str, float]
    """Of each line."""
    figures: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def may_be_best(self) -> bool:
        return not self.faults

    def is_better_than(self, other: CheckpointScore) -> bool:
        """By more than one standard error of the difference, on the lines that both have said."""
        both = [value - other.marks[line] for line, value in self.marks.items() if line in other.marks]
        return bool(both) and fmean(both) > (stdev(both) / len(both) ** 0.5 if len(both) > 1 else 0.0)

    @property
    def beats_base(self) -> bool:
        """Better than the untuned model beyond the interval, and by enough to be heard."""
        return self.gain.low is not None and self.gain.low > 0 and (self.gain.mean or 0.0) >= AUDIBLE

    def row(self, best: int | None) -> dict[str, Any]:
        """As it is written to metrics.jsonl; `best` is the step that is the best by now."""
        told: dict[str, Any] = {"mark": self.mark.mean, **self.figures}
        if self.gain.n:
            told |= {"gain": self.gain.mean, "gain_low": self.gain.low, "gain_high": self.gain.high}
        if self.guard_change.n:
            change = self.guard_change
            told |= {"guard_change": change.mean, "guard_low": change.low, "guard_high": change.high}
        return told | {"best_step": best, "faults": list(self.faults)}


def item_score(row: ItemScores) -> RatioPart:
    """Of one line, from -1 to 1. A line that sent the recogniser round in circles was not understood; one without a
    voice of its own, as of two speakers, is judged by its words alone."""
    if row.looped or row.letter_errors is None:
        misheard = 1.0
    else:
        misheard = min(1.0, row.letter_errors / row.letters) if row.letters else 0.0
    return RatioPart((row.similarity or 0.0) - misheard)


def score_checkpoint(heard: StepScores, base: StepScores, floors: Constraints) -> CheckpointScore:
    """A checkpoint beside the untuned model, which is judged by this too."""
    figures = {key: _mean(key, heard.rows) for key in TOLD}
    change = _gain(heard.guard, base.guard)
    faults = [*_floors(figures, base, floors), *_forgotten(heard, base, change)]
    return CheckpointScore(
        step=heard.step,
        mark=estimate([item_score(row) for row in heard.rows]),
        gain=_gain(heard.rows, base.rows) if heard.step != base.step else Estimate(),
        guard_change=change if heard.step != base.step else Estimate(),
        faults=tuple(faults),
        marks={row.id: item_score(row).above for row in heard.rows},
        figures=figures,
    )


def best_checkpoint(verdicts: Iterable[CheckpointScore]) -> CheckpointScore | None:
    """The best of them, or None where none may be. The untuned model is no checkpoint."""
    best: CheckpointScore | None = None
    for one in sorted(verdicts, key=lambda one: one.step):
        if one.step > 0 and one.may_be_best and (best is None or one.is_better_than(best)):
            best = one
    return best


def quality_floor(base: Sequence[ItemScores], floors: Constraints) -> float | None:
    """The DistillMOS that a checkpoint must have; None where nobody knows what the untuned model has."""
    if floors.quality is not None:
        return floors.quality
    untuned = _mean("distillmos", base)
    return untuned - QUALITY_MAY_FALL if untuned is not None else None


def _floors(figures: Mapping[str, float | None], base: StepScores, floors: Constraints) -> list[str]:
    found = []
    stops, quality, lowest = figures["stop_rate"], figures["distillmos"], quality_floor(base.rows, floors)
    if (stops or 0.0) < floors.stop_rate:
        found.append(f"it finds the end of {stops or 0.0:.0%} of the lines, and {floors.stop_rate:.0%} are asked for")
    if quality is None:
        # Every line was silent, or was broken off before there was anything to hear.
        found.append("there is nothing to hear of it")
    elif lowest is not None and quality < lowest:
        found.append(f"its DistillMOS is {quality:.2f}, and {lowest:.2f} is asked for")
    return found


def _forgotten(heard: StepScores, base: StepScores, change: Estimate) -> list[str]:
    """What it could do before, and others' lines show that it can no longer."""
    found = []
    if change.mean is not None and change.high is not None and change.high < 0 and -change.mean >= AUDIBLE:
        interval = f"[{-change.high:.3f}, {-(change.low or 0.0):.3f}]"
        found.append(f"it has become worse at the guard's lines, by {-change.mean:.3f} {interval}")
    stops = _change("stop_rate", heard.guard, base.guard)
    if stops.high is not None and stops.high < 0:
        found.append(f"it finds the end of {-(stops.mean or 0):.0%} fewer of the guard's lines than the untuned model")
    return found


def _mean(key: str, rows: Sequence[ItemScores]) -> float | None:
    return estimate([part for row in rows if (part := BY_KEY[key].part(row)) is not None]).mean


def _gain(rows: Sequence[ItemScores], base: Sequence[ItemScores]) -> Estimate:
    known = {row.id: item_score(row) for row in base}
    pairs = [(item_score(row), known[row.id]) for row in rows if row.id in known]
    return difference([one for one, _ in pairs], [other for _, other in pairs])


def _change(key: str, rows: Sequence[ItemScores], base: Sequence[ItemScores]) -> Estimate:
    part, known = BY_KEY[key].part, {row.id: row for row in base}
    pairs = [(one, other) for row in rows if row.id in known and (one := part(row)) and (other := part(known[row.id]))]
    return difference([one for one, _ in pairs], [other for _, other in pairs])
