"""Books and speeches cut into lines that can be read in one way only: sentences, and clauses of those too long."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from myna.text.normalization import normalise_text

MIN_CHARACTERS, MAX_CHARACTERS = 15, 140
"""Characters of a line: with less it is a phrase, with more a clip takes over ten seconds."""
MIN_CLAUSE_CHARACTERS = 35
"""Characters of a clause that can stand alone: shorter ones are scraps."""
MAX_VERSE_CHARACTERS = 50
"""Characters of a line that was not broken for want of room: where all are as short, it is verse, a list or a head."""

REMARK = re.compile(r"\[[^\]]{0,500}\]|\((?:Applause|Laughter)\.?\)", re.IGNORECASE)
TITLE = re.compile(r"\b(Mr|Mrs|Messrs|Dr)\.")
"""Readable without the dot, which would be read as the end of a sentence."""
ABBREVIATION = re.compile(
    r"\b(St|Nos?|Col|Gen|Capt|Lieut|Maj|Hon|Rev|Prof|Gov|Sen|Rep|Jr|Sr|Esq|vs|viz|etc|Art|Secs?|Inc|Co|Vol|Fig|Ft|Mt|"
    r"pp?|[Cc]h|Jan|Feb|Aug|Sept|Oct|Nov|Dec|[A-HJ-Z]|[a-z](?=\.[a-z]))\."
)
"""Neither the end of a sentence nor readable in one way: a line with one is left out."""
SPEECH = re.compile(r"[\"“”`]|(?<![A-Za-z])'(?!(?:tis|twas|em)\b)|'(?![A-Za-z])", re.IGNORECASE)
"""Quotation marks, but no apostrophe within a word."""
END = re.compile(r"(?<=[.!?])[\"“”'`)]*\s+|(?<=[.!?])[\"”]")
DASH = re.compile(r"\s*(?:--+|[—–])\s*")
DASH_AFTER_END = re.compile(r"(?<=[.!?])" + DASH.pattern)
HEAP = re.compile(r"[,;:]\s*,")
BROKEN_WORD = re.compile(r"(?<=[a-z]-)\s+(?=[a-z])")
CUTS = (
    re.compile(r"[;:]\s+|" + DASH.pattern),
    re.compile(r",\s+(?=(?:and|but|or|nor|for|so|yet|which|who|when|where|while|because|if|as|though)\b)"),
    re.compile(r",\s+"),
    re.compile(r"\s+(?=(?:that|which|who|whether|because|when|where|while)\s)"),
)
"""Marks at which a sentence that is too long is cut: at the first of these marks, then at the next where that is not
enough."""

READABLE = re.compile(r"[A-Z0-9][A-Za-z0-9 ,;:'\-]*[.!?]")
"""Letters, numbers and one end."""
NUMBER = re.compile(r"(?<![\w,:'\-])\d{1,4}(?:st|nd|rd|th)?(?![\w:'\-]|,\d)")
"""A count, a year or a date. Others are written in too many ways."""
UNREADABLE = re.compile(r"\d|[A-Z]{2}|\bWar I\b|[,;:] *[,;:]|- | -|''|(?<![A-Za-z'])[B-HJ-NP-Zb-z](?![A-Za-z'])")
"""Other numbers, capitals and Roman numbers, marks in a heap, and letters that stand alone."""
SLUR = re.compile(r"\b(?:nigg|negr|squaw|half-breed|mulatto|darkie)", re.IGNORECASE)
"""Words of old books that no line may have."""


def sentence(text: str) -> str:
    """Return the text with a capital and an end mark."""
    text = normalise_text(text).rstrip(" ,;:-")
    return text[:1].upper() + text[1:] + ("" if text[-1:] in ".!?" else ".")


def prose_lines(text: str) -> Iterator[str]:
    """Lines of a text whose paragraphs stand between blank lines."""
    text = REMARK.sub(" ", text.replace("\r", "").replace("’", "'"))
    for paragraph in re.split(r"\n\s*\n", text):
        rows = [row.strip() for row in paragraph.strip().split("\n")]
        if len(rows) == 1 or max(map(len, rows)) > MAX_VERSE_CHARACTERS:
            joined = BROKEN_WORD.sub("", " ".join(rows).replace("_", ""))
            yield from filter(_is_readable, _lines(joined))


def _lines(paragraph: str) -> Iterator[str]:
    marked = DASH_AFTER_END.sub(" ", ABBREVIATION.sub(r"\1*", TITLE.sub(r"\1", paragraph)))
    for ended in END.split(marked):
        # What begins small goes on after a quotation (`he said.`), and what has no end was broken off.
        whole = normalise_text(SPEECH.sub("", ended))
        if whole and whole[-1] in ".!?" and (whole[0].isupper() or whole[0].isdigit()):
            pieces = [whole] if len(whole) <= MAX_CHARACTERS else _clauses(whole)
            yield from (sentence(HEAP.sub(",", DASH.sub(", ", piece))) for piece in pieces)


def _clauses(long: str, marks: Sequence[re.Pattern[str]] = CUTS) -> Iterator[str]:
    for part in marks[0].split(long):
        if len(part) > MAX_CHARACTERS and len(marks) > 1:
            yield from _clauses(part, marks[1:])
        elif len(part) >= MIN_CLAUSE_CHARACTERS:
            yield part


def _is_readable(line: str) -> bool:
    return (
        MIN_CHARACTERS <= len(line) <= MAX_CHARACTERS
        and READABLE.fullmatch(line) is not None
        and not UNREADABLE.search(NUMBER.sub("a", line))
        and not SLUR.search(line)
    )
