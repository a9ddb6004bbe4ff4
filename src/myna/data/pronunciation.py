"""Pronunciation assessment: scores of a recording, the JSON answer that a model learns, its grammar and its metrics."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from rapidfuzz.distance.Levenshtein import distance

from myna.core.statistics import BOOTSTRAP_DRAWS, BOOTSTRAP_SEED, CONFIDENCE_LEVEL, Estimate, RatioPart, estimate
from myna.data.manifest import Utterance
from myna.text.normalization import words

DEFAULT_QUESTION = (
    "You are a teacher who listens to learners of a language. "
    "Rate the pronunciation from 0 to 10, and write down the words and the phones that you hear. Answer in JSON."
)
SCORES = ("accuracy", "fluency", "prosodic", "total")


def _to_phones(phones: Any) -> Any:
    """Split a string at blanks, and remove stress marks, which belong to the score of the word."""
    phones = phones.split() if isinstance(phones, str) else phones
    if not isinstance(phones, list | tuple):
        return phones
    return tuple(re.sub(r"\d$", "", phone) if isinstance(phone, str) else phone for phone in phones)


Score = Annotated[float, Field(ge=0, le=10)]
PhoneScores = Annotated[tuple[Annotated[float, Field(ge=0, le=2)], ...], Field(strict=False)]
Phones = Annotated[tuple[Annotated[str, Field(pattern=r"^\S+$")], ...], BeforeValidator(_to_phones)]


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SentenceScores(_StrictModel):
    """Scores of a whole sentence, from 0 to 10."""

    accuracy: Score
    fluency: Score
    prosodic: Score
    total: Score


class AssessedWord(_StrictModel):
    """A word with its scores, its canonical phones and its phones as pronounced."""

    text: str
    accuracy: Score | None = None
    stress: Score | None = None
    total: Score | None = None
    phones: Phones = ()
    phone_scores: PhoneScores = ()
    """Score of each of `phones`: 2 right, 1 with an accent, 0 wrong or missing."""
    pronounced: Phones = ()
    """Phones as pronounced; by default `phones`."""

    @model_validator(mode="before")
    @classmethod
    def _default_pronounced(cls, word: Any) -> Any:
        return {"pronounced": word["phones"], **word} if isinstance(word, dict) and "phones" in word else word

    @model_validator(mode="after")
    def _check_phone_scores(self) -> Self:
        if self.phone_scores and len(self.phone_scores) != len(self.phones):
            raise ValueError(f"{len(self.phone_scores)} phone scores for {len(self.phones)} phones")
        return self


class AssessmentAnswer(_StrictModel):
    """Answer that a model is trained to give: phones as pronounced, transcript, scores.

    The order matters, since each part is conditioned on those before it: phones after the words would be those of the
    dictionary, and scores before the phones would be guesses.
    """

    phones: str
    text: str
    accuracy: Score
    fluency: Score
    prosodic: Score
    total: Score

    def to_json(self) -> str:
        """Write the answer in its only form: keys in order, whole scores without a fraction."""
        scores = {name: int(value) if value == int(value) else value for name, value in self if name in SCORES}
        return json.dumps({"phones": self.phones, "text": self.text} | scores, ensure_ascii=False)


class Assessment(_StrictModel):
    text: str
    scores: SentenceScores
    words: Annotated[tuple[AssessedWord, ...], Field(strict=False)] = ()

    @property
    def phones(self) -> tuple[str, ...]:
        return tuple(phone for word in self.words for phone in word.phones)

    @property
    def pronounced(self) -> tuple[str, ...]:
        return tuple(phone for word in self.words for phone in word.pronounced)

    @property
    def answer(self) -> AssessmentAnswer:
        return AssessmentAnswer(**self.scores.model_dump(), text=self.text, phones=" ".join(self.pronounced))


class AnswerFormatError(ValueError):
    """Error of a line that is not an answer. `reason` is one of a few, to be counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def read_assessment(tree: Any) -> Assessment:
    """Read an assessment; a `ValueError` says which score is missing or wrong."""

    def describe(problem: Any) -> str:
        location = ".".join(str(part + 1) if isinstance(part, int) else part for part in problem["loc"]) or "it"
        if problem["type"] == "missing":
            return f"there is no `{location}`"
        return f"`{location}` is {problem['input']!r}: {problem['msg']}"

    try:
        return Assessment.model_validate(tree)
    except ValidationError as error:
        raise ValueError("; ".join(map(describe, error.errors()))) from None


def read_answer(line: str) -> AssessmentAnswer:
    """Parse a model's output, which must be an answer and nothing else; `AnswerFormatError` otherwise."""
    repeated: list[str] = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree = dict(pairs)
        repeated.extend(tree if len(tree) != len(pairs) else ())
        return tree

    try:
        # NaN and Infinity, which are no JSON, fail to convert.
        tree = json.loads(line, object_pairs_hook=collect, parse_constant=int)
    except (ValueError, RecursionError):
        raise AnswerFormatError("not JSON") from None
    if repeated:
        raise AnswerFormatError("a key twice")
    if not isinstance(tree, dict):
        raise AnswerFormatError("no object")
    if tree.keys() != AssessmentAnswer.model_fields.keys():
        raise AnswerFormatError("other keys")
    try:
        return AssessmentAnswer.model_validate(tree)
    except ValidationError as error:
        scores = any(problem["loc"][0] in SCORES for problem in error.errors())
        raise AnswerFormatError("no score from 0 to 10" if scores else "no text") from None


@dataclass(frozen=True, slots=True)
class ParsedAnswers:
    """Parsed answers of a model, None for unreadable ones, and the number of those by reason."""

    answers: tuple[AssessmentAnswer | None, ...]
    unreadable: Counter[str]

    @classmethod
    def of(cls, lines: Iterable[str]) -> Self:
        answers: list[AssessmentAnswer | None] = []
        unreadable: Counter[str] = Counter()
        for line in lines:
            try:
                answers.append(read_answer(line))
            except AnswerFormatError as error:
                answers.append(None)
                unreadable[error.reason] += 1
        return cls(tuple(answers), unreadable)


# Grammar of answers

KEYS = tuple(AssessmentAnswer.model_fields)
MAX_BLANKS = 16
TERMINALS = rf"""
ws: WS?
WS: /[ \t\n\r]{{1,{MAX_BLANKS}}}/
STRING: /"([^"\\\x00-\x1f]|\\["\\\/bfnrt]|\\u[0-9a-fA-F]{{4}})*"/
SCORE: /10(\.0+)?|[0-9](\.[0-9]+)?/
"""


def answer_grammar() -> str:
    """Return the grammar, with one rule for every set of remaining keys."""

    def pair(key: str, keys: tuple[str, ...]) -> str:
        rest = [other for other in keys if other != key]
        value = "SCORE" if key in SCORES else "STRING"
        return rf'"\"{key}\"" ws ":" ws {value} ws ' + (f'"," ws {"_".join(["pairs", *rest])}' if rest else '"}"')

    rules = [f'start: ws "{{" ws {"_".join(["pairs", *KEYS])} ws {TERMINALS}']
    subsets = (keys for count in range(1, len(KEYS) + 1) for keys in combinations(KEYS, count))
    rules += [f"{'_'.join(['pairs', *keys])}: {' | '.join(pair(key, keys) for key in keys)}" for keys in subsets]
    return "\n".join(rules)


# Metrics

MIDDLE_SCORE = 5.0
"""Score assumed for an answer without one."""
CORRELATION = "correlation"
CANONICAL, ALL_WRONG = "canonical phones", "everything is wrong"
"""Names of the baselines: the dictionary's phones, so that nothing is mispronounced, and no right phone at all."""
WER, PER, MISPRONUNCIATION_F1 = "word error rate", "phone error rate", "F1 of mistakes"
PUBLISHED_CORPUS = "speechocean762"
PUBLISHED_FIGURES = {
    **{"accuracy": 0.656, "fluency": 0.727, "prosodic": 0.711, "total": 0.675},
    **{WER: 0.140, PER: 0.114, MISPRONUNCIATION_F1: 0.724},
}
"""Figures of "English Pronunciation Evaluation without Complex Joint Training" on SpeechOcean762."""


@dataclass(frozen=True, slots=True)
class AnswerScores:
    figures: dict[str, Estimate]
    """Correlations of the scores, error rates of words and phones, and the F1 of finding mispronounced phones."""
    utterances: int
    unreadable: dict[str, int]
    """Answers that cannot be parsed, by reason."""
    undefined: dict[str, str]
    """Reasons of figures that have no value."""

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
    """Metrics as text for a terminal or a page, and as values for a JSON file."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    figures: dict[str, Any]


def stored_assessment(utterance: Utterance) -> Assessment | None:
    """Return the assessment of a manifest line; None if it has none."""
    tree = utterance.extras.get("assessment")
    return read_assessment(tree) if tree else None


def assessment_table(utterances: Iterable[Utterance], answers: Mapping[str, str]) -> AssessmentTable | None:
    """Compute the metrics of answers by utterance id, with those of two baselines and, on the same corpus, the
    published ones. None if an utterance has no assessment."""
    answered = [utterance for utterance in utterances if utterance.id in answers]
    references = [assessment for assessment in map(stored_assessment, answered) if assessment is not None]
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
            *(one.format(name) if name in by_phones else "right by definition" for one in baselines.values()),
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
    """Compute the metrics of generated answers, in the order of the references."""
    parsed = ParsedAnswers.of(answers)
    pairs = list(zip(references, parsed.answers, strict=True))
    figures = {
        name: pearson_correlation([(getattr(ref.scores, name), getattr(hyp, name, MIDDLE_SCORE)) for ref, hyp in pairs])
        for name in SCORES
    }
    texts = [(words(ref.text, language), words(hyp.text if hyp else "", language)) for ref, hyp in pairs]
    phones = [(ref.pronounced, hyp.phones.split() if hyp else ()) for ref, hyp in pairs]
    for name, sequences in ((WER, texts), (PER, phones)):
        figures[name] = estimate([RatioPart(distance(ref, hyp), len(ref)) for ref, hyp in sequences])
    figures[MISPRONUNCIATION_F1] = estimate([_f1_part(*pair) for pair in pairs])
    undefined = {name: _undefined_reason(name, pairs) for name, figure in figures.items() if figure.mean is None}
    return AnswerScores(figures, len(references), dict(parsed.unreadable), undefined)


def canonical_answers(references: Sequence[Assessment]) -> list[str]:
    """Baseline answers: the right transcript and scores with the canonical phones, so without a mispronunciation."""
    return baseline_answers(references, lambda reference: " ".join(reference.phones))


def baseline_answers(references: Sequence[Assessment], phones: Callable[[Assessment], str]) -> list[str]:
    """Answers with the right transcript and scores, but other phones; without any, every phone is wrong."""
    return [ref.answer.model_copy(update={"phones": phones(ref)}).to_json() for ref in references]


def _undefined_reason(name: str, pairs: Sequence[tuple[Assessment, AssessmentAnswer | None]]) -> str:
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
    """Pearson correlation with a bootstrap interval over pairs. It has no value if one side is constant."""
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
        # A draw may repeat one pair so often that it only varies by rounding.
        return np.where(variance > 1e-12, (xy - x * y) / np.sqrt(np.maximum(variance, 1e-12)), np.nan)

    tail = 100 * (1 - CONFIDENCE_LEVEL) / 2
    low, high = np.nanpercentile(pearson(draws), [tail, 100 - tail])
    return Estimate(float(pearson(np.ones((1, count)))[0]), float(low), float(high), count)


def mispronounced(canonical: Sequence[str], pronounced: Sequence[str]) -> tuple[bool, ...]:
    """Tell for each canonical phone whether it is substituted or deleted in an alignment with the fewest errors.

    Of several such alignments, the one with the most substitutions from the end is used; rapidfuzz does not define
    which.
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
    claimed = mispronounced(reference.phones, answer.phones.split()) if answer is not None else (False,) * len(actual)
    true_positives = sum(one and other for one, other in zip(actual, claimed, strict=True))
    return RatioPart(2 * true_positives, sum(actual) + sum(claimed))
