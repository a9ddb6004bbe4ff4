"""`myna curate`, `xray` and `correct`: from raw recordings to clips with text and speaker."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from myna.commands.command import command
from myna.commands.display import console, open_bars, progress_bars, show_notes
from myna.commands.options import Json, PathLike, Ray, SettingOverrides, Workers, option
from myna.core.errors import ConfigError
from myna.core.io import report_disk_errors
from myna.core.progress import ProgressCallback, silent

if TYPE_CHECKING:
    from rich.progress import TaskID

    from myna.curate.curation import CurationForecast, CurationResult
    from myna.curate.xray import Xray

LISTENING_STAGE = "listening"
"""Stage of a curation that counts seconds of audio."""

Recordings = Annotated[
    PathLike | Sequence[PathLike],
    option("Folders and files of recordings, sound or film; none to decide again what OUT holds."),
]


class CurationOptions(TypedDict, total=False):
    """Settings of a curation. The named ones are short for `listen.asr`, `listen.language`, `speakers.number` and
    `speakers.enrolment`."""

    asr: Annotated[str | None, option("Name or folder of a Whisper for faster-whisper: base, large-v3-turbo.")]
    language: Annotated[str | None, option("Language of all recordings, as en; else it is detected.")]
    speakers: Annotated[int | None, option("Number of speakers, if you know it.", least=1)]
    enrol: Annotated[
        Sequence[str], option("Recording of a speaker to keep, FILE or NAME=FILE; others are dropped. Repeatable.")
    ]
    settings_file: Annotated[PathLike | None, Parameter(name="--settings", help="YAML file of settings.")]
    settings: Annotated[
        SettingOverrides,
        Parameter(name="--set", help="Change a setting, as keep.min_snr_db=20; OUT/curate.yaml has all. Repeatable."),
    ]


@report_disk_errors()
def curate(
    sources: Recordings = (),
    out: Annotated[PathLike | None, option("Folder to write.", "-o")] = None,
    *,
    script: Annotated[
        PathLike | None, option("Text that is read (txt, srt, vtt); by default a file of the recording's name.")
    ] = None,
    limit: Annotated[int | None, option("Recordings to take, by name.", least=1)] = None,
    workers: Workers = None,
    ray: Ray = None,
    progress: ProgressCallback = silent,
    **options: Unpack[CurationOptions],
) -> CurationResult:
    """Turn raw recordings into clips with text and speaker; `prepare` reads the result.

    Every second is in OUT/segments.parquet, kept or dropped with its reason. Called again, it continues where it
    stopped. With other thresholds and no sources it decides again within seconds and does not listen again:
    `myna curate --out OUT --set keep.min_snr_db=20`. The folder remembers its settings.
    """
    from myna.curate.curation import run_curation
    from myna.curate.settings import curation_settings

    if out is None:
        raise ConfigError("`out` is missing", hint="myna curate SOURCE --out data/NAME")
    return run_curation(
        _paths(sources),
        Path(out),
        curation_settings(Path(out), **options),
        script=Path(script) if script is not None else None,
        limit=limit,
        workers=workers,
        ray=ray,
        progress=progress,
    )


@report_disk_errors()
def forecast_curation(
    sources: Recordings,
    *,
    workers: int | None = None,
    progress: ProgressCallback = silent,
    **options: Unpack[CurationOptions],
) -> CurationForecast:
    """Listen to ten minutes of the sources; return what `curate` would keep and how long it would take."""
    from myna.curate.curation import forecast
    from myna.curate.settings import curation_settings

    return forecast(_paths(sources), curation_settings(None, **options), workers=workers, progress=progress)


@command("curate", curate, example="myna curate podcast/*.mp3 --out data/podcast --asr large-v3-turbo")
def _(
    call: partial[CurationResult],
    *,
    dry_run: Annotated[bool, option("Listen to ten minutes; forecast the hours kept and the time it takes.")] = False,
) -> None:
    options = dict(call.keywords)
    if options.get("sources"):
        show_notes([f"without {note}" for note in _missing_models(options)], console(stderr=True))
    elif dry_run:
        raise ConfigError("`dry_run` needs recordings", hint="myna curate SOURCE --dry-run")
    if not dry_run:
        with _curation_bars() as progress:
            result = call(progress=progress)
        _show_curation(result, console())
        return
    for name in ("out", "script", "limit", "ray"):
        options.pop(name, None)
    with _curation_bars() as progress:
        forecast = forecast_curation(**options, progress=progress)
    _show_forecast(forecast, console())


@report_disk_errors()
def xray(
    folder: Annotated[PathLike, option("A folder made by `myna curate` or `myna prepare`.")],
    *,
    model: Annotated[str | None, option("Compare the texts with this model's tokenizer.", "-m")] = None,
    progress: ProgressCallback = silent,
) -> Xray:
    """Show what a dataset holds: FOLDER/xray/report.html, a page to look at and listen to, and xray.json.

    The page says where the hours went, what each threshold costs, who speaks, and which texts are doubtful; it lists
    duplicates and leaks, and ends in a verdict. It needs no network.
    """
    from myna.curate.xray import run_xray

    return run_xray(Path(folder), model=model, progress=progress)


@command("xray", xray, example="myna xray data/podcast")
def _(call: Callable[..., Xray], *, as_json: Json = False) -> None:
    with progress_bars() as progress:
        result = call(progress=progress)
    if as_json:
        print(json.dumps(result.numbers, ensure_ascii=False, indent=1))
        return
    colors = {"good": "green", "bad": "red"}
    for sentence in result.numbers["verdict"]:
        mark = Text("● ", colors.get(sentence["kind"], "dim"))
        console().print(mark.append(f"{sentence['text']}.", "none"), soft_wrap=True)
    show_notes([*result.numbers["notes"], f"Look and listen:  {result.page}"], console())


@report_disk_errors()
def correct(
    folder: Annotated[PathLike, option("A folder made by `myna curate` or `myna import`.")],
    clip: Annotated[str | None, option("Id of a clip, as the X-ray shows it.")] = None,
    *,
    text: Annotated[str | None, option("The right text of the clip.")] = None,
    drop: Annotated[bool, option("Do not use the clip.")] = False,
    restore: Annotated[bool, option("Use the clip, whatever dropped it.")] = False,
    speaker: Annotated[str | None, option("The clip's speaker; without a clip A=B: A is the same person as B.")] = None,
    start: Annotated[float | None, option("Second of the recording at which the clip begins.", least=0)] = None,
    end: Annotated[float | None, option("Second of the recording at which the clip ends.", least=0)] = None,
) -> list[str]:
    """Correct a dataset by hand: add one correction to FOLDER/corrections.jsonl. The later one wins.

    `myna curate --out FOLDER` applies them within seconds; a folder that was not curated has them applied when
    `myna prepare FOLDER` reads it.
    """
    from myna.data.corrections import add_correction, make_correction

    notes: list[str] = []
    made = make_correction(clip, text=text, drop=drop, restore=restore, speaker=speaker, start=start, end=end)
    add_correction(Path(folder), made, notes.append)
    return notes


@command("correct", correct, example='myna correct data/podcast podcast/ep1-00042 --text "The right words."')
def _(call: partial[list[str]]) -> None:
    notes, folder = call(), Path(call.keywords["folder"])
    is_curated = (folder / "segments.parquet").is_file()
    go_on = f"myna curate --out {folder}" if is_curated else f"myna prepare {folder} --model MODEL --out NEW"
    show_notes([*notes, f"added to {folder / 'corrections.jsonl'}", f"Apply it:  {go_on}"], console())


def _paths(sources: PathLike | Sequence[PathLike]) -> list[Path]:
    return [Path(one) for one in ([sources] if isinstance(sources, str | os.PathLike) else sources)]


def _missing_models(options: dict[str, Any]) -> list[str]:
    from myna.curate.first_pass import missing_models
    from myna.curate.settings import curation_settings

    given = {name: value for name, value in options.items() if name in CurationOptions.__annotations__}
    folder = Path(options["out"]) if options.get("out") is not None else None
    return missing_models(curation_settings(folder, **given).listen)


@contextmanager
def _curation_bars() -> Iterator[ProgressCallback]:
    """Yield a progress callback that draws a bar for each stage, with the speed in hours of audio while listening."""
    with open_bars() as bars:
        tasks: dict[str, TaskID] = {}
        before: dict[str, int] = {}

        def update(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage], before[stage] = bars.add_task(stage, total=total, state="", completed=done), done
            task = next(one for one in bars.tasks if one.id == tasks[stage])
            state = ""
            if stage == LISTENING_STAGE and task.elapsed and done > before[stage]:
                state = f"seconds of audio, {(done - before[stage]) / task.elapsed:.1f} hours an hour"
            bars.update(tasks[stage], completed=done, total=total, state=state)

        yield update


def _show_curation(result: CurationResult, console: Console) -> None:
    """Print where the hours went, who speaks, and the next commands."""
    table = Table(title=f"{result.recordings} recordings, {_hours(result.seconds)}", box=None, padding=(0, 2, 0, 0))
    for title in ("", "hours", "share"):
        table.add_column(title, justify="right" if title else "left")
    for name, seconds in (("kept", result.kept_seconds), *result.dropped.items()):
        share = seconds / result.seconds if result.seconds else 0.0
        table.add_row(Text(name, "bold green" if name == "kept" else "none"), _hours(seconds), f"{share:.1%}")
    console.print(table)
    who = ", ".join(f"{name} {_hours(seconds)}" for name, seconds in list(result.speakers.items())[:10])
    clips = [f"{result.clips} clips of {len(result.speakers)} speakers: {who}"] if result.clips else []
    look = f"Look at it:  myna xray {result.folder}"
    go_on = f"Go on:  myna prepare {result.folder} --model MODEL --out {result.folder}-prepared"
    show_notes([*clips, *result.notes, look, go_on], console)


def _show_forecast(forecast: CurationForecast, console: Console) -> None:
    """Print an estimate of the whole from a sample."""
    sampled = f"{forecast.sampled_seconds / 60:.1f} of {forecast.seconds / 60:.1f} minutes were listened to"
    kept = f"about {_hours(forecast.kept_seconds)} of {_hours(forecast.seconds)} would be kept"
    reasons = ", ".join(f"{name} {share:.0%}" for name, share in forecast.dropped.items())
    time = f"listening to all of it would take about {_hours(forecast.work_seconds)} here"
    show_notes([sampled, kept, f"dropped: {reasons}", time, *forecast.notes], console)


def _hours(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"
