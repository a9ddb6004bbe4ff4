"""Writing result files: few lines, and no more digits than a page can show; and plots as SVG files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined

from myna.core.io import save_text
from myna.report.page import Curve, line_plot

LINE_LENGTH = 120
SIGNIFICANT_DIGITS = 8
FILE_COLORS = ("#1668a8", "#c2571a", "#2e7d4f", "#b0418c", "#8a7a1f", "#333333")
"""Colors of the curves in an SVG file of its own."""


def save_figures(file: Path, figures: Any) -> None:
    """Write figures as JSON."""
    save_text(file, figures_text(figures) + "\n")


def figures_text(figures: Any) -> str:
    """Return figures as JSON. Floats have eight significant digits; what fits into a line stays in one."""
    return _layout(_rounded(figures), "")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    if isinstance(value, float) and math.isfinite(value):
        short = float(f"{value:.{SIGNIFICANT_DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) >= 10**SIGNIFICANT_DIGITS else short
    return value


def _layout(value: Any, indent: str) -> str:
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) + len(line) < LINE_LENGTH:
        return line
    inner = indent + " "
    if isinstance(value, dict):
        items = [f"{json.dumps(name, ensure_ascii=False)}: {_layout(one, inner)}" for name, one in value.items()]
    else:
        items = [_layout(one, inner) for one in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([opening, *_filled(items, inner), indent + closing])


def _filled(items: Iterable[str], indent: str) -> list[str]:
    """Lines of items with commas between them; short items share a line."""
    lines: list[str] = []
    for item in items:
        joined = f"{lines[-1]}, {item}" if lines else ""
        if lines and "\n" not in joined and len(joined) < LINE_LENGTH:
            lines[-1] = joined
        else:
            lines = [*lines[:-1], *(f"{line}," for line in lines[-1:]), indent + item]
    return lines


def plot_file(curves: Sequence[Curve], *, title: str, x_label: str, y_label: str) -> str:
    """Draw a plot as an SVG file that needs no style sheet, with its legend in it; empty without a point."""
    plot = line_plot(curves, title=title, x_label=x_label, y_label=y_label)
    if not plot["curves"]:
        return ""
    style = "text{font:13px sans-serif;fill:#333}.grid{stroke:#ddd}polyline{fill:none;stroke-width:2}"
    for number, color in enumerate(FILE_COLORS):
        style += f".color{number}{{fill:{color}}}.color{number} polyline{{stroke:{color}}}"
    return _drawn("plot.svg", plot=plot, style=style + ".faint{opacity:.35}")


@dataclass(frozen=True, slots=True)
class BarColumn:
    """Column of horizontal bars, a bar for each row of a chart, with a line at a `limit`."""

    title: str
    values: Sequence[float]
    labels: Sequence[str]
    limit: float | None = None
    is_logarithmic: bool = False


def bars_file(names: Sequence[str], columns: Sequence[BarColumn], *, faint: Sequence[bool] = ()) -> str:
    """Draw bars of the named rows as an SVG file, with columns side by side; `faint` rows are grey."""
    width, left = 640 // len(columns), 245

    def length(column: BarColumn, value: float) -> float:
        most = max(*column.values, column.limit or 0.0, 1e-9)
        room = width - 16 - 7 * max(map(len, column.labels), default=0)
        share = math.log1p(value) / math.log1p(most) if column.is_logarithmic else value / most
        return round(room * max(0.0, share), 1)

    drawn = [
        {
            "title": column.title,
            "left": left + number * width,
            "limit": None if column.limit is None else left + number * width + length(column, column.limit),
            "bars": [(length(column, value), label) for value, label in zip(column.values, column.labels, strict=True)],
        }
        for number, column in enumerate(columns)
    ]
    rows = list(zip(names, faint or [False] * len(names), strict=True))
    return _drawn("bars.svg", rows=rows, columns=drawn, width=900, height=40 + 26 * len(rows))


def _drawn(template: str, **context: object) -> str:
    """Render a template of this folder, which may use those of the package."""
    loaders = [FileSystemLoader(Path(__file__).parent), PackageLoader("myna", "")]
    environment = Environment(
        loader=ChoiceLoader(loaders), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(**context) + "\n"
