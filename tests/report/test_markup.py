"""Whatever a user wrote is shown, and never run."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup, escape

from myna.report.document import html_document
from myna.report.markup import element, html_table, join_html

ATTACK = "<script>alert('x')</script> & \"quotes\""


class Reader(HTMLParser):
    """What a browser would make of it."""

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


@given(st.text(st.characters(exclude_categories=("Cs", "Cc"))))
def test_any_text_comes_back_as_it_was(text: str) -> None:
    read = Reader(element("p", text, title=text))
    assert read.tags == ["p"]
    assert read.text == text
    assert read.attributes == [("title", text)]


def test_text_is_escaped_once_and_markup_is_not() -> None:
    inner = element("b", ATTACK)
    assert escape(inner) == inner
    assert join_html((inner, ATTACK)) == inner + escape(ATTACK)
    assert Reader(element("p", inner)).tags == ["p", "b"]


def test_attributes_are_spelt_as_html_wants_them() -> None:
    made = element("audio", controls=True, class_="player", aria_label="play", hidden=False, title=None)
    assert made == '<audio controls class="player" aria-label="play"></audio>'
    assert element("img", alt="") == '<img alt="">'


def test_a_table_names_its_rows_and_columns_and_escapes_its_cells() -> None:
    made = html_table(["", ATTACK], [[ATTACK, Markup("<i>1</i>")]], caption=ATTACK)
    read = Reader(made)
    assert "script" not in read.tags and read.tags.count("i") == 1
    assert read.text.count(ATTACK) == 3
    assert ("scope", "col") in read.attributes and ("scope", "row") in read.attributes


def test_a_page_loads_nothing_from_anywhere() -> None:
    page = html_document(ATTACK, element("p", "hello"))
    read = Reader(page)
    assert page.startswith("<!doctype html>")
    assert read.tags.count("script") == 1, "our own"
    assert not [value for name, value in read.attributes if name in ("src", "href")]
    policy = next(value for name, value in read.attributes if value and "default-src" in value and name == "content")
    assert policy.startswith("default-src 'none'")
    assert "http" not in page.replace("http-equiv", "")
    assert "prefers-color-scheme: dark" in page
