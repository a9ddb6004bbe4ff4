"""Choice of the checkpoint that speaks best, and what is reported of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from myna.core.config import SpeechEvalSettings
from myna.evaluate.callback import training_page
from myna.evaluate.items import EvalItem, split_items
from myna.evaluate.ranking import (
    CheckpointScore,
    StepScores,
    TrainingHistory,
    best_checkpoint,
    item_score,
    required_mos,
    score_checkpoint,
    training_conclusion,
)
from myna.evaluate.scoring import ItemScores

CONSTRAINTS = SpeechEvalSettings()
LINES = 20


def row(line: int = 0, **said: Any) -> ItemScores:
    heard: dict[str, Any] = {
        "similarity": 0.8,
        "characters": 10,
        "character_errors": 0,
        "looped": False,
        "distillmos": 3.5,
    }
    heard |= {"stopped": True, "transcript": "so", "word_errors": 0, "words": 2, "seconds": 1.0} | said
    known = {"stopped": heard.pop("stopped"), "expected_seconds": 1.0}
    sound = f"{line} {sorted(said.items())}"
    made = ItemScores("spoken", f"line-{line}", "", "so it is", "wren", "en", "sentence", "", sound, **known)
    return replace(made, **heard)


def step_scores(step: int, gain: float = 0.0, forgetting: float | None = None, **said: Any) -> StepScores:
    """Twenty lines that differ among themselves, and from those of other steps by a little more than by `gain`."""
    rng = np.random.default_rng(step)

    def lines(by: float) -> list[ItemScores]:
        alike = [0.6 + 0.01 * n + by + 0.01 * rng.standard_normal() for n in range(LINES)]
        return [row(n, **{"similarity": alike[n]} | said) for n in range(LINES)]

    return StepScores(step, lines(gain), lines(forgetting) if forgetting is not None else [], lines(gain))


def checkpoint_scores(*steps: StepScores, constraints: SpeechEvalSettings = CONSTRAINTS) -> list[CheckpointScore]:
    return [score_checkpoint(one, steps[0], constraints) for one in steps]


# The mark


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, 0.8),
        ({"character_errors": 2}, 0.6),
        ({"character_errors": 30}, -0.2),
        ({"character_errors": 0, "looped": True}, -0.2),
        ({"similarity": None, "character_errors": 5}, -0.5),
        ({"characters": 0}, 0.8),
    ],
    ids=["as it should be", "misheard", "at most wholly", "a loop is not understood", "no voice", "nothing to spell"],
)
def test_the_score_of_an_item_is_similarity_less_character_errors(said: dict[str, Any], expected: float) -> None:
    assert item_score(row(**said)) == pytest.approx(expected)


# The rule


def test_the_best_is_surely_better_and_the_earlier_of_equals() -> None:
    base, first, second, third = checkpoint_scores(
        step_scores(0), step_scores(10, 0.05), step_scores(20, 0.1), step_scores(30, 0.08)
    )
    best = best_checkpoint([base, first, second, third])
    assert best is second and second.beats_base and first.beats_base and not base.beats_base
    assert second.gain.mean == pytest.approx(0.1, abs=0.01) and base.gain.n == 0
    assert best_checkpoint([replace(second, step=40), second]) is second
    assert best_checkpoint([base]) is None, "the untuned model is no checkpoint"


def test_only_items_that_chose_nothing_confirm_a_gain() -> None:
    base, lucky = step_scores(0), replace(step_scores(10, 0.2), confirmation=step_scores(11).rows)
    _, scored = checkpoint_scores(base, lucky)
    assert scored.gain.low is not None and scored.gain.low > 0.15 and not scored.beats_base
    assert scored.to_json(10)["gain"] > 0.15 and abs(scored.to_json(10)["confirmed_gain"]) < 0.02
    assert "confirmed_gain" not in checkpoint_scores(base, replace(lucky, confirmation=()))[1].to_json(10)


def test_items_are_split_by_speaker_whatever_their_order() -> None:
    items = [EvalItem(f"{speaker}-{n}", "so", speaker) for speaker in ("wren", "robin", "heron") for n in range(5)]
    choosing, confirming = split_items(items, seed=0)
    assert (len(choosing), len(confirming)) == (8, 7) and {*choosing, *confirming} == {*items}
    assert set(Counter(item.speaker for item in choosing).values()) <= {2, 3}
    again = split_items(items[::-1], seed=0)
    assert set(again[0]) == set(choosing) and again[0] == choosing[::-1]
    assert split_items(items, seed=1)[0] != choosing and split_items(items[:1], seed=0) == (items[:1], [])


def test_a_difference_on_a_few_items_is_not_better() -> None:
    """A later checkpoint has to be better on the same lines by more than one standard error of the difference."""
    base, first = checkpoint_scores(step_scores(0), step_scores(10, 0.05))

    def later(step: int, *more: float) -> CheckpointScore:
        """Better than the first by so much on its lines, taking turns."""
        item_scores = {line: value + more[n % len(more)] for n, (line, value) in enumerate(first.item_scores.items())}
        return replace(first, step=step, item_scores=item_scores)

    lucky, steady = later(20, 0.1, -0.08), later(30, 0.03, 0.01)  # by 0.01 and 0.021, and by 0.02 and 0.002
    assert not lucky.is_better_than(first) and steady.is_better_than(first) and not first.is_better_than(steady)
    assert best_checkpoint([base, first, lucky]) is first and best_checkpoint([base, first, lucky, steady]) is steady
    assert not first.is_better_than(first) and not replace(first, item_scores={}).is_better_than(first)
    one_line = replace(first, item_scores={"line-3": 1.0})
    assert one_line.is_better_than(first), "on the lines that both have said"


def test_similarity_does_not_outweigh_word_errors() -> None:
    base, alike, clear = checkpoint_scores(
        step_scores(0), step_scores(10, 0.1, character_errors=3), step_scores(20, 0.05)
    )
    assert best_checkpoint([base, alike, clear]) is clear and not alike.beats_base


@pytest.mark.parametrize(
    ("said", "violation"),
    [
        ({"stopped": False}, "finds the end of 0% of the items, and 90% are required"),
        ({"distillmos": 2.9}, "its DistillMOS is 2.90, and 3.00 is required"),
        ({"distillmos": None}, "there is nothing to hear of it"),
    ],
)
def test_constraints_hold_for_every_score(said: dict[str, Any], violation: str) -> None:
    base, poor, fine = checkpoint_scores(step_scores(0), step_scores(10, 0.3, **said), step_scores(20, 0.05))
    assert violation in poor.violations[0] and best_checkpoint([base, poor, fine]) is fine
    assert poor.to_json(20)["violations"] == list(poor.violations) and poor.to_json(20)["best_step"] == 20


def test_a_required_mos_replaces_that_of_the_base() -> None:
    rows = step_scores(0).rows
    assert required_mos(rows, CONSTRAINTS) == 3.0 and required_mos(rows, SpeechEvalSettings(min_mos=3.4)) == 3.4
    _, poor = checkpoint_scores(
        step_scores(0),
        step_scores(10, 0.1, distillmos=3.3),
        constraints=SpeechEvalSettings(min_mos=3.4),
    )
    assert "3.40 is required" in poor.violations[0]


def test_a_worse_forgetting_set_rules_a_checkpoint_out() -> None:
    base, forgets, keeps = checkpoint_scores(
        step_scores(0, forgetting=0.0), step_scores(10, 0.2, forgetting=-0.1), step_scores(20, 0.1, forgetting=-0.0005)
    )
    assert "become worse at the forgetting set, by 0.1" in forgets.violations[0] and not keeps.violations
    assert best_checkpoint([base, forgets, keeps]) is keeps
    assert forgets.to_json(20)["forgetting_high"] < 0 and "forgetting_change" not in base.to_json(None)
    never_ends = StepScores(30, step_scores(30, 0.2).rows, [row(n, stopped=False) for n in range(LINES)])
    told = score_checkpoint(never_ends, step_scores(0, forgetting=0.0), CONSTRAINTS).violations
    assert any("finds the end of 100% fewer items of the forgetting set" in violation for violation in told)


def test_the_highest_score_may_not_be_the_best() -> None:
    def history(*gains: float) -> TrainingHistory:
        return TrainingHistory("run", [step_scores(10 * n, gain) for n, gain in enumerate((0.0, *gains))], CONSTRAINTS)

    assert history(0.05, 0.0505).is_highest and history(0.05).is_highest and not history(0.05, 0.02).is_highest
    assert not TrainingHistory(
        "run", [step_scores(0), step_scores(10, 0.05), step_scores(20, 0.1, stopped=False)], CONSTRAINTS
    ).is_highest


# In words


def told(
    *steps: StepScores, recordings: Sequence[ItemScores] = (), constraints: SpeechEvalSettings = CONSTRAINTS
) -> str:
    return "\n".join(training_conclusion(TrainingHistory("run", steps, constraints, recordings)))


def test_a_gain_is_reported_with_its_interval() -> None:
    text = told(step_scores(0), step_scores(10, 0.1), step_scores(20, 0.05))
    assert text.startswith("step 10 is the best: score 0.792, +0.099 [") and "on 20 items that chose nothing" in text
    assert "similarity" in text and "likely reasons" not in text and "ASR loops in 0 items" in text


def test_a_missing_gain_is_reported_with_likely_reasons() -> None:
    base = step_scores(0)
    same = [replace(base, step=step) for step in (0, 10, 20)]
    assert told(*same).startswith(
        "no gain over the base model is confirmed; step 10 is the best: score 0.693, +0.000 ["
    )
    assert "every item is spoken exactly as by the base model" in told(*same)
    worse = told(base, step_scores(10, -0.1), step_scores(20, -0.2))
    assert "training has made it worse" in worse and "it was best at first and became worse" in worse
    assert "as good as the real recordings" in told(base, step_scores(10, -0.001), recordings=step_scores(1).rows)
    both = (base, step_scores(10, 0.02))
    few = told(*(replace(one, confirmation=one.confirmation[:11]) for one in both))
    assert "no gain over the base model is confirmed" in few and "11 items are too few to be sure" in few
    assert "12 are needed in any case" in few and "raise speech_eval.limit" in few
    assert told(*both).startswith("step 10 is the best")
    alone = told(*(replace(one, confirmation=()) for one in both))
    assert "no gain over the base model is confirmed" in alone and "the only item" in alone
    assert "still becoming better at the end" in told(base, step_scores(10, -0.2), step_scores(20, -0.1))


def test_ruled_out_checkpoints_are_named() -> None:
    base, silent = step_scores(0), step_scores(10, 0.3, distillmos=None)
    assert "no checkpoint may be called the best, so the last one is the result" in told(base, silent)
    assert "better than the base model" not in told(base, silent), "it would be, if it could be heard"
    damaged = told(base, step_scores(10, -0.3, distillmos=1.0), step_scores(20, -0.2, distillmos=2.0))
    assert "no checkpoint may be called the best" in damaged and "the highest is step 20" in damaged
    assert "training has made it worse" in damaged and damaged.count("and cannot be the best: its DistillMOS") == 2
    ruled_out = told(base, silent, step_scores(20, 0.1))
    assert "step 20 is the best" in ruled_out and "and cannot be the best: there is nothing to hear" in ruled_out
    assert "nothing to compare" in told(base)


def test_the_page_shows_the_conclusion(tmp_path: Path) -> None:
    history = TrainingHistory(
        "<mine>",
        [step_scores(0, forgetting=0.0), step_scores(10, 0.2, forgetting=-0.1), step_scores(20, 0.1, forgetting=0.0)],
        CONSTRAINTS,
    )
    made = training_page(history, tmp_path)
    assert "Step 20 is the best" in made and "become worse at the forgetting set" in made
    assert "&lt;mine&gt;, speech evaluations during training" in made and "forgetting set</th>" in made
    assert "a DistillMOS of 3.00" in made and made.count("<section") == 6
