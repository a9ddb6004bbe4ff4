"""Progress callbacks of long work: the caller decides whether and how progress is shown."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[str, int, int | None], None]
"""Called with what is being done, how much of it is done, and of how much (None where that is not known)."""


def silent(stage: str, done: int, total: int | None) -> None:
    """The default progress callback: shows nothing."""
