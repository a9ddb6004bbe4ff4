"""What nothing may learn from, so that it can be judged: a tenth of the speakers, and one line in fifty.

Both follow from the name or the words alone, whatever corpus they stand in: a hash that is divisible by the number.
"""

from __future__ import annotations

from myna.data.hash_rng import hash_of

SPEAKERS, LINES = 10, 50


def is_held_out(speaker: str) -> bool:
    """The rule that the codec's training follows too (`codec_training/sounds.py`)."""
    return hash_of(speaker) % SPEAKERS == 0


def is_held_out_line(text: str) -> bool:
    """Case and what is no letter do not count: `The cat.` and `the cat` are the same line."""
    letters = "".join(letter for letter in text.lower() if letter.isalnum())
    return hash_of(f"line {letters}") % LINES == 0
