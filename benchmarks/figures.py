"""Writing result files: few lines, and no more digits than a page can show."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from myna.core.io import save_text

LINE_LENGTH = 120
SIGNIFICANT_DIGITS = 8


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
