"""The course of a training by ear: what came of it in words, and a page with the steps side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from myna.evaluate.metrics import BY_KEY
from myna.evaluate.pipeline import sound_of
from myna.evaluate.ranking import (
    AUDIBLE,
    CheckpointScore,
    Constraints,
    StepScores,
    best_checkpoint,
    item_score,
    quality_floor,
    score_checkpoint,
)
from myna.evaluate.report import SOUND_RATE
from myna.evaluate.scoring import ItemScores
from myna.report.document import document
from myna.report.markup import Markup, element, join, table
from myna.report.player import clip
from myna.report.plot import Curve, plot
from myna.statistics import Estimate, estimate

SHOWN = 6
"""Lines with players, each as it was at several steps; the sounds of all lie beside the page."""
COLUMNS = ("wer", "similarity", "distillmos", "stop_rate")
RULE = (
    "The mark of a line is how alike its voice is, less the share of its letters that was not understood; a "
    "checkpoint has the mean over its lines. The first is the best until a later one is better on the same lines by "
    "more than one standard error. Only those count that find the end of enough lines, sound good enough, and have not "
    "become worse at the lines of the guard."
)


@dataclass(frozen=True)
class TrainingHistory:
    """Everything that was heard of a run, the untuned model first."""

    name: str
    listenings: Sequence[StepScores]
    floors: Constraints
    real: Sequence[ItemScores] = ()
    """The real recordings of the lines, where there are such."""

    @cached_property
    def verdicts(self) -> list[CheckpointScore]:
        return [score_checkpoint(heard, self.listenings[0], self.floors) for heard in self.listenings]

    @property
    def best(self) -> CheckpointScore | None:
        return best_checkpoint(self.verdicts)

    @property
    def goes_up(self) -> bool:
        """Whether the latest that may be the best has a higher mark than those before it, be it sure or not."""
        *before, latest = self.verdicts
        known = [one.mark.mean or 0.0 for one in before if one.step > 0 and one.may_be_best]
        return latest.may_be_best and (latest.mark.mean or 0.0) > max(known, default=-1.0)


def conclusion(course: TrainingHistory) -> list[str]:
    """What a person should know at the end: which step is the best, whether it was worth it, and why if not."""
    verdicts, best = course.verdicts, course.best
    if len(verdicts) < 2:
        return ["only the untuned model was heard, so there is nothing to compare it with"]
    overruled = _overruled(verdicts, best)
    if best is not None and best.beats_base:
        return [f"step {best.step} was heard best: {_marked(best)} over the untuned model", *_figures(best), *overruled]
    told = [] if best is not None else ["no checkpoint may be called the best, so the last one is the result"]
    highest = best or max(verdicts[1:], key=lambda one: one.mark.mean or -1.0)
    if not highest.beats_base:
        told += [
            f"no checkpoint is better to hear than the untuned model beyond its interval: the highest is step "
            f"{highest.step}, {_marked(highest)}",
            f"likely reasons: {'; '.join(_reasons(course, highest))}",
        ]
    return [*told, *_figures(highest), *overruled]


def page(course: TrainingHistory, folder: Path) -> str:
    """`folder` holds a folder for each step, and `real`."""
    best, latest = course.best, course.listenings[-1]
    title = f"{course.name}, heard while it learned"
    return document(
        title,
        element("h1", title),
        *(element("p", f"{text[0].upper()}{text[1:]}.", class_="lead") for text in conclusion(course)),
        element("h2", "Step by step"),
        element("p", RULE),
        element("p", _asked(course), class_="note"),
        _table(course.verdicts, best),
        _plot(course),
        element("h2", "Listen"),
        *_listen(course, best.step if best is not None else latest.step, folder),
        element("footer", element("p", "Every line of every step lies beside this page, with its picture.")),
    )


def step_folder(step: int) -> str:
    return f"step-{step:06d}"


def _marked(verdict: CheckpointScore) -> str:
    return f"mark {verdict.mark.mean:.3f}, {_shown(verdict.gain, signed=True)}"


def _shown(figure: Estimate, *, signed: bool = False) -> str:
    if figure.mean is None:
        return "not measured"
    sign = "+" if signed else ""
    return f"{figure.mean:{sign}.3f} [{figure.low:{sign}.3f}, {figure.high:{sign}.3f}]"


def _figures(verdict: CheckpointScore) -> list[str]:
    told = [
        f"{BY_KEY[key].title} {BY_KEY[key].show(value)}"
        for key in COLUMNS
        if (value := verdict.figures[key]) is not None
    ]
    return [f"at step {verdict.step}: {', '.join(told)}"]


def _overruled(verdicts: Sequence[CheckpointScore], best: CheckpointScore | None) -> list[str]:
    """Checkpoints that would be the best if a floor or the guard did not speak against them."""
    least = best.mark.mean if best is not None and best.mark.mean is not None else -1.0
    higher = [one for one in verdicts if one.step > 0 and one.faults and (one.mark.mean or -1.0) > least]
    return [
        f"step {one.step} has the mark {one.mark.mean:.3f} and cannot be the best: {' and '.join(one.faults)}"
        for one in higher
    ]


def _reasons(course: TrainingHistory, best: CheckpointScore) -> list[str]:
    """Why nothing was gained, as far as what was heard can tell."""
    verdicts = course.verdicts
    tuned = [one for one in verdicts if one.step > 0]
    base, chosen = course.listenings[0], next(one for one in course.listenings if one.step == best.step)
    said = {row.id: row.sound_hash for row in base.rows}
    if all(said.get(row.id) == row.sound_hash for heard in course.listenings for row in heard.rows):
        return [
            "every line is said exactly as the untuned model says it: train.learning_rate is too low, or the run too "
            "short, to change anything"
        ]
    found = []
    real = estimate([item_score(row) for row in course.real]).mean
    untuned = verdicts[0].mark.mean or 0.0
    if real is not None and untuned >= real - AUDIBLE:
        found.append("to these ears the untuned model is as good as the real recordings, so there is nothing to gain")
    gain = best.gain.mean or 0.0
    if gain >= AUDIBLE:
        found.append(
            f"{len(chosen.rows)} lines are too few to be sure of so small a difference: raise speech_eval.limit, and "
            "see that it has the lines"
        )
    elif best.gain.high is not None and best.gain.high < 0:
        found.append(
            "training has made it worse: train.learning_rate is too high, or texts do not belong to their recordings"
        )
    if len(tuned) > 1 and best.step == tuned[0].step and (tuned[-1].mark.mean or 0.0) < (best.mark.mean or 0.0):
        found.append("it was best at first and became worse: it learns by heart, so fewer steps or more data may help")
    if len(tuned) > 1 and best.step == tuned[-1].step:
        found.append("it was still becoming better at the end: train for longer")
    return found or ["the run is too short, train.learning_rate is too low, or the data does not suit the model"]


def _asked(course: TrainingHistory) -> str:
    lowest = quality_floor(course.listenings[0].rows, course.floors)
    quality = f", and a DistillMOS of {lowest:.2f}" if lowest is not None else ""
    return f"Asked of the best: the end of {course.floors.stop_rate:.0%} of the lines{quality}."


def _table(verdicts: Sequence[CheckpointScore], best: CheckpointScore | None) -> Markup:
    guarded = any(one.guard_change.n for one in verdicts)
    rows = []
    for one in verdicts:
        cells: list[object] = [_shown(one.mark), _shown(one.gain, signed=True) if one.step else ""]
        cells += [BY_KEY[key].show(one.figures[key]) for key in COLUMNS]
        cells += [_shown(one.guard_change, signed=True) if one.step else ""] if guarded else []
        verdict = "the best" if best is not None and one.step == best.step else "; ".join(one.faults)
        mood = "good" if best is not None and one.step == best.step else "bad"
        cells.append(element("span", verdict, class_=mood) if one.step else "")
        rows.append([f"step {one.step}" if one.step else "untuned", *cells])
    titles = [BY_KEY[key].title for key in COLUMNS]
    header = ["", "mark", "over the untuned", *titles, *(["guard's lines"] if guarded else []), ""]
    return table(header, rows, caption="What was heard at each step")


def _plot(course: TrainingHistory) -> Markup:
    verdicts = course.verdicts
    marks = [(float(one.step), one.mark.mean) for one in verdicts if one.mark.mean is not None]
    return plot([Curve("mark", marks, "dots")], title="The mark over the steps", across="steps", upwards="mark")


def _listen(course: TrainingHistory, shown: int, folder: Path) -> list[Markup]:
    """Some lines: as recorded, as the untuned model says them, as the best and as the latest step do."""
    steps = dict.fromkeys((course.listenings[0].step, shown, course.listenings[-1].step))
    names = {step: f"step {step}" if step else "untuned" for step in steps}
    of = {heard.step: {row.id: row for row in heard.rows} for heard in course.listenings if heard.step in steps}
    real = {row.id: row for row in course.real}
    made = []
    for row in course.listenings[0].rows[:SHOWN]:
        said: dict[str, tuple[ItemScores, Path]] = {"real": (real[row.id], folder / "real")} if row.id in real else {}
        said |= {names[step]: (of[step][row.id], folder / step_folder(step)) for step in steps}
        made.append(_line(row, said))
    return made


def _line(row: ItemScores, said: Mapping[str, tuple[ItemScores, Path]]) -> Markup:
    longest = max(one.seconds for one, _ in said.values())
    clips = [
        clip(
            sound_of(one, folder, SOUND_RATE),
            SOUND_RATE,
            title=name,
            label=f"{row.id}, {name}",
            longest=longest,
            note=f"mark {item_score(one).above:.2f}: “{one.heard or ''}”",
        )
        for name, (one, folder) in said.items()
    ]
    about = " · ".join(part for part in (row.id, row.speaker, row.language) if part)
    return element(
        "section",
        element("h3", row.text),
        element("p", about, class_="note"),
        join(
            [element("div", *clips, class_="trio", style="grid-template-columns:repeat(auto-fit, minmax(14rem, 1fr))")]
        ),
        class_="card",
    )
