"""Held-out split: a tenth of the speakers, and one line in fifty.

Both follow from a hash of the name or of the words, the same in every corpus.
"""

from __future__ import annotations

from myna.core.io import string_hash

ONE_SPEAKER_IN, ONE_LINE_IN = 10, 50


def is_held_out(speaker: str) -> bool:
    """The rule that the codec's training follows too (`codec_training/recordings.py`)."""
    return string_hash(speaker) % ONE_SPEAKER_IN == 0


def is_held_out_line(text: str) -> bool:
    """Case and what is no letter do not count: `The cat.` and `the cat` are the same line."""
    letters = "".join(letter for letter in text.lower() if letter.isalnum())
    return string_hash(f"line {letters}") % ONE_LINE_IN == 0
