"""Terminal output that several commands share: progress bars, sentences, warnings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from myna.core.progress import ProgressCallback

errors = Console(stderr=True, markup=False, emoji=False)


def console(*, stderr: bool = False) -> Console:
    """Return a console that prints brackets as they are: a person writes them, as in [laughs]."""
    return Console(stderr=stderr, markup=False, emoji=False)


@contextmanager
def progress_bars() -> Iterator[ProgressCallback]:
    """Yield a progress callback that draws a bar for each stage on standard error."""
    with open_bars() as bars:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, state="")
            bars.update(tasks[stage], completed=done, total=total)

        yield update


def open_bars(*, shown: bool = True) -> Progress:
    """Return progress bars with a `state` text each, on standard error."""
    return Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=errors,
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
        if "evaluation" in row:
            losses = row["evaluation"]
            gain = (
                f", {losses['against_base']:+.4f} against the model it began with" if "against_base" in losses else ""
            )
            self.on_message(f"step {row['step']}: evaluation loss {losses['loss']:.4f}{gain}")
        elif "speech_eval" in row:
            self.on_message(f"step {row['step']}: {_speech_scores(row['speech_eval'])}")
        elif self._task is not None:
            speed = row["speed"]
            pace = f"{speed['tokens_per_second']:,.0f} tokens/s  {speed['audio_per_second']:.1f} audio-s/s"
            self._bars.update(self._task, completed=row["step"], state=f"loss {row['loss']:.4f}  {pace}")

    def progress(self, stage: str, done: int, total: int | None) -> None:
        """Show the progress of a speech evaluation, which may take minutes between two steps."""
        if self._task is not None:
            self._bars.update(self._task, state=f"{stage}, {done} of {total}")


def _speech_scores(scores: dict[str, Any]) -> str:
    gain = f", {scores['gain']:+.3f} over the untuned model" if "gain" in scores else ""
    looped = f" ({scores['looped']} items looped)" if scores.get("looped") else ""
    wer = f", {scores['wer']:.1%} word errors{looped}" if scores["wer"] is not None else ""
    similarity = f", similarity {scores['similarity']:.3f}" if scores["similarity"] is not None else ""
    return f"score {scores['score']:.3f}{gain}{wer}{similarity}"


def show_notes(notes: Sequence[str], console: Console) -> None:
    """Print sentences as they are."""
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def show_warnings(warnings: Sequence[str], console: Console) -> None:
    """Print warnings, which belong above every figure."""
    for warning in warnings:
        console.print(f"warning: {warning}", style="bold red", markup=False, highlight=False, soft_wrap=True)
