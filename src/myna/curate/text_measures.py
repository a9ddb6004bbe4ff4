"""Measures of a clip's text: agreement of both transcriptions, pace, repetition."""

from __future__ import annotations

import math

from rapidfuzz.distance import Levenshtein

from myna.text.normalization import letters, words
from myna.text.wer import character_errors

TEXT_MEASURES = ("cer", "edge_cer", "characters_per_second", "unique_word_share")
EDGE_CHARACTERS = 12
"""At either end of a text that are compared on their own."""


def measure_text(text: str, check_text: str, language: str, seconds: float) -> dict[str, float]:
    """`TEXT_MEASURES` of a clip."""
    language = language or "en"
    spoken = words(text, language)
    return {
        "cer": character_errors(text, check_text, language).rate,
        "edge_cer": edge_cer(text, check_text, language),
        "characters_per_second": len(letters(text, language)) / seconds if spoken else math.nan,
        "unique_word_share": len(set(spoken)) / len(spoken) if spoken else math.nan,
    }


def edge_cer(text: str, transcript: str, language: str = "en") -> float:
    """Character error rate of the first or the last 12 characters, whichever is worse; NaN without a text.

    At a cut word the rest of the text may agree. The transcript is aligned to the text as a whole first, so that
    its length does not matter.
    """
    reference, hypothesis = letters(text, language), letters(transcript, language)
    if not reference:
        return math.nan
    size, length = min(EDGE_CHARACTERS, len(reference)), len(reference)
    start = end = 0
    for edit in Levenshtein.opcodes(reference, hypothesis):
        inserted = edit.dest_end - edit.dest_start
        if edit.tag == "insert":
            start += inserted if edit.src_start < size else 0
            end += inserted if edit.src_start > length - size else 0
        elif edit.tag != "equal":
            start += max(0, min(edit.src_end, size) - edit.src_start)
            end += max(0, edit.src_end - max(edit.src_start, length - size))
    return max(start, end) / size
