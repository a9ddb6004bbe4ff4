"""How well a model judges pronunciation: its answers beside those that were due, each figure with its interval.

An answer that cannot be read counts as one that says nothing: all its words and phones are errors, it finds no mistake,
and its scores are the middle of the scale. To leave it out would make a model look better the more it rambles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from myna.data.pronunciation.assessment import SCORES, Answer, Assessment, Readings, read_assessment
from myna.data.utterance import Utterance
from myna.evaluate.wer import edit_distance, word_errors
from myna.statistics import DRAWS, LEVEL, SEED, Estimate, RatioPart, estimate

MIDDLE = 5.0
"""The score of an answer that gives none."""
WORDS, PHONES, F1 = "word error rate", "phone error rate", "F1 of mistakes"
PUBLISHED_FOR = "speechocean762"
PAPER = {"accuracy": 0.656, "fluency": 0.727, "prosodic": 0.711, "total": 0.675, WORDS: 0.140, PHONES: 0.114, F1: 0.724}
"""What "English Pronunciation Evaluation without Complex Joint Training" reports on SpeechOcean762."""


@dataclass(frozen=True, slots=True)
class Due:
    """What an utterance was worth, as a manifest tells it."""

    assessment: Assessment
    corpus: str = ""

    @classmethod
    def of(cls, utterance: Utterance) -> Due | None:
        """None for one whose answer is no assessment."""
        known = utterance.extras.get("assessment")
        return cls(read_assessment(known), str(utterance.extras.get("corpus", ""))) if known else None


@dataclass(frozen=True, slots=True)
class Judgement:
    figures: dict[str, Estimate]
    """Correlations of the scores, error rates of words and phones, and the F1 of finding what was said wrongly."""
    utterances: int
    unreadable: dict[str, int]
    """Answers that are none, by reason."""

    def table(self, unhearing: Judgement, *, published: bool) -> Iterator[tuple[str, ...]]:
        """Rows for people: ours, who hears no mistake, and the paper's where it is of the same recordings."""
        for name, figure in self.figures.items():
            other = unhearing.figures[name] if name in (PHONES, F1) else Estimate()
            paper = f"{PAPER[name]:.3f}" if published else ""
            yield name, _shown(figure), _shown(other), paper

    def to_json(self) -> dict[str, Any]:
        figures = {name: figure.to_json() for name, figure in self.figures.items()}
        return {"utterances": self.utterances, "unreadable": self.unreadable, "figures": figures}


def score_answers(due: Sequence[Assessment], said: Sequence[str], language: str = "en") -> Judgement:
    """Answers as a model gave them, in the order of what was due."""
    readings = Readings.of(said)
    pairs = list(zip(due, readings.answers, strict=True))
    figures = {
        name: correlation([(getattr(one.scores, name), getattr(other, name, MIDDLE)) for one, other in pairs])
        for name in SCORES
    }
    errors = [word_errors(one.text, other.text if other else "", language) for one, other in pairs]
    figures[WORDS] = estimate([RatioPart(error.errors, error.words) for error in errors])
    heard = [(one.heard, _phones(other)) for one, other in pairs]
    figures[PHONES] = estimate([RatioPart(edit_distance(one, other), len(one)) for one, other in heard])
    figures[F1] = estimate([_found(*pair) for pair in pairs])
    return Judgement(figures, len(due), dict(readings.unreadable))


def canonical(due: Sequence[Assessment]) -> list[str]:
    """What a model would say that knows the text and hears no mistake: whoever listens must do better."""
    return [each.answer.model_copy(update={"phones": " ".join(each.phones)}).to_json() for each in due]


def correlation(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """Pearson's, with an interval over pairs drawn anew. None where one side never varies, and so goes with nothing."""
    table = np.array(pairs, np.float64).reshape(-1, 2)
    lines = len(table)
    if not lines or (np.ptp(table, axis=0) == 0).any():
        return Estimate(n=0)
    drawn = np.random.default_rng(SEED).multinomial(lines, np.full(lines, 1 / lines), size=DRAWS)
    one, other = (table - table.mean(axis=0)).T
    powers = np.stack([one, other, one * one, other * other, one * other], axis=1)

    def pearson(weights: Any) -> Any:
        x, y, xx, yy, xy = (weights @ powers / lines).T
        spread = (xx - x * x) * (yy - y * y)
        # A draw may hold one pair many times over, and then varies in rounding alone.
        return np.where(spread > 1e-12, (xy - x * y) / np.sqrt(np.maximum(spread, 1e-12)), np.nan)

    told = pearson(drawn)
    outside = 100 * (1 - LEVEL) / 2
    low, high = np.nanpercentile(told, [outside, 100 - outside])
    return Estimate(float(pearson(np.ones((1, lines)))[0]), float(low), float(high), lines)


def mistakes(meant: Sequence[str], heard: Sequence[str]) -> tuple[bool, ...]:
    """For every phone that was to be said, whether it was said otherwise or not at all, by the fewest errors."""
    costs = np.zeros((len(meant) + 1, len(heard) + 1), np.int64)
    costs[:, 0], costs[0] = np.arange(len(meant) + 1), np.arange(len(heard) + 1)
    for i, phone in enumerate(meant, start=1):
        for j, other in enumerate(heard, start=1):
            costs[i, j] = min(costs[i - 1, j - 1] + (phone != other), costs[i - 1, j] + 1, costs[i, j - 1] + 1)
    wrong = [False] * len(meant)
    i, j = len(meant), len(heard)
    while i:
        changed = j > 0 and meant[i - 1] != heard[j - 1]
        if j and costs[i, j] == costs[i - 1, j - 1] + changed:
            wrong[i - 1] = changed
            i, j = i - 1, j - 1
        elif costs[i, j] == costs[i - 1, j] + 1:
            wrong[i - 1] = True
            i -= 1
        else:
            j -= 1
    return tuple(wrong)


def _found(due: Assessment, answer: Answer | None) -> RatioPart:
    """F1 as a fraction of sums: twice what was found, of what there is and what was claimed."""
    there = mistakes(due.phones, due.heard)
    claimed = mistakes(due.phones, _phones(answer)) if answer is not None else (False,) * len(there)
    found = sum(one and other for one, other in zip(there, claimed, strict=True))
    return RatioPart(2 * found, sum(there) + sum(claimed))


def _shown(figure: Estimate) -> str:
    return "" if figure.mean is None else f"{figure.mean:.3f} ({figure.low:.3f} to {figure.high:.3f})"


def _phones(answer: Answer | None) -> list[str]:
    return answer.phones.split() if answer is not None else []
