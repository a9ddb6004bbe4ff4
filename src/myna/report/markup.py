"""HTML that is safe to join: plain text is escaped wherever it is put in, markup of our own is not."""

from __future__ import annotations

import html
from collections.abc import Iterable


class Markup(str):
    """Text that is HTML already. Anything else becomes so by `escape`."""

    __slots__ = ()


def escape(text: object) -> Markup:
    return text if isinstance(text, Markup) else Markup(html.escape(str(text), quote=True))


def element(name: str, /, *content: object, **attributes: object) -> Markup:
    """`<name attribute="...">content</name>`; `class_` and `aria_label` stand for what Python cannot spell.

    An attribute that is None or False is left out, and one that is True has no value.
    """
    opened = name + "".join(
        f" {_attribute(key)}" if value is True else f' {_attribute(key)}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in ("img", "meta", "br", "input"):
        return Markup(f"<{opened}>")
    return Markup(f"<{opened}>{join(content)}</{name}>")


def join(parts: Iterable[object]) -> Markup:
    return Markup("".join(escape(part) for part in parts))


def table(header: Iterable[object], rows: Iterable[Iterable[object]], *, caption: str, class_: str = "") -> Markup:
    """The first cell of a row is its name. The caption is read out; `class_` says how the table looks."""
    head = element("tr", *(element("th", cell, scope="col") for cell in header))
    body = []
    for first, *others in (list(row) for row in rows):
        cells = [element("th", first, scope="row"), *(element("td", cell) for cell in others)]
        body.append(element("tr", *cells))
    return element(
        "div",
        element(
            "table",
            element("caption", caption),
            element("thead", head),
            element("tbody", *body),
            class_=class_ or None,
        ),
        class_="wide",
    )


def _attribute(name: str) -> str:
    return name.rstrip("_").replace("_", "-")
