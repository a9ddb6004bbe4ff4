"""HTML elements for pages: plain text is escaped wherever it is put in, `markupsafe.Markup` is not."""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape


def element(name: str, /, *content: object, **attributes: object) -> Markup:
    """`<name attribute="...">content</name>`; `class_` and `aria_label` stand for `class` and `aria-label`.

    An attribute that is None or False is left out, and one that is True has no value.
    """
    opening = name + "".join(
        f" {_attribute(key)}" if value is True else f' {_attribute(key)}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name == "img":
        return Markup(f"<{opening}>")
    return Markup(f"<{opening}>{join_html(content)}</{name}>")


def join_html(parts: Iterable[object], separator: str = "") -> Markup:
    return escape(separator).join(map(escape, parts))


def html_table(header: Iterable[object], rows: Iterable[Iterable[object]], *, caption: str) -> Markup:
    """A table whose first cells name the rows; the caption is for screen readers."""
    head = element("tr", *(element("th", cell, scope="col") if cell else element("td") for cell in header))
    body = [
        element("tr", element("th", first, scope="row"), *(element("td", cell) for cell in others))
        for first, *others in rows
    ]
    table = element("table", element("caption", caption), element("thead", head), element("tbody", *body))
    return element("div", table, class_="wide", role="region", aria_label=caption)


def _attribute(name: str) -> str:
    return name.rstrip("_").replace("_", "-")
