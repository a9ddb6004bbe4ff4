"""Progress callbacks of long work: the caller decides whether and how progress is shown."""

from collections.abc import Callable

ProgressCallback = Callable[[str, int, int | None], None]
"""Function called with the stage, the amount done, and the total amount (None if unknown)."""


def silent(stage: str, done: int, total: int | None) -> None:
    """Show no progress: the default callback."""
