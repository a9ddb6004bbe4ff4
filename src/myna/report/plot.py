"""Line plots as inline SVG, in the colors of the page, with a description for screen readers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from myna.report.markup import element

WIDTH, HEIGHT = 1040, 340
"""Of the view box, in SVG units, as are the margins."""
LEFT, RIGHT, TOP, BOTTOM = 48, 16, 30, 42


@dataclass(frozen=True, slots=True)
class Curve:
    """A named series of (x, y) points. `color` is one of six of the page's style sheet; curves may share one."""

    name: str
    points: Sequence[tuple[float, float]]
    style: Literal["faint", "line", "dots"] = "line"
    color: int = 0


def line_plot(curves: Sequence[Curve], *, title: str, x_label: str, y_label: str) -> Markup:
    """All curves on one pair of axes. Points that are not finite are left out."""
    points = [point for curve in curves for point in curve.points if all(map(math.isfinite, point))]
    if not points:
        return element("p", f"{title}: there is nothing to draw", class_="missing")
    xs, ys = zip(*points, strict=True)
    left, right = min(xs), max(xs)
    x_ticks = [tick for tick in axis_ticks(left, right) if left <= tick <= right]
    y_ticks = axis_ticks(min(ys), max(ys))
    low, high = y_ticks[0], y_ticks[-1]

    def to_svg(x: float, y: float) -> tuple[float, float]:
        width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return LEFT + width * (x - left) / ((right - left) or 1.0), TOP + height * (high - y) / (high - low)

    parts = [element("title", title), element("desc", _description(curves))]
    for tick in y_ticks:
        y = to_svg(left, tick)[1]
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=_short(y), y2=_short(y), class_="grid"))
        parts.append(element("text", f"{tick:g}", x=LEFT - 8, y=_short(y + 4), text_anchor="end"))
    for tick in x_ticks:
        x = to_svg(tick, low)[0]
        parts.append(element("text", f"{tick:g}", x=_short(x), y=HEIGHT - BOTTOM + 18, text_anchor="middle"))
    parts.append(element("text", x_label, x=WIDTH - RIGHT, y=HEIGHT - 4, text_anchor="end", class_="axis"))
    parts.append(element("text", y_label, x=LEFT, y=TOP - 14, class_="axis"))
    for curve in curves:
        svg_points = [to_svg(x, y) for x, y in curve.points if math.isfinite(x) and math.isfinite(y)]
        coordinates = " ".join(f"{_short(x)},{_short(y)}" for x, y in svg_points)
        shapes = [element("polyline", points=coordinates)]
        if curve.style == "dots":
            shapes += [element("circle", cx=_short(x), cy=_short(y), r=3.5) for x, y in svg_points]
        parts.append(element("g", *shapes, class_=f"curve color{curve.color} {curve.style}"))
    svg = element(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{title}. {_description(curves)}",
        xmlns="http://www.w3.org/2000/svg",
    )
    legend = [element("li", curve.name, class_=f"color{curve.color} {curve.style}") for curve in curves]
    return element("div", svg, element("ul", *legend, class_="legend"), class_="plot")


def smooth_curve(points: Sequence[tuple[float, float]], decay: float) -> list[tuple[float, float]]:
    """Exponential moving average with bias correction."""
    smoothed, mean, weight = [], 0.0, 0.0
    for x, y in points:
        mean, weight = decay * mean + (1 - decay) * y, decay * weight + (1 - decay)
        smoothed.append((x, mean / weight))
    return smoothed


def axis_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers; the first is at most `low`, the last at least `high`."""
    if high <= low:
        low, high = low - 0.5, low + 0.5
    rough = (high - low) / count
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _description(curves: Sequence[Curve]) -> str:
    return " ".join(
        f"{curve.name}: from {curve.points[0][1]:.3g} to {curve.points[-1][1]:.3g}." for curve in curves if curve.points
    )


def _short(number: float) -> str:
    return f"{number:.1f}"
