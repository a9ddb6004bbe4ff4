"""Typed access to the fields of a record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from myna.data.importers.base import RecordError
from myna.data.utterance import TASKS, Span

T = TypeVar("T")


def require_type(value: Any, kind: type[T], name: str) -> T:
    if not isinstance(value, kind):
        raise RecordError("malformed", f"`{name}` is {type(value).__name__}, not {kind.__name__}")
    return value


def require_field(data: Mapping[str, Any], key: str, kind: type[T]) -> T:
    if data.get(key) is None:
        raise RecordError("malformed", f"there is no `{key}`")
    return require_type(data[key], kind, key)


def parse_span(start: Any, end: Any = None, duration: Any = None) -> Span | None:
    """A span from start, end or duration in seconds; None where the source gives none of them."""
    if start is None and end is None and duration is None:
        return None
    try:
        first = float(start or 0)
        last = None if end is None else float(end)
        if last is None and duration is not None:
            last = first + float(duration)
        return Span(first, last)
    except (TypeError, ValueError, OverflowError) as error:
        raise RecordError("bad span", str(error)) from None


def collect_extras(data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields without a place of their own, as JSON values. Names reserved by Myna get a prefix unless they fit."""
    extras = {}
    for key, value in data.items():
        value = _to_json_value(value)
        is_reserved = key in ("references", "reference_only") or (key == "task" and value not in TASKS)
        if value not in (None, ""):
            extras[f"source_{key}" if is_reserved else key] = value
    return extras


def _to_json_value(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case list() | tuple():
            return [_to_json_value(item) for item in value]
        case dict():
            return {str(key): _to_json_value(item) for key, item in value.items()}
        case bytes():
            return f"{len(value)} bytes"
        case _:
            return str(value)
