"""Self-contained HTML pages: one file, no network, light and dark color schemes.

Markup lives in Jinja templates (`*.html`), styles and scripts in `*.css` and `*.js` beside them.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

CONTENT_POLICY = (
    "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)
"""A page may load only what it holds itself."""


def html_document(
    title: str,
    *body: object,
    language: str = "en",
    css: str = "",
    script: str = "",
    allow_post: bool = False,
    allow_audio_files: bool = False,
) -> str:
    """A whole page. `css` and `script` are added to those of every page; `allow_post` permits requests to the server
    that the page came from, `allow_audio_files` audio that lies beside the page."""
    media = "media-src data:"
    policy = CONTENT_POLICY.replace(media, f"{media} 'self' file:") if allow_audio_files else CONTENT_POLICY
    page = render_template(
        "report/page.html",
        title=title,
        body=body,
        language=language,
        policy=f"{policy}; connect-src 'self'" if allow_post else policy,
        css=Markup(page_asset("page.css") + css),
        script=Markup(page_asset("page.js") + script),
    )
    return str(page)


def render_template(name: str, **context: object) -> Markup:
    """A template of the package, with `context` escaped unless it is markup; `name` is relative to `myna`."""
    return Markup(_environment().get_template(name).render(**context))


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("myna", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


@cache
def page_asset(name: str, package: str = "myna.report") -> str:
    """A style sheet or script of a package."""
    return (files(package) / name).read_text(encoding="utf-8")
