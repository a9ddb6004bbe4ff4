"""Pages: what a user wrote is shown and never run, and nothing is loaded from elsewhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myna.report.page import (
    Section,
    bullets,
    card,
    cell,
    code,
    details,
    figures,
    footer,
    heading,
    item,
    page_asset,
    paragraph,
    render_page,
    table,
)
from tests.report.html_reader import ATTACK, Reader


def body(*sections: Section) -> str:
    page = render_page("title", sections)
    return page[page.index("<main>") : page.index("</main>")]


@given(st.text(st.characters(exclude_categories=("Cs", "Cc"))))
def test_any_text_is_shown_as_it_was_written(text: str) -> None:
    read = Reader(body(code(text)))
    assert read.tags == ["main", "pre"] and read.text.strip() == text.strip()


@pytest.mark.parametrize(
    "section",
    [
        heading(ATTACK),
        paragraph(ATTACK, "note"),
        paragraph(ATTACK, href="#there"),
        figures([(ATTACK, ATTACK)]),
        card(ATTACK, paragraph(ATTACK)),
        details(ATTACK, code(ATTACK)),
        bullets([ATTACK]),
        footer(ATTACK),
        item(ATTACK, ATTACK, []),
        table(ATTACK, ["", ATTACK], [[ATTACK, cell(ATTACK, "bad", note=ATTACK)], [cell(ATTACK, href=ATTACK), ""]]),
    ],
    ids=lambda section: section["kind"],
)
def test_every_section_escapes_its_text(section: Section) -> None:
    read = Reader(body(section))
    assert "script" not in read.tags and ATTACK in read.text


def test_a_table_names_its_rows_and_columns() -> None:
    read = Reader(body(table("caption", ["", "column"], [["row", cell("1", "good", note="more")]])))
    assert ("scope", "col") in read.attributes and ("scope", "row") in read.attributes
    assert ("aria-label", "caption") in read.attributes and ("class", "good") in read.attributes
    assert "caption" in read.tags and read.tags.count("td") == 2, "the corner is no heading"


def test_sections_stand_inside_cards_and_details() -> None:
    shown = body(card("card", details("more", paragraph("inside"), is_open=True), style="bad"))
    assert '<h3 class="bad">card</h3>' in shown and "<details open>" in shown and "<p>inside</p>" in shown


def test_a_page_loads_nothing_from_anywhere() -> None:
    page = render_page(ATTACK, [paragraph("hello")])
    read = Reader(page)
    assert page.startswith("<!doctype html>")
    assert read.tags.count("script") == 1, "our own"
    assert not [value for name, value in read.attributes if name in ("src", "href")]
    policy = next(value for name, value in read.attributes if value and "default-src" in value and name == "content")
    assert policy.startswith("default-src 'none'") and "connect-src" not in policy
    assert "http" not in page.replace("http-equiv", "").replace("location.protocol.startsWith('http')", "")
    assert "prefers-color-scheme: dark" in page
    assert "connect-src 'self'" in render_page("", [], allow_post=True).replace("&#39;", "'")
    for name in ("page.css", "page.js"):
        assert "http://" not in page_asset(name) and "https://" not in page_asset(name)
