"""Pronunciation metrics: a model's answers against the assessments of a corpus, each with a bootstrap interval.

An answer that cannot be parsed counts as an empty one: all its words and phones are errors, it finds no
mispronunciation, and its scores are the middle of the scale. To leave it out would flatter a model that rambles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from rapidfuzz.distance.Levenshtein import distance

from myna.data.pronunciation.assessment import SCORES, Assessment, AssessmentAnswer, ParsedAnswers, read_assessment
from myna.data.text_normalization import words
from myna.data.utterance import Utterance
from myna.statistics import BOOTSTRAP_DRAWS, BOOTSTRAP_SEED, CONFIDENCE_LEVEL, Estimate, RatioPart, estimate

MIDDLE_SCORE = 5.0
"""The score of an answer that gives none."""
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

    def to_json(self) -> dict[str, Any]:
        figures = {name: figure.to_json() for name, figure in self.figures.items()}
        return {"utterances": self.utterances, "unreadable": self.unreadable, "figures": figures}


class AssessmentTable(NamedTuple):
    """Metrics as text, for a terminal or a page."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def stored_assessment(utterance: Utterance) -> Assessment | None:
    """The assessment of a manifest line; None where its answer is none."""
    tree = utterance.extras.get("assessment")
    return read_assessment(tree) if tree else None


def assessment_table(utterances: Iterable[Utterance], answers: Mapping[str, str]) -> AssessmentTable | None:
    """Metrics of answers by utterance id, beside those of the canonical phones and, on the same corpus, the published
    ones. None where an utterance has no assessment."""
    answered = [utterance for utterance in utterances if utterance.id in answers]
    stored = [stored_assessment(utterance) for utterance in answered]
    references = [assessment for assessment in stored if assessment is not None]
    if len(references) < len(answers):
        return None
    scores = score_answers(references, [answers[utterance.id] for utterance in answered])
    canonical = score_answers(references, canonical_answers(references))
    rows = []
    for name, figure in scores.figures.items():
        baseline = canonical.figures[name] if name in (PER, MISPRONUNCIATION_F1) else Estimate()
        rows.append((name, _format(figure), _format(baseline), f"{PUBLISHED_FIGURES[name]:.3f}"))
    is_published = {utterance.extras.get("corpus") for utterance in answered} == {PUBLISHED_CORPUS}
    header = ("", "model", "canonical phones", "published")[: 3 + is_published]
    unreadable = sum(scores.unreadable.values())
    title = f"{scores.utterances} utterances, {unreadable} answers that cannot be read"
    return AssessmentTable(title, header, [row[: len(header)] for row in rows])


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
    return AnswerScores(figures, len(references), dict(parsed.unreadable))


def canonical_answers(references: Sequence[Assessment]) -> list[str]:
    """Baseline answers: the right transcript and scores with the canonical phones, so without a mispronunciation."""
    return [ref.answer.model_copy(update={"phones": " ".join(ref.phones)}).to_json() for ref in references]


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


def _format(figure: Estimate) -> str:
    return "" if figure.mean is None else f"{figure.mean:.3f} ({figure.low:.3f} to {figure.high:.3f})"


def _phones(answer: AssessmentAnswer | None) -> tuple[str, ...]:
    return tuple(answer.phones.split()) if answer is not None else ()
