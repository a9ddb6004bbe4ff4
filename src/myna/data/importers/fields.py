"""Values of a record, taken with care."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from myna.data.importers.base import Bad
from myna.data.utterance import TASKS, Span

T = TypeVar("T")


def typed(value: Any, kind: type[T], name: str) -> T:
    if not isinstance(value, kind):
        raise Bad("malformed", f"`{name}` is {type(value).__name__}, not {kind.__name__}")
    return value


def required(data: Mapping[str, Any], key: str, kind: type[T]) -> T:
    if data.get(key) is None:
        raise Bad("malformed", f"there is no `{key}`")
    return typed(data[key], kind, key)


def stretch(start: Any, end: Any = None, duration: Any = None) -> Span | None:
    """A span from what a source gives for it; None where it gives nothing."""
    if start is None and end is None and duration is None:
        return None
    try:
        first = float(start or 0)
        last = None if end is None else float(end)
        if last is None and duration is not None:
            last = first + float(duration)
        return Span(first, last)
    except (TypeError, ValueError) as error:
        raise Bad("bad span", str(error)) from None


def extras(data: Mapping[str, Any]) -> dict[str, Any]:
    """What else a source said, as plain JSON. A name that means something to Myna is kept aside unless it fits."""
    kept = {}
    for key, value in data.items():
        value = _plain(value)
        taken = key in ("references", "reference_only") or (key == "task" and value not in TASKS)
        if value not in (None, ""):
            kept[f"source_{key}" if taken else key] = value
    return kept


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case list() | tuple():
            return [_plain(item) for item in value]
        case dict():
            return {str(key): _plain(item) for key, item in value.items()}
        case bytes():
            return f"{len(value)} bytes"
        case _:
            return str(value)
