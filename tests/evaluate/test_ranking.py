"""Which checkpoint is the best to hear, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from myna.evaluate.history import TrainingHistory, conclusion, page
from myna.evaluate.ranking import (
    CheckpointScore,
    Constraints,
    StepScores,
    best_checkpoint,
    item_score,
    quality_floor,
    score_checkpoint,
)
from myna.evaluate.scoring import ItemScores

FLOORS = Constraints(stop_rate=0.9)
LINES = 20


def row(line: int = 0, **said: Any) -> ItemScores:
    heard: dict[str, Any] = {"similarity": 0.8, "letters": 10, "letter_errors": 0, "looped": False, "distillmos": 3.5}
    heard |= {"stopped": True, "heard": "so", "word_errors": 0, "words": 2, "seconds": 1.0} | said
    known = {"stopped": heard.pop("stopped"), "expected_seconds": 1.0}
    sound = f"{line} {sorted(said.items())}"
    made = ItemScores("spoken", f"line-{line}", "", "so it is", "wren", "en", "line", "", sound, **known)
    return replace(made, **heard)


def heard(step: int, gain: float = 0.0, guard: float | None = None, **said: Any) -> StepScores:
    """Twenty lines that differ among themselves, and from those of other steps by a little more than by `gain`."""
    dice = np.random.default_rng(step)

    def lines(by: float) -> list[ItemScores]:
        alike = [0.6 + 0.01 * n + by + 0.01 * dice.standard_normal() for n in range(LINES)]
        return [row(n, **{"similarity": alike[n]} | said) for n in range(LINES)]

    return StepScores(step, lines(gain), lines(guard) if guard is not None else [])


def verdicts(*listenings: StepScores, floors: Constraints = FLOORS) -> list[CheckpointScore]:
    return [score_checkpoint(one, listenings[0], floors) for one in listenings]


# The mark


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, 0.8),
        ({"letter_errors": 2}, 0.6),
        ({"letter_errors": 30}, -0.2),
        ({"letter_errors": 0, "looped": True}, -0.2),
        ({"similarity": None, "letter_errors": 5}, -0.5),
        ({"letters": 0}, 0.8),
    ],
    ids=["as it should be", "misheard", "at most wholly", "a loop is not understood", "no voice", "nothing to spell"],
)
def test_a_line_is_marked_by_voice_and_letters(said: dict[str, Any], expected: float) -> None:
    assert item_score(row(**said)).above == pytest.approx(expected) and item_score(row(**said)).below == 1.0


# The rule


def test_what_is_surely_better_is_the_best_and_the_earlier_of_two() -> None:
    base, first, second, third = verdicts(heard(0), heard(10, 0.05), heard(20, 0.1), heard(30, 0.08))
    best = best_checkpoint([base, first, second, third])
    assert best is second and second.beats_base and first.beats_base and not base.beats_base
    assert second.gain.mean == pytest.approx(0.1, abs=0.01) and base.gain.n == 0
    assert best_checkpoint([replace(second, step=40), second]) is second
    assert best_checkpoint([base]) is None, "the untuned model is no checkpoint"


def test_what_a_few_lines_decide_is_not_better() -> None:
    """A later checkpoint has to be better on the same lines by more than one standard error of the difference."""
    base, first = verdicts(heard(0), heard(10, 0.05))

    def later(step: int, *more: float) -> CheckpointScore:
        """Better than the first by so much on its lines, taking turns."""
        marks = {line: value + more[n % len(more)] for n, (line, value) in enumerate(first.marks.items())}
        return replace(first, step=step, marks=marks)

    lucky, steady = later(20, 0.1, -0.08), later(30, 0.03, 0.01)  # by 0.01 and 0.021, and by 0.02 and 0.002
    assert not lucky.is_better_than(first) and steady.is_better_than(first) and not first.is_better_than(steady)
    assert best_checkpoint([base, first, lucky]) is first and best_checkpoint([base, first, lucky, steady]) is steady
    assert not first.is_better_than(first) and not replace(first, marks={}).is_better_than(first)
    one_line = replace(first, marks={"line-3": 1.0})
    assert one_line.is_better_than(first), "on the lines that both have said"


def test_similarity_does_not_make_up_for_words() -> None:
    base, alike, clear = verdicts(heard(0), heard(10, 0.1, letter_errors=3), heard(20, 0.05))
    assert best_checkpoint([base, alike, clear]) is clear and not alike.beats_base


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ({"stopped": False}, "finds the end of 0% of the lines, and 90% are asked for"),
        ({"distillmos": 2.9}, "its DistillMOS is 2.90, and 3.00 is asked for"),
        ({"distillmos": None}, "there is nothing to hear of it"),
    ],
)
def test_floors_are_kept_however_high_the_mark(said: dict[str, Any], fault: str) -> None:
    base, poor, fine = verdicts(heard(0), heard(10, 0.3, **said), heard(20, 0.05))
    assert fault in poor.faults[0] and best_checkpoint([base, poor, fine]) is fine
    assert poor.row(20)["faults"] == list(poor.faults) and poor.row(20)["best_step"] == 20


def test_the_quality_that_is_asked_for_comes_before_what_the_base_has() -> None:
    rows = heard(0).rows
    assert quality_floor(rows, FLOORS) == 3.0 and quality_floor(rows, Constraints(0.9, quality=3.4)) == 3.4
    _, poor = verdicts(heard(0), heard(10, 0.1, distillmos=3.3), floors=Constraints(0.9, quality=3.4))
    assert "3.40 is asked for" in poor.faults[0]


def test_what_forgets_is_not_the_best() -> None:
    base, forgets, keeps = verdicts(heard(0, guard=0.0), heard(10, 0.2, guard=-0.1), heard(20, 0.1, guard=-0.0005))
    assert "become worse at the guard's lines, by 0.1" in forgets.faults[0] and not keeps.faults
    assert best_checkpoint([base, forgets, keeps]) is keeps
    assert forgets.row(20)["guard_high"] < 0 and "guard_change" not in base.row(None)
    never_ends = StepScores(30, heard(30, 0.2).rows, [row(n, stopped=False) for n in range(LINES)])
    told = score_checkpoint(never_ends, heard(0, guard=0.0), FLOORS).faults
    assert any("finds the end of 100% fewer of the guard's lines" in fault for fault in told)


def test_it_may_go_up_without_being_better() -> None:
    def course(*gains: float) -> TrainingHistory:
        return TrainingHistory("run", [heard(10 * n, gain) for n, gain in enumerate((0.0, *gains))], FLOORS)

    assert course(0.05, 0.0505).goes_up and course(0.05).goes_up and not course(0.05, 0.02).goes_up
    assert not TrainingHistory("run", [heard(0), heard(10, 0.05), heard(20, 0.1, stopped=False)], FLOORS).goes_up


# In words


def told(*listenings: StepScores, real: Sequence[ItemScores] = (), floors: Constraints = FLOORS) -> str:
    return "\n".join(conclusion(TrainingHistory("run", listenings, floors, real)))


def test_a_gain_is_told_with_its_interval() -> None:
    text = told(heard(0), heard(10, 0.1), heard(20, 0.05))
    assert (
        "step 10 was heard best: mark 0.792, +0.099 [" in text and "similarity" in text and "likely reasons" not in text
    )


def test_no_gain_is_told_with_likely_reasons() -> None:
    base = heard(0)
    same = [StepScores(step, base.rows) for step in (0, 10, 20)]
    assert "no checkpoint is better to hear than the untuned model beyond its interval" in told(*same)
    assert "every line is said exactly as the untuned model says it" in told(*same)
    worse = told(base, heard(10, -0.1), heard(20, -0.2))
    assert "training has made it worse" in worse and "it was best at first and became worse" in worse
    assert "as good as the real recordings" in told(base, heard(10, -0.001), real=heard(1).rows)
    few = [StepScores(one.step, one.rows[:2]) for one in (base, heard(10, 0.02, letter_errors=0))]
    few[1].rows[0].similarity = 0.5
    few[1].rows[1].similarity = 0.8
    assert "2 lines are too few to be sure" in told(*few)
    assert "still becoming better at the end" in told(base, heard(10, -0.2), heard(20, -0.1))


def test_what_is_ruled_out_is_told() -> None:
    base, silent = heard(0), heard(10, 0.3, distillmos=None)
    assert "no checkpoint may be called the best, so the last one is the result" in told(base, silent)
    assert "better to hear than the untuned model" not in told(base, silent), "it would be, if it could be heard"
    damaged = told(base, heard(10, -0.3, distillmos=1.0), heard(20, -0.2, distillmos=2.0))
    assert "no checkpoint may be called the best" in damaged and "the highest is step 20" in damaged
    assert "training has made it worse" in damaged and damaged.count("and cannot be the best: its DistillMOS") == 2
    ruled_out = told(base, silent, heard(20, 0.1))
    assert "step 20 was heard best" in ruled_out and "and cannot be the best: there is nothing to hear" in ruled_out
    assert "nothing to compare" in told(base)


def test_the_page_says_so_too(tmp_path: Path) -> None:
    course = TrainingHistory(
        "<mine>", [heard(0, guard=0.0), heard(10, 0.2, guard=-0.1), heard(20, 0.1, guard=0.0)], FLOORS
    )
    made = page(course, tmp_path)
    assert "Step 20 was heard best" in made and "become worse at the guard&#x27;s lines" in made
    assert "&lt;mine&gt;, heard while it learned" in made and "guard&#x27;s lines</th>" in made
    assert "a DistillMOS of 3.00" in made and made.count("<section") == 6
