"""Pronunciation assessment: scores of a recording as a source has them, and the JSON answer that a model learns.

Answers are written in one way only and parsed strictly: a line that is no answer is counted, never repaired.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

DEFAULT_QUESTION = (
    "You are a teacher who listens to learners of a language. "
    "Rate the pronunciation from 0 to 10, and write down the words and the phones that you hear. Answer in JSON."
)
SCORES = ("accuracy", "fluency", "prosodic", "total")


def _to_tuple(values: Any) -> Any:
    return tuple(values) if isinstance(values, list) else values


def _to_phones(phones: Any) -> Any:
    """A list, or one string with blanks. Stress marks belong to the word's score, not to its phones."""
    phones = phones.split() if isinstance(phones, str) else phones
    if not isinstance(phones, list | tuple):
        return phones
    return tuple(re.sub(r"\d$", "", phone) if isinstance(phone, str) else phone for phone in phones)


Score = Annotated[float, Field(ge=0, le=10)]
PhoneScores = Annotated[tuple[Annotated[float, Field(ge=0, le=2)], ...], BeforeValidator(_to_tuple)]
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
    """One for each of `phones`: 2 right, 1 with an accent, 0 wrong or missing."""
    pronounced: Phones = ()
    """By default the same as `phones`."""

    @model_validator(mode="before")
    @classmethod
    def _default_pronounced(cls, word: Any) -> Any:
        return {"pronounced": word["phones"], **word} if isinstance(word, dict) and "phones" in word else word

    @model_validator(mode="after")
    def _check_phone_scores(self) -> AssessedWord:
        if self.phone_scores and len(self.phone_scores) != len(self.phones):
            raise ValueError(f"{len(self.phone_scores)} phone scores for {len(self.phones)} phones")
        return self


class Assessment(_StrictModel):
    """Assessment of one recording."""

    text: str
    scores: SentenceScores
    words: Annotated[tuple[AssessedWord, ...], BeforeValidator(_to_tuple)] = ()

    @property
    def phones(self) -> tuple[str, ...]:
        """Canonical phones of all words."""
        return tuple(phone for word in self.words for phone in word.phones)

    @property
    def pronounced(self) -> tuple[str, ...]:
        return tuple(phone for word in self.words for phone in word.pronounced)

    @property
    def answer(self) -> AssessmentAnswer:
        return AssessmentAnswer(**self.scores.model_dump(), text=self.text, phones=" ".join(self.pronounced))


class AssessmentAnswer(_StrictModel):
    """The answer that a model is trained to give: phones as pronounced, transcript, scores.

    In this order, since each is conditioned on those before it: phones after the words would be those of the
    dictionary, and scores before the phones would be guesses.
    """

    phones: str
    text: str
    accuracy: Score
    fluency: Score
    prosodic: Score
    total: Score

    def to_json(self) -> str:
        """The one way to write it: keys in order, whole scores without a fraction."""
        scores = {name: int(value) if value == int(value) else value for name, value in self if name in SCORES}
        return json.dumps({"phones": self.phones, "text": self.text} | scores, ensure_ascii=False)


class AnswerFormatError(ValueError):
    """A line that is no answer. `reason` is one of a few, to be counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def read_assessment(tree: Any) -> Assessment:
    """A `ValueError` says which score is missing or wrong."""
    try:
        return Assessment.model_validate(tree)
    except ValidationError as error:
        raise ValueError("; ".join(map(_format_problem, error.errors()))) from None


def read_answer(line: str) -> AssessmentAnswer:
    """Parse a model's output, which must be an answer and nothing else; `AnswerFormatError` otherwise."""
    try:
        tree = json.loads(line, object_pairs_hook=_unique_keys, parse_constant=_reject_constant)
    except AnswerFormatError:
        raise
    except (ValueError, RecursionError):
        raise AnswerFormatError("not JSON") from None
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
    """Parsed answers of a model, None for those that are none, and the reasons why not."""

    answers: tuple[AssessmentAnswer | None, ...]
    unreadable: Counter[str]

    @classmethod
    def of(cls, lines: Iterable[str]) -> ParsedAnswers:
        answers: list[AssessmentAnswer | None] = []
        unreadable: Counter[str] = Counter()
        for line in lines:
            try:
                answers.append(read_answer(line))
            except AnswerFormatError as error:
                answers.append(None)
                unreadable[error.reason] += 1
        return cls(tuple(answers), unreadable)


def _format_problem(problem: Any) -> str:
    location = ".".join(str(part + 1) if isinstance(part, int) else part for part in problem["loc"]) or "it"
    if problem["type"] == "missing":
        return f"there is no `{location}`"
    return f"`{location}` is {problem['input']!r}: {problem['msg']}"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise AnswerFormatError("a key twice")
    return tree


def _reject_constant(_: str) -> Any:
    raise AnswerFormatError("not JSON")
