"""How well something was said: what an importer reads of it, and the answer that a model learns to give.

An `Assessment` is all that a source knows. An `Answer` is what is asked for: the phones and the words that were heard
and four scores, as one line of JSON. It is written in one way only, and read back strictly: what is not such a line is
counted, never guessed at.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

QUESTION = "Rate the pronunciation from 0 to 10, and write down the words and the phones that you hear. Answer in JSON."
SCORES = ("accuracy", "fluency", "prosodic", "total")
Score = Annotated[float, Field(ge=0, le=10)]
PhoneScore = Annotated[float, Field(ge=0, le=2)]
Phones = tuple[Annotated[str, Field(pattern=r"^\S+$")], ...]


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Scores(_Plain):
    """Of a whole sentence, from 0 to 10."""

    accuracy: Score
    fluency: Score
    prosodic: Score
    total: Score


class Word(_Plain):
    text: str
    accuracy: Score | None = None
    stress: Score | None = None
    total: Score | None = None
    phones: Phones = ()
    """What was to be said."""
    phone_scores: tuple[PhoneScore, ...] = ()
    """One for each of `phones`: 2 right, 1 with an accent, 0 wrong or missing."""
    heard: Phones = ()
    """What was said instead; the same as `phones` where a source says nothing else."""

    @model_validator(mode="before")
    @classmethod
    def _heard_as_meant(cls, word: Any) -> Any:
        return {"heard": word["phones"], **word} if isinstance(word, dict) and "phones" in word else word

    @field_validator("phones", "heard", mode="before")
    @classmethod
    def _split(cls, phones: Any) -> Any:
        """Stress is a matter of the word, not of the phone."""
        said = phones.split() if isinstance(phones, str) else phones
        return tuple(re.sub(r"\d$", "", p) if isinstance(p, str) else p for p in said) if _is_list(said) else said

    @field_validator("phone_scores", mode="before")
    @classmethod
    def _as_tuple(cls, scores: Any) -> Any:
        return tuple(scores) if isinstance(scores, list) else scores

    @model_validator(mode="after")
    def _one_each(self) -> Word:
        if self.phone_scores and len(self.phone_scores) != len(self.phones):
            raise ValueError(f"{len(self.phone_scores)} phone scores for {len(self.phones)} phones")
        return self


class Assessment(_Plain):
    text: str
    scores: Scores
    words: tuple[Word, ...] = ()

    @field_validator("words", mode="before")
    @classmethod
    def _as_tuple(cls, words: Any) -> Any:
        return tuple(words) if isinstance(words, list) else words

    @property
    def phones(self) -> tuple[str, ...]:
        """What was to be said."""
        return tuple(phone for word in self.words for phone in word.phones)

    @property
    def heard(self) -> tuple[str, ...]:
        return tuple(phone for word in self.words for phone in word.heard)

    @property
    def answer(self) -> Answer:
        return Answer(**self.scores.model_dump(), text=self.text, phones=" ".join(self.heard))


class Answer(_Plain):
    """In the order in which one follows from the other. Who has written the words already need not listen to write the
    phones that belong to them, and who gives a score first gives it without having looked."""

    phones: str
    text: str
    accuracy: Score
    fluency: Score
    prosodic: Score
    total: Score

    def to_json(self) -> str:
        """The one way to write it: keys in order, whole scores without a fraction."""
        whole = {name: int(value) if value == int(value) else value for name, value in self if name in SCORES}
        return json.dumps({"phones": self.phones, "text": self.text} | whole, ensure_ascii=False)


class UnreadableError(ValueError):
    """Not an answer. `reason` is one of a few, to be counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def read_assessment(tree: Any) -> Assessment:
    """A `ValueError` says which score is missing or wrong."""
    try:
        return Assessment.model_validate(tree)
    except ValidationError as error:
        raise ValueError("; ".join(map(_told, error.errors()))) from None


def read_answer(line: str) -> Answer:
    """What a model said, if it is an answer and nothing else; `UnreadableError` otherwise."""
    try:
        tree = json.loads(line, object_pairs_hook=_each_once, parse_constant=_no_number)
    except RecursionError:
        raise UnreadableError("not JSON") from None
    except UnreadableError:
        raise
    except ValueError:
        raise UnreadableError("not JSON") from None
    if not isinstance(tree, dict):
        raise UnreadableError("no object")
    if tree.keys() != Answer.model_fields.keys():
        raise UnreadableError("other keys")
    try:
        return Answer.model_validate(tree)
    except ValidationError as error:
        scores = any(problem["loc"][0] in SCORES for problem in error.errors())
        raise UnreadableError("no score from 0 to 10" if scores else "no text") from None


@dataclass(frozen=True, slots=True)
class Readings:
    """Answers of a model, None for what could not be read, and why not."""

    answers: tuple[Answer | None, ...]
    unreadable: Counter[str]

    @classmethod
    def of(cls, lines: Iterable[str]) -> Readings:
        answers: list[Answer | None] = []
        unreadable: Counter[str] = Counter()
        for line in lines:
            try:
                answers.append(read_answer(line))
            except UnreadableError as error:
                answers.append(None)
                unreadable[error.reason] += 1
        return cls(tuple(answers), unreadable)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _told(problem: Any) -> str:
    where = ".".join(str(part + 1) if isinstance(part, int) else part for part in problem["loc"]) or "it"
    if problem["type"] == "missing":
        return f"there is no `{where}`"
    return f"`{where}` is {problem['input']!r}: {problem['msg']}"


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise UnreadableError("a key twice")
    return tree


def _no_number(_: str) -> Any:
    raise UnreadableError("not JSON")
