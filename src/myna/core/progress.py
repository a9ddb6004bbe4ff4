"""Progress callbacks of long work: the caller decides whether and how progress is shown."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ProgressCallback = Callable[[str, int, int | None], None]
"""Function called with the stage, the amount done, and the total amount (None if unknown)."""
LINE_SECONDS = 30.0
"""Seconds between two lines of progress in a file."""


def silent(stage: str, done: int, total: int | None) -> None:
    """Show no progress: the default callback."""


@contextmanager
def progress_lines(write: Callable[[str], None]) -> Iterator[ProgressCallback]:
    """Yield a progress callback for output that is no terminal: a line is written every half a minute."""
    latest: list[tuple[str, int, int | None]] = []
    begun: dict[str, tuple[float, int]] = {}
    is_over = threading.Event()

    def update(stage: str, done: int, total: int | None) -> None:
        begun.setdefault(stage, (time.monotonic(), done))
        latest[:] = [(stage, done, total)]

    def write_lines() -> None:
        while not is_over.wait(LINE_SECONDS):
            for stage, done, total in latest.copy():
                start, before = begun[stage]
                elapsed = time.monotonic() - start
                line = f"{stage}: {done}{'' if total is None else f' of {total}'}, {elapsed:.0f} s so far"
                if total is not None and done > before:
                    line += f", about {elapsed * (total - done) / (done - before):.0f} s left"
                write(line)

    writer = threading.Thread(target=write_lines, daemon=True)
    writer.start()
    try:
        yield update
    finally:
        is_over.set()
        writer.join()
