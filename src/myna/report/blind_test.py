"""Two sounds, and which is better, without knowing whose they are: by keyboard or mouse, with or without eyes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from myna.report.markup import Markup, element, join

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


@dataclass(frozen=True, slots=True)
class Pair:
    """`sounds` are names of sounds, in the order in which they are offered; `names` are told when all is over."""

    id: str
    text: str
    note: str
    sounds: tuple[str, str]
    names: tuple[str, str]
    real: str | None = None
    """The name of a sound that may be heard beside them, and whose maker is no secret."""
    language: str = ""


def blind(
    pairs: Sequence[Pair],
    sounds: Mapping[str, str | None],
    *,
    name: str,
    intervals: Sequence[Sequence[float]],
    level: float,
) -> Markup:
    """The place to listen. `sounds` are data URIs, None where there is nothing to hear; answers are kept under `name`;
    `intervals[n][k]` is the lower end for k of n answers, at the stated level."""
    data: dict[str, Any] = {
        "name": name,
        "pairs": [asdict(pair) for pair in pairs],
        "sounds": dict(sounds),
        "intervals": [[round(low, 4) for low in lows] for lows in intervals],
        "level": level,
    }
    return join(
        (
            element("script", as_script(data), type="application/json", id="blind-data"),
            element("section", *_controls(len(pairs)), class_="card blind", id="blind", aria_label="blind listening"),
            _help(),
            element("noscript", element("p", "Listening blindly needs JavaScript.", class_="missing")),
        )
    )


def as_script(data: Any) -> Markup:
    """JSON that cannot end the script in which it stands."""
    return Markup(json.dumps(data, ensure_ascii=False).replace("<", "\\u003c"))


def _controls(count: int) -> list[Markup]:
    sides = [
        element(
            "div",
            element("h4", letter, element("span", "", class_="who")),
            _button("play", "Play ", letter, key=str(number + 1), label=f"play {letter}"),
            element("div", element("i", ""), class_="meter", aria_hidden="true"),
            element("p", "", class_="note heard"),
            class_="side",
        )
        for number, letter in enumerate("AB")
    ]
    return [
        element(
            "div",
            element("label", "Your name ", element("input", id="listener", type="text", autocomplete="name")),
            element("label", element("input", id="keys", type="checkbox", checked=True), " single keys"),
            _button("help", "Keys", key="?", label="show the keys"),
            class_="row",
        ),
        element("progress", max=count, value=0, aria_label="pairs answered"),
        element("p", "", class_="note", id="where"),
        element("h3", "", id="line", tabindex="-1", aria_describedby="where"),
        element("p", "", class_="note", id="about"),
        element("div", *sides, class_="sides"),
        _button("real", "The real recording", key="R", label="play the real recording"),
        element(
            "div",
            _button("choose", "A is better", key="A", choice="0"),
            _button("choose", "No difference", key="=", choice="tie"),
            _button("choose", "B is better", key="B", choice="1"),
            class_="row choices",
            role="group",
            aria_label="Which is better?",
        ),
        element("p", "", id="status", role="status", aria_live="polite"),
        element(
            "div",
            _button("back", "Before", key="←", label="the pair before"),
            _button("next", "Next", key="→", label="the next pair"),
            element("span", "", class_="gap"),
            _button("download", "Save answers as a file"),
            _button("reveal", "Show who is who"),
            class_="row",
        ),
        element("div", "", id="result", tabindex="-1", hidden=True),
    ]


def _button(
    action: str, *content: object, key: str = "", label: str | None = None, choice: str | None = None
) -> Markup:
    shown = element("kbd", key, aria_hidden="true") if key else Markup()
    return element(
        "button",
        *content,
        shown,
        type="button",
        data_action=action,
        data_choice=choice,
        aria_label=label,
        aria_pressed="false" if choice is not None else None,
    )


def _help() -> Markup:
    rows = [join((element("dt", element("kbd", keys)), element("dd", what))) for keys, what in KEYS]
    return element(
        "dialog",
        element("h3", "Keys", id="help-title"),
        element("dl", *rows),
        element("p", "Single keys can be switched off; every button can be reached with Tab.", class_="note"),
        _button("close", "Close"),
        id="help",
        aria_labelledby="help-title",
    )


def style() -> str:
    return _file("blind.css")


def script() -> str:
    return _file("blind.js")


def _file(name: str) -> str:
    return (files("myna.report") / name).read_text(encoding="utf-8")
