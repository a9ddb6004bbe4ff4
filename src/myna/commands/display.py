"""Terminal output that several commands share: progress bars, sentences, warnings."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich import progress as bar
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from myna.core.progress import ProgressCallback, progress_lines

Result = TypeVar("Result")


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints square brackets as they are, because users write them, as in [laughs]."""
    return Console(stderr=stderr, markup=False, emoji=False)


def show(*lines: str, style: str = "none", stderr: bool = False) -> None:
    """Print lines as they are, without breaking long ones."""
    for line in lines:
        console(stderr=stderr).print(line, style=style, highlight=False, soft_wrap=True)


def show_warnings(warnings: Iterable[str], *, stderr: bool = False) -> None:
    """Print warnings, which belong above every figure."""
    show(*(f"warning: {warning}" for warning in warnings), style="bold red", stderr=stderr)


def show_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None, stderr: bool = False
) -> None:
    """Print a table with a frame."""
    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*row)
    console(stderr=stderr).print(table)


def plain_table(*titles: str, **settings: Any) -> Table:
    """Return a table without a frame, to which rows are added."""
    return Table(*titles, box=None, header_style="bold", padding=(0, 2, 0, 0), **settings)


def show_json(value: Any) -> None:
    """Print a result as JSON, with letters as they are where standard output can encode all of them."""
    is_unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    print(json.dumps(value, indent=2, ensure_ascii=not is_unicode))


@contextmanager
def progress_bars() -> Iterator[ProgressCallback]:
    """Yield a progress callback that draws a bar for each stage on standard error, while listening with its speed, or
    writes lines where standard error is a file."""
    bars = open_bars()
    if not bars.console.is_terminal:
        with progress_lines(lambda line: show(line, stderr=True)) as write_line:
            yield write_line
        return
    with bars:
        tasks: dict[str, TaskID] = {}
        before: dict[str, int] = {}

        def update(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage], before[stage] = bars.add_task(stage, total=total, state="", completed=done), done
            elapsed = next(one.elapsed for one in bars.tasks if one.id == tasks[stage])
            state = ""
            if stage == "listening" and elapsed and done > before[stage]:
                state = f"seconds of audio, {(done - before[stage]) / elapsed:.1f} hours an hour"
            bars.update(tasks[stage], completed=done, total=total, state=state)

        yield update


def call_with_bars(call: Callable[..., Result], *words: Any, **options: Any) -> Result:
    """Call a function that reports its progress, which is drawn as bars."""
    with progress_bars() as progress:
        return call(*words, progress=progress, **options)


def open_bars(*, shown: bool = True) -> Progress:
    """Return progress bars with a `state` text each, on standard error."""
    return Progress(
        bar.TextColumn("{task.description}", style="bold", markup=False),
        bar.BarColumn(),
        bar.MofNCompleteColumn(),
        bar.TextColumn("{task.fields[state]}", markup=False),
        bar.TimeElapsedColumn(),
        bar.TimeRemainingColumn(),
        console=console(stderr=True),
        disable=not shown,
    )


class TrainingDisplay:
    """Live line with the loss, the speed and the time left, and messages above it."""

    def __init__(self, *, shown: bool = True) -> None:
        self._shown = shown
        self._bars = open_bars(shown=shown)
        self._task: TaskID | None = None

    def __enter__(self) -> TrainingDisplay:
        self._bars.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bars.__exit__(*error)

    def on_message(self, text: str) -> None:
        if self._shown:
            self._bars.console.print(text, highlight=False)

    def on_start(self, steps: int, done: int) -> None:
        self._task = self._bars.add_task("training", total=steps, completed=done, state="")

    def on_metrics(self, row: dict[str, Any]) -> None:
        if "speed" in row and self._task is not None:
            speed = row["speed"]
            pace = f"{speed['tokens_per_second']:,.0f} tokens/s  {speed['audio_per_second']:.1f} audio-s/s"
            self._bars.update(self._task, completed=row["step"], state=f"loss {row['loss']:.4f}  {pace}")

    def progress(self, stage: str, done: int, total: int | None) -> None:
        """Show the progress of a speech evaluation, which may take minutes between two steps."""
        if self._task is not None:
            self._bars.update(self._task, state=f"{stage}, {done} of {total}")
