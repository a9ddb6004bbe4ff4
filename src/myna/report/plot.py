"""Curves as SVG: drawn once, in the colours of the page, with names for those who do not see them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from myna.report.markup import Markup, element

WIDTH, HEIGHT = 1040, 340
LEFT, RIGHT, TOP, BOTTOM = 48, 16, 30, 42


@dataclass(frozen=True, slots=True)
class Curve:
    """`look` is a class of the page's style: faint, a line, or a line with dots. So is `colour`, one of six;
    curves that belong together may share one."""

    name: str
    points: Sequence[tuple[float, float]]
    look: Literal["faint", "line", "dots"] = "line"
    colour: int = 0


def plot(curves: Sequence[Curve], *, title: str, across: str, upwards: str) -> Markup:
    """All curves on one pair of axes; `across` and `upwards` say what these count."""
    points = [point for curve in curves for point in curve.points if all(map(math.isfinite, point))]
    if not points:
        return element("p", f"{title}: there is nothing to draw", class_="missing")
    left, right = _bounds(x for x, _ in points)
    across_ticks = [tick for tick in ticks(left, right) if left <= tick <= right]
    upward_ticks = ticks(*_bounds(y for _, y in points))
    low, high = upward_ticks[0], upward_ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return LEFT + wide * (x - left) / ((right - left) or 1.0), TOP + tall * (high - y) / (high - low)

    parts = [element("title", title), element("desc", _described(curves))]
    for tick in upward_ticks:
        y = place(left, tick)[1]
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=_short(y), y2=_short(y), class_="grid"))
        parts.append(element("text", f"{tick:g}", x=LEFT - 8, y=_short(y + 4), text_anchor="end"))
    for tick in across_ticks:
        x = place(tick, low)[0]
        parts.append(element("text", f"{tick:g}", x=_short(x), y=HEIGHT - BOTTOM + 18, text_anchor="middle"))
    parts.append(element("text", across, x=WIDTH - RIGHT, y=HEIGHT - 4, text_anchor="end", class_="axis"))
    parts.append(element("text", upwards, x=LEFT, y=TOP - 14, class_="axis"))
    for curve in curves:
        placed = [place(x, y) for x, y in curve.points if math.isfinite(x) and math.isfinite(y)]
        drawn = " ".join(f"{_short(x)},{_short(y)}" for x, y in placed)
        inside = [element("polyline", points=drawn)]
        if curve.look == "dots":
            inside += [element("circle", cx=_short(x), cy=_short(y), r=3.5) for x, y in placed]
        parts.append(element("g", *inside, class_=f"curve colour{curve.colour} {curve.look}"))
    drawing = element(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{title}. {_described(curves)}",
        xmlns="http://www.w3.org/2000/svg",
    )
    names = [element("li", curve.name, class_=f"colour{curve.colour} {curve.look}") for curve in curves]
    return element("div", drawing, element("ul", *names, class_="legend"), class_="plot")


def smoothed(points: Sequence[tuple[float, float]], keep: float) -> list[tuple[float, float]]:
    """A running mean in which the past weighs `keep`; it starts without a bias towards zero."""
    made, mean, weight = [], 0.0, 0.0
    for x, y in points:
        mean, weight = keep * mean + (1 - keep) * y, keep * weight + (1 - keep)
        made.append((x, mean / weight))
    return made


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that hold the bounds between them."""
    if high <= low:
        low, high = low - 0.5, low + 0.5
    rough = (high - low) / about
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _bounds(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    return min(found), max(found)


def _described(curves: Sequence[Curve]) -> str:
    told = (
        f"{curve.name}: from {curve.points[0][1]:.3g} to {curve.points[-1][1]:.3g}." for curve in curves if curve.points
    )
    return " ".join(told)


def _short(number: float) -> str:
    return f"{number:.1f}"
