"""Word and character error rates: edit distance between a text and the transcript of its speech."""

import math
from dataclasses import dataclass, replace
from typing import Self

from rapidfuzz.distance import Levenshtein

from myna.text.normalization import letters, words


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """Number of substitutions, insertions and deletions, and of reference tokens.

    Sum counts before dividing, so that every word has equal weight: `sum(counts, ErrorCount()).rate`.
    """

    errors: int = 0
    total: int = 0

    def __add__(self, other: Self) -> Self:
        return replace(self, errors=self.errors + other.errors, total=self.total + other.total)

    @property
    def rate(self) -> float:
        """Errors per reference token; NaN without reference tokens."""
        return self.errors / self.total if self.total else math.nan


def word_errors(text: str, transcript: str, language: str = "en") -> ErrorCount:
    """Count word errors of a transcript, after text normalisation of both sides."""
    reference = words(text, language)
    return ErrorCount(Levenshtein.distance(reference, words(transcript, language)), len(reference))


def character_errors(text: str, transcript: str, language: str = "en") -> ErrorCount:
    """Count character errors of a transcript, after text normalisation of both sides."""
    reference = letters(text, language)
    return ErrorCount(Levenshtein.distance(reference, letters(transcript, language)), len(reference))
