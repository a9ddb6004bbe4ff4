"""Pronunciation metrics: a model's answers against the assessments of a corpus, each with a bootstrap interval.

An answer that cannot be parsed counts as an empty one: all its words and phones are errors, it finds no
mispronunciation, and its scores are the middle of the scale. To leave it out would flatter a model that rambles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from rapidfuzz.distance.Levenshtein import distance

from myna.core.statistics import BOOTSTRAP_DRAWS, BOOTSTRAP_SEED, CONFIDENCE_LEVEL, Estimate, RatioPart, estimate
from myna.data.pronunciation.assessment import SCORES, Assessment, AssessmentAnswer, ParsedAnswers, read_assessment
from myna.data.utterance import Utterance
from myna.text.normalization import words

MIDDLE_SCORE = 5.0
"""The score of an answer that gives none."""
CORRELATION = "correlation"
CANONICAL, ALL_WRONG = "canonical phones", "everything is wrong"
"""Baselines: the phones of the dictionary, so that nothing is mispronounced; and no phone as it should be."""
RIGHT_BY_DEFINITION = "right by definition"
"""In place of what a baseline takes from the assessment itself."""
WER, PER, MISPRONUNCIATION_F1 = "word error rate", "phone error rate", "F1 of mistakes"
PUBLISHED_CORPUS = "speechocean762"
PUBLISHED_FIGURES = {
    **{"accuracy": 0.656, "fluency": 0.727, "prosodic": 0.711, "total": 0.675},
    **{WER: 0.140, PER: 0.114, MISPRONUNCIATION_F1: 0.724},
}
"""What "English Pronunciation Evaluation without Complex Joint Training" reports on SpeechOcean762."""


@dataclass(frozen=True, slots=True)
class AnswerScores:
    """Metrics of a set of answers."""

    figures: dict[str, Estimate]
    """Correlations of the scores, error rates of words and phones, and the F1 of finding mispronounced phones."""
    utterances: int
    unreadable: dict[str, int]
    """Answers that cannot be parsed, by reason."""
    undefined: dict[str, str]
    """Figures that have no value, and why."""

    def to_json(self) -> dict[str, Any]:
        figures = {
            name: {"measure": CORRELATION if name in SCORES else name, **figure.to_json()}
            | ({"reason": self.undefined[name]} if name in self.undefined else {})
            for name, figure in self.figures.items()
        }
        return {"utterances": self.utterances, "unreadable": self.unreadable, "figures": figures}

    def format(self, name: str) -> str:
        figure = self.figures[name]
        if figure.mean is None:
            return self.undefined[name]
        return f"{figure.mean:.3f} ({figure.low:.3f} to {figure.high:.3f})"


class AssessmentTable(NamedTuple):
    """Metrics as text, for a terminal or a page, and the same for a JSON file."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    figures: dict[str, Any]


def stored_assessment(utterance: Utterance) -> Assessment | None:
    """The assessment of a manifest line; None where its answer is none."""
    tree = utterance.extras.get("assessment")
    return read_assessment(tree) if tree else None


def assessment_table(utterances: Iterable[Utterance], answers: Mapping[str, str]) -> AssessmentTable | None:
    """Metrics of answers by utterance id, beside those of two baselines and, on the same corpus, the published ones.
    None where an utterance has no assessment."""
    answered = [utterance for utterance in utterances if utterance.id in answers]
    stored = [stored_assessment(utterance) for utterance in answered]
    references = [assessment for assessment in stored if assessment is not None]
    if len(references) < len(answers):
        return None
    scores = score_answers(references, [answers[utterance.id] for utterance in answered])
    baselines = {
        CANONICAL: score_answers(references, canonical_answers(references)),
        ALL_WRONG: score_answers(references, baseline_answers(references, lambda _: "")),
    }
    is_published = {utterance.extras.get("corpus") for utterance in answered} == {PUBLISHED_CORPUS}
    by_phones = (PER, MISPRONUNCIATION_F1)
    rows = [
        (
            f"{name}, {CORRELATION}" if name in SCORES else name,
            scores.format(name),
            *(one.format(name) if name in by_phones else RIGHT_BY_DEFINITION for one in baselines.values()),
            *([f"{PUBLISHED_FIGURES[name]:.3f}"] if is_published else []),
        )
        for name in scores.figures
    ]
    header = ("", "model", *baselines, *(["published"] if is_published else []))
    title = f"{scores.utterances} utterances, {sum(scores.unreadable.values())} answers that cannot be read"
    figures = scores.to_json() | {
        "baselines": {
            name: {key: one.to_json()["figures"][key] for key in by_phones} for name, one in baselines.items()
        },
        "published": PUBLISHED_FIGURES if is_published else None,
    }
    return AssessmentTable(title, header, rows, figures)


def score_answers(references: Sequence[Assessment], answers: Sequence[str], language: str = "en") -> AnswerScores:
    """Metrics of answers as a model generated them, in the order of the references."""
    parsed = ParsedAnswers.of(answers)
    pairs = list(zip(references, parsed.answers, strict=True))
    figures = {
        name: pearson_correlation([(getattr(ref.scores, name), getattr(hyp, name, MIDDLE_SCORE)) for ref, hyp in pairs])
        for name in SCORES
    }
    texts = [(words(ref.text, language), words(hyp.text if hyp else "", language)) for ref, hyp in pairs]
    phones = [(ref.pronounced, _phones(hyp)) for ref, hyp in pairs]
    for name, sequences in ((WER, texts), (PER, phones)):
        figures[name] = estimate([RatioPart(distance(ref, hyp), len(ref)) for ref, hyp in sequences])
    figures[MISPRONUNCIATION_F1] = estimate([_f1_part(*pair) for pair in pairs])
    undefined = {name: _undefined_reason(name, pairs) for name, figure in figures.items() if figure.mean is None}
    return AnswerScores(figures, len(references), dict(parsed.unreadable), undefined)


def canonical_answers(references: Sequence[Assessment]) -> list[str]:
    """Baseline answers: the right transcript and scores with the canonical phones, so without a mispronunciation."""
    return baseline_answers(references, lambda reference: " ".join(reference.phones))


def baseline_answers(references: Sequence[Assessment], phones: Callable[[Assessment], str]) -> list[str]:
    """The right transcript and scores with other phones; without any, every phone is wrong."""
    return [ref.answer.model_copy(update={"phones": phones(ref)}).to_json() for ref in references]


def _undefined_reason(name: str, pairs: Sequence[tuple[Assessment, AssessmentAnswer | None]]) -> str:
    """Why a figure has no value."""
    if not pairs:
        return "there are no utterances"
    if name == MISPRONUNCIATION_F1:
        return "no phone is wrong, or called so"
    if name in (WER, PER):
        return f"no utterance has {'words' if name == WER else 'phones'}"
    if len(pairs) == 1:
        return "one utterance has no correlation"
    is_constant = len({getattr(reference.scores, name) for reference, _ in pairs}) == 1
    return "all utterances have the same score" if is_constant else "all answers give the same score"


def pearson_correlation(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """Pearson correlation with a bootstrap interval over pairs. None where one side is constant."""
    table = np.array(pairs, np.float64).reshape(-1, 2)
    count = len(table)
    if not count or (np.ptp(table, axis=0) == 0).any():
        return Estimate(n=0)
    draws = np.random.default_rng(BOOTSTRAP_SEED).multinomial(count, np.full(count, 1 / count), size=BOOTSTRAP_DRAWS)
    x, y = (table - table.mean(axis=0)).T
    moments = np.stack([x, y, x * x, y * y, x * y], axis=1)

    def pearson(weights: Any) -> Any:
        x, y, xx, yy, xy = (weights @ moments / count).T
        variance = (xx - x * x) * (yy - y * y)
        # A draw may hold one pair many times over, and then varies in rounding alone.
        return np.where(variance > 1e-12, (xy - x * y) / np.sqrt(np.maximum(variance, 1e-12)), np.nan)

    tail = 100 * (1 - CONFIDENCE_LEVEL) / 2
    low, high = np.nanpercentile(pearson(draws), [tail, 100 - tail])
    return Estimate(float(pearson(np.ones((1, count)))[0]), float(low), float(high), count)


def mispronounced(canonical: Sequence[str], pronounced: Sequence[str]) -> tuple[bool, ...]:
    """For each canonical phone, whether it is substituted or deleted in an alignment with the fewest errors.

    Of several such alignments, the one with the most substitutions from the end; rapidfuzz leaves it open which.
    """
    costs = np.zeros((len(canonical) + 1, len(pronounced) + 1), np.int64)
    costs[:, 0], costs[0] = np.arange(len(canonical) + 1), np.arange(len(pronounced) + 1)
    for i, phone in enumerate(canonical, start=1):
        for j, other in enumerate(pronounced, start=1):
            costs[i, j] = min(costs[i - 1, j - 1] + (phone != other), costs[i - 1, j] + 1, costs[i, j - 1] + 1)
    wrong = [False] * len(canonical)
    i, j = len(canonical), len(pronounced)
    while i:
        differs = j > 0 and canonical[i - 1] != pronounced[j - 1]
        if j and costs[i, j] == costs[i - 1, j - 1] + differs:
            wrong[i - 1] = differs
            i, j = i - 1, j - 1
        elif costs[i, j] == costs[i - 1, j] + 1:
            wrong[i - 1] = True
            i -= 1
        else:
            j -= 1
    return tuple(wrong)


def _f1_part(reference: Assessment, answer: AssessmentAnswer | None) -> RatioPart:
    """F1 as a ratio of sums: twice the true positives over all actual and all claimed mispronunciations."""
    actual = mispronounced(reference.phones, reference.pronounced)
    claimed = mispronounced(reference.phones, _phones(answer)) if answer is not None else (False,) * len(actual)
    true_positives = sum(one and other for one, other in zip(actual, claimed, strict=True))
    return RatioPart(2 * true_positives, sum(actual) + sum(claimed))


def _phones(answer: AssessmentAnswer | None) -> tuple[str, ...]:
    return tuple(answer.phones.split()) if answer is not None else ()
