"""`myna demo`: all steps on one voice, with a page to compare by ear."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table

from myna.commands.command import command
from myna.commands.display import TrainingDisplay, console, show_notes
from myna.commands.options import ASR, Language, Layout, PathLike, Seed, Settings, option

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from myna.demo.run import DemoResult


@command("demo", example="myna demo --voice recordings --out demo-mine")
def _(
    out: Annotated[PathLike, option("Folder to write.", "-o")] = "demo",
    *,
    voice: Annotated[
        str | None, option("Your recordings, in any layout that `myna prepare` reads; at least 8 clips.")
    ] = None,
    format: Layout = None,
    language: Language = "",
    model: Annotated[str, option("Hub name or folder of the model.", "-m")] = "fledgling",
    asr: ASR = None,
    seed: Seed = 0,
    settings: Settings = (),
    strength: Annotated[
        float | None, option("Scale of the LoRA when speaking; if not given, by the model.", least=0)
    ] = None,
) -> None:
    """Fine-tune a voice and hear it before and after: recordings, codes, a LoRA, evaluation, and a page."""
    from myna.core.config import format_overrides
    from myna.demo.run import run_demo

    with DemoDisplay() as display:
        result = run_demo(
            Path(out),
            voice=voice,
            format=format,
            language=language,
            model=model,
            asr=asr,
            seed=seed,
            settings=format_overrides(settings),
            strength=strength,
            progress=display.progress,
            observer=display,
        )
    show_demo(result, console())


class DemoDisplay(TrainingDisplay):
    """Training display that shows one bar at a time, of the stage that is running."""

    def __init__(self) -> None:
        super().__init__()
        self._stages: dict[str, TaskID] = {}

    def on_start(self, steps: int, done: int) -> None:
        self._hide_finished()
        super().on_start(steps, done)

    def progress(self, stage: str, done: int, total: int | None) -> None:
        if stage not in self._stages:
            self._hide_finished()
            self._stages[stage] = self._bars.add_task(stage, total=total, state="")
        self._bars.update(self._stages[stage], completed=done, total=total)

    def _hide_finished(self) -> None:
        for task in self._bars.task_ids:
            self._bars.update(task, visible=False)


def show_demo(result: DemoResult, console: Console) -> None:
    """Print the table of scores, the metrics that are missing, and the next command."""
    header, rows = result.score_table()
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    show_notes(result.unmeasured, console)
    minutes, gigabytes = sum(result.seconds.values()) / 60, result.peak_memory_bytes / 1e9
    console.print(f"{minutes:.1f} minutes, at most {gigabytes:.1f} GB of memory", highlight=False)
    show_notes([f"Open {result.folder / 'report.html'}"], console)
    console.print("Go on with your own recordings: myna demo --voice FOLDER --out demo-mine", highlight=False)
