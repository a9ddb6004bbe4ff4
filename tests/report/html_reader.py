"""HTML reader for tests of pages."""

from __future__ import annotations

from html.parser import HTMLParser

ATTACK = "<script>alert('x')</script> & \"quotes\""
"""Text that would run if a page did not escape it."""


class Reader(HTMLParser):
    """Tags, attributes and text of a page, as a browser reads them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(str(page))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data
