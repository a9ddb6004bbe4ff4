"""Self-contained HTML pages from sections: one file, no network, light and dark color schemes.

A page is a list of sections, which are plain JSON values made by the functions below. `sections.html` renders them, so
that tables and texts can be read without scripts; `page.js` adds playing, and the blind listening test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

CONTENT_POLICY = (
    "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)
"""Content security policy: a page may load only what it holds itself."""
Section = dict[str, Any]
"""Part of a page: its `kind`, a macro of `sections.html`, and the values that this macro shows."""
Cell = str | dict[str, str]
"""Text of a table cell, or what `cell` makes."""


def render_page(
    title: str,
    sections: Iterable[Section],
    *,
    css: str = "",
    script: str = "",
    allow_post: bool = False,
    allow_audio_files: bool = False,
) -> str:
    """Render a whole page. `css` and `script` are added to those of every page; `allow_post` permits requests to the
    server that the page came from, `allow_audio_files` permits audio files beside the page."""
    media = "media-src data:"
    policy = CONTENT_POLICY.replace(media, f"{media} 'self' file:") if allow_audio_files else CONTENT_POLICY
    page = render_template(
        "report/page.html",
        title=title,
        sections=sections,
        policy=f"{policy}; connect-src 'self'" if allow_post else policy,
        css=Markup(page_asset("page.css") + css),
        script=Markup(page_asset("page.js") + script),
    )
    return str(page)


def render_template(name: str, **context: object) -> Markup:
    """Render a template of the package, escaping `context` except for markup; `name` is relative to `myna`."""
    return Markup(_environment().get_template(name).render(**context))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("myna", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # `tojson` escapes whatever could end a script element.
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return environment


@cache
def page_asset(name: str, package: str = "myna.report") -> str:
    """Read a style sheet or a script of a package."""
    return (files(package) / name).read_text(encoding="utf-8")


def heading(text: str, level: int = 2) -> Section:
    return {"kind": "heading", "text": text, "level": level}


def paragraph(text: str, style: str = "", href: str = "") -> Section:
    """Make a paragraph; its style is `lead`, `note`, `missing`, `good` or `bad`, or several of them."""
    return {"kind": "paragraph", "text": text, "style": style, "href": href}


def cell(text: str, style: str = "", *, note: str = "", href: str = "") -> Cell:
    """Make a table cell in a style (good or bad), with a note below it or as a link."""
    return {"text": text, "style": style, "note": note, "href": href}


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Section:
    """Make a table whose first cells name the rows; the caption is for screen readers."""
    return {"kind": "table", "caption": caption, "header": list(header), "rows": [list(row) for row in rows]}


def figures(numbers: Iterable[tuple[str, str]]) -> Section:
    """Make large numbers, each with what it counts."""
    return {"kind": "figures", "figures": [list(pair) for pair in numbers]}


def card(title: str, *sections: Section, style: str = "") -> Section:
    return {"kind": "card", "title": title, "style": style, "sections": list(sections)}


def details(summary: str, *sections: Section, is_open: bool = False) -> Section:
    """Make sections that are shown when the summary is clicked."""
    return {"kind": "details", "summary": summary, "sections": list(sections), "is_open": is_open}


def code(text: str) -> Section:
    return {"kind": "code", "text": text}


def bullets(items: Iterable[str]) -> Section:
    return {"kind": "bullets", "items": list(items)}


def item(title: str, note: str, clips: Iterable[Section]) -> Section:
    """Make a card with audio clips side by side, made by `myna.report.media.clip`."""
    return {"kind": "item", "title": title, "note": note, "clips": list(clips)}


def footer(text: str) -> Section:
    return {"kind": "footer", "text": text}


KEYS = (
    ("Space", "play what is still to be heard, then pause and go on"),
    ("1 and 2", "play A, play B, from the start"),
    ("X", "change to the other one, at the same place"),
    ("R", "play the real recording, where there is one"),
    ("A and B", "this one is better"),
    ("= or T", "no difference"),
    ("← and →", "the pair before, the next pair"),
    ("?", "these keys"),
)


def blind_test(
    pairs: Sequence[Mapping[str, Any]],
    sounds: Mapping[str, str | None],
    *,
    name: str,
    intervals: Sequence[Sequence[float]],
    level: float,
) -> Section:
    """Make a blind listening test (A or B), usable by keyboard or mouse, and with a screen reader.

    A pair has an `id`, its `text`, `note` and `language`, two `sounds` in playing order, the `names` of their systems,
    which are shown at the end, and perhaps a `real` recording. `sounds` are data URIs by name, None for an empty clip;
    the browser stores answers under `name`; `intervals[n][k]` is the lower bound of the preference for k of n answers
    at the confidence `level`.
    """
    data = {
        "name": name,
        "pairs": [dict(pair) for pair in pairs],
        "sounds": dict(sounds),
        "intervals": [[round(low, 4) for low in lows] for lows in intervals],
        "level": level,
    }
    return {"kind": "blind_test", "data": data, "keys": KEYS}
