"""The page itself: one file, no network, light or dark as the reader likes it."""

from __future__ import annotations

from pathlib import Path

from myna.io import replacing
from myna.report.markup import Markup, element, escape, join

STYLE = """
:root { color-scheme: light dark;
  --paper: #fbfaf8; --card: #ffffff; --ink: #1d1b18; --quiet: #6a655d; --line: #e4e0d9; --accent: #0f6f66;
  --second: #c2571a; --good: #176c35; --bad: #a3261f; --track: #f0ede8; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #141312; --card: #1e1c1a; --ink: #edeae5; --quiet: #a49e94; --line: #35312c; --accent: #52c2b5;
  --second: #f09a5e; --good: #6fcf8e; --bad: #f08a80; --track: #0d0c0b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 74rem; padding: 3rem 1.5rem 5rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 2.1rem; line-height: 1.15; letter-spacing: -.02em; margin: 0 0 .6rem; text-wrap: balance; }
h2 { font-size: 1.25rem; letter-spacing: -.01em; margin: 3.2rem 0 .9rem; }
h3 { font-size: 1.02rem; font-weight: 600; margin: 0 0 .8rem; text-wrap: balance; }
p { margin: .5rem 0; max-width: 46rem; }
.lead { font-size: 1.1rem; color: var(--quiet); }
a { color: var(--accent); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: 1rem; margin: 1.8rem 0; }
.figure, .card { background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: 1.1rem 1.25rem; }
.figure b { display: block; font-size: 1.75rem; font-weight: 650; letter-spacing: -.02em; line-height: 1.25; }
.figure span { color: var(--quiet); font-size: .9rem; }
.card { margin: 1rem 0; }
.trio { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 1.1rem; }
@media (max-width: 48rem) { .trio { grid-template-columns: 1fr; } body { padding-top: 1.5rem; } }
.clip { margin: 0; }
.clip figcaption { display: flex; justify-content: space-between; font-size: .9rem; font-weight: 600; }
.seconds { color: var(--quiet); font-weight: 400; }
.track { background: var(--track); border-radius: 8px; overflow: hidden; margin: .35rem 0 .5rem; height: 96px; }
.picture { position: relative; height: 96px; cursor: pointer; }
.picture img { display: block; width: 100%; height: 100%; }
.picture i { position: absolute; top: 0; bottom: 0; width: 2px; margin-left: -1px; background: #fff; opacity: .85; }
audio { width: 100%; height: 36px; }
.note { font-size: .88rem; font-weight: 400; color: var(--quiet); margin: .4rem 0 0; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 14px; }
table { border-collapse: collapse; width: 100%; }
caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
th, td { text-align: left; padding: .6rem 1.1rem; border-bottom: 1px solid var(--line); vertical-align: top; }
tbody tr:last-child > * { border-bottom: 0; }
thead th { font-size: .85rem; font-weight: 600; color: var(--quiet); }
tbody th { font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); }
.missing { color: var(--quiet); font-style: italic; }
.heard { font-weight: 400; } .heard b { color: var(--bad); font-weight: 600; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: 1rem 1.25rem;
  overflow-x: auto; font: 13.5px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
code { font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
details { margin: 1rem 0; } summary { cursor: pointer; color: var(--quiet); }
.plot { background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: 1rem 1.25rem; }
.plot svg { display: block; width: 100%; height: auto; } .plot text { fill: var(--quiet); font-size: 12px; }
.grid { stroke: var(--line); }
.curve polyline { fill: none; stroke: var(--colour); stroke-width: 2; stroke-linejoin: round; }
.curve circle { fill: var(--colour); } .curve.faint polyline { opacity: .35; stroke-width: 1; }
.colour0 { --colour: var(--accent); } .colour1 { --colour: var(--second); } .colour2 { --colour: #5b6ee1; }
.colour3 { --colour: #b0418c; } .colour4 { --colour: #8a7a1f; } .colour5 { --colour: var(--ink); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; margin: .6rem 0 0; padding: 0;
  font-size: .88rem; color: var(--quiet); }
.legend li::before { content: ""; display: inline-block; width: 1.2em; height: 3px; border-radius: 2px;
  margin-right: .5em; vertical-align: .25em; background: var(--colour); } .legend .faint::before { opacity: .35; }
footer { margin-top: 4rem; color: var(--quiet); font-size: .9rem; }
@media print { .card, .figure { break-inside: avoid; } audio { display: none; } }
"""

SCRIPT = """
// One sound at a time; a line runs over its picture, and a click there goes to that moment.
for (const clip of document.querySelectorAll('.clip')) {
  const sound = clip.querySelector('audio'), picture = clip.querySelector('.picture');
  if (!sound || !picture) continue;
  const line = document.createElement('i');
  line.hidden = true;
  picture.append(line);
  const draw = () => {
    line.style.left = (100 * sound.currentTime / (sound.duration || 1)) + '%';
    if (!sound.paused) requestAnimationFrame(draw);
  };
  sound.addEventListener('play', () => {
    for (const other of document.querySelectorAll('audio')) if (other !== sound) other.pause();
    line.hidden = false;
    draw();
  });
  sound.addEventListener('seeked', draw);
  picture.addEventListener('click', event => {
    const box = picture.getBoundingClientRect();
    sound.currentTime = (sound.duration || 0) * (event.clientX - box.left) / box.width;
    sound.play();
  });
}
"""

CONTENT = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""What a browser may load for the page: nothing but what the page itself holds."""


def document(
    title: str, *body: object, language: str = "en", style: str = "", script: str = "", sends: bool = False
) -> str:
    """A whole page; its heading belongs to the body. `style` and `script` are added to those that all pages have.

    A page that `sends` may talk to where it came from, which is a server on this machine or nobody.
    """
    allowed = f"{CONTENT}; connect-src 'self'" if sends else CONTENT
    head = join(
        (
            element("meta", charset="utf-8"),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", http_equiv="Content-Security-Policy", content=allowed),
            element("title", title),
            element("style", Markup(STYLE + style)),
        )
    )
    content = element("body", element("main", *body), element("script", Markup(SCRIPT + script)))
    return f'<!doctype html>\n<html lang="{escape(language)}"><head>{head}</head>{content}</html>\n'


def save(path: Path, text: str) -> None:
    """Whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
