"""`myna curate`, `xray`, `correct`, `import`, `prepare`, `split`, `render`: recordings to training sequences."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack

from rich.text import Text

from myna.commands import options as opt
from myna.commands.display import call_with_bars, console, plain_table, show, show_json
from myna.commands.options import Call, PathLike, command, option
from myna.core.errors import ConfigError
from myna.core.io import absolute_folder, report_disk_errors
from myna.core.progress import ProgressCallback, silent

if TYPE_CHECKING:
    from myna.curate.curation import CurationForecast, CurationResult
    from myna.curate.xray import Xray
    from myna.data.dataset import DataFolder
    from myna.models.base import RenderedSequence

PreparedFolder = Annotated[PathLike, option("A folder made by `myna prepare`.")]


class ImportOptions(TypedDict, total=False):
    """Options of commands that read a source."""

    format: opt.Layout
    max_bad: Annotated[float, option("Share of bad items above which the import fails; 0.01 by default.")]
    language: opt.Language
    speaker: Annotated[str, option("Speaker of utterances whose source names none.")]
    only: Annotated[Sequence[str], option("Speaker to take, as speaker-1; others are left out. Repeatable.")]


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
    settings_file: Annotated[PathLike | None, option("YAML file of settings.", name="--settings")]
    settings: Annotated[
        opt.SettingOverrides,
        option("Change a setting, as keep.min_snr_db=20; OUT/curate.yaml has all. Repeatable.", name="--set"),
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
    workers: opt.Workers = None,
    ray: opt.Ray = None,
    progress: ProgressCallback = silent,
    **options: Unpack[CurationOptions],
) -> CurationResult:
    """Turn raw recordings into clips with text and speaker; `prepare` reads the result.

    Every second is in OUT/segments.parquet, kept or dropped with its reason. Called again, it continues where it
    stopped. With other thresholds and no sources it decides again within seconds and does not listen again:
    `myna curate --out OUT --set keep.min_snr_db=20`. The folder remembers its settings.
    """
    from myna.curate import curation, settings

    if out is None:
        raise ConfigError("`out` is missing", hint="myna curate SOURCE --out data/NAME")
    return curation.run_curation(
        _paths(sources),
        Path(out),
        settings.curation_settings(Path(out), **options),
        script=Path(script) if script is not None else None,
        limit=limit,
        workers=workers,
        ray=ray,
        progress=progress,
    )


@report_disk_errors()
def forecast_curation(
    sources: Recordings,
    out: PathLike | None = None,
    *,
    limit: int | None = None,
    workers: int | None = None,
    progress: ProgressCallback = silent,
    **options: Unpack[CurationOptions],
) -> CurationForecast:
    """Listen to ten minutes of the sources; return what `curate` would keep and how long it would take.

    If there is no more than that, `curate` does not listen again where `out` is given.
    """
    from myna.curate import curation, settings

    folder = Path(out) if out is not None else None
    chosen = settings.curation_settings(folder, **options)
    return curation.forecast(_paths(sources), chosen, out=folder, limit=limit, workers=workers, progress=progress)


@command("curate", curate, example="myna curate podcast/*.mp3 --out data/podcast --asr large-v3-turbo")
def _(
    call: Call[CurationResult],
    *,
    dry_run: Annotated[bool, option("Listen to ten minutes; forecast the hours kept and the time it takes.")] = False,
) -> None:
    from myna.curate import models, settings

    options: dict[str, Any] = dict(call.keywords)
    given = {name: value for name, value in options.items() if name in CurationOptions.__annotations__}
    if sources := options.get("sources"):
        folder = Path(options["out"]) if options.get("out") is not None else None
        missing = models.missing_models(settings.curation_settings(folder, **given).listen)
        show(*(f"without {note}" for note in missing), stderr=True)
    if not dry_run:
        _show_curation(call_with_bars(call))
        return
    if not sources:
        raise ConfigError("`dry_run` needs recordings", hint="myna curate SOURCE --dry-run")
    given |= {name: options.get(name) for name in ("out", "limit", "workers")}
    forecast = call_with_bars(forecast_curation, sources, **given)
    dropped = ", ".join(f"{name} {share:.0%}" for name, share in forecast.dropped.items())
    show(
        f"{forecast.sampled_seconds / 60:.1f} of {forecast.seconds / 60:.1f} minutes were listened to",
        f"about {_hours(forecast.kept_seconds)} of {_hours(forecast.seconds)} would be kept",
        f"dropped: {dropped}",
        f"listening to all of it would take about {_hours(forecast.work_seconds)} here",
        *forecast.notes,
    )


def _show_curation(result: CurationResult) -> None:
    """Print where the hours went, who speaks, and the next commands."""
    table = plain_table("", title=f"{result.recordings} recordings, {_hours(result.seconds)}")
    for title in ("hours", "share"):
        table.add_column(title, justify="right")
    for name, seconds in (("kept", result.kept_seconds), *result.dropped.items()):
        share = seconds / result.seconds if result.seconds else 0.0
        table.add_row(Text(name, "bold green" if name == "kept" else "none"), _hours(seconds), f"{share:.1%}")
    console().print(table)
    if result.clips:
        who = ", ".join(f"{name} {_hours(seconds)}" for name, seconds in list(result.speakers.items())[:10])
        show(f"{result.clips} clips of {len(result.speakers)} speakers: {who}")
    show(*result.notes, f"Look at it:  myna xray {result.folder}")
    if result.clips:
        show(f"Go on:  myna prepare {result.folder} --model MODEL --out {result.folder}-prepared")


def _hours(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"


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
def _(call: Call[Xray], *, as_json: opt.Json = False) -> None:
    result = call_with_bars(call)
    if as_json:
        show_json(result.numbers)
        return
    colors = {"good": "green", "bad": "red"}
    for sentence in result.numbers["verdict"]:
        mark = Text("● ", colors.get(sentence["kind"], "dim"))
        console().print(mark.append(f"{sentence['text']}.", "none"), soft_wrap=True)
    show(*result.numbers["notes"], f"Look and listen:  {result.page}")


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
def _(call: Call[list[str]]) -> None:
    notes, folder = call(), Path(call.keywords["folder"])
    is_curated = (folder / "segments.parquet").is_file()
    go_on = f"myna curate --out {folder}" if is_curated else f"myna prepare {folder} --model MODEL --out NEW"
    show(*notes, f"added to {folder / 'corrections.jsonl'}", f"Apply it:  {go_on}")


def _paths(sources: PathLike | Sequence[PathLike]) -> list[Path]:
    return [Path(one) for one in ([sources] if isinstance(sources, str | os.PathLike) else sources)]


@report_disk_errors()
def import_dataset(
    source: opt.Source, out: opt.Out, *, progress: ProgressCallback = silent, **options: Unpack[ImportOptions]
) -> DataFolder:
    """Read recordings and texts in any supported layout into one manifest, without encoding them.

    Bad items go to rejected.jsonl with their reason."""
    from myna.data.prepare import ImportSettings, import_folder

    return import_folder(os.fspath(source), Path(out), ImportSettings(**options), progress=progress)


@command("import", import_dataset, example="myna import recordings --out data/marta")
def _(call: Call[DataFolder]) -> None:
    show(*call_with_bars(call).notes)


@report_disk_errors()
def prepare(
    source: opt.Source,
    out: opt.Out,
    *,
    model: opt.Model,
    codec: opt.Codec = None,
    device: opt.Device = "auto",
    workers: opt.Workers = None,
    ray: opt.Ray = None,
    progress: ProgressCallback = silent,
    **options: Unpack[ImportOptions],
) -> DataFolder:
    """Import a source and encode its clips with the model's codec, once. Called again, it encodes only what is new.

    `workers` processes of this machine encode on the CPU, or those of the Ray cluster at the address `ray`, which must
    find the recordings, the model and `out` under the same paths. By default this process does. The result is the same,
    byte for byte.
    """
    from myna.data.prepare import ImportSettings, prepare_folder
    from myna.models import is_model_name, open_family

    # Workers may have another working directory.
    model = model if is_model_name(model) else absolute_folder(model)
    open_model = partial(open_family, model, codec=codec and absolute_folder(codec))
    return prepare_folder(
        os.fspath(source),
        Path(out),
        open_model,
        ImportSettings(**options),
        device=device,
        workers=workers,
        ray=ray,
        progress=progress,
    )


@command("prepare", prepare, example="myna prepare recordings --out data/marta --model fledgling")
def _(call: Call[DataFolder]) -> None:
    made = call_with_bars(call)
    summary = f"{made.utterances} utterances have codes in {made.folder}; {made.encoded} clips were encoded now"
    show(*made.notes, summary)


@report_disk_errors()
def split(
    data: PreparedFolder,
    *,
    speakers: Annotated[int, option("Speakers to hold out, for voices never heard.", least=0)] = 0,
    texts: Annotated[int, option("Texts to hold out, for voices that are known.", least=0)] = 10,
    seed: opt.Seed = 0,
) -> dict[str, DataFolder]:
    """Hold out speakers and texts to evaluate on. Made once: DATA/subsets holds a prepared folder for each subset."""
    from myna.data.split import split_folder

    return split_folder(Path(data), speakers=speakers, texts=texts, seed=seed)


@command("split", split, example="myna split data/marta --texts 20")
def _(call: Call[dict[str, DataFolder]]) -> None:
    parts = call().values()
    show(*(f"{part.folder}: {part.utterances} utterances" for part in parts))
    show(*(note for part in parts for note in part.notes))


def render(
    data: PreparedFolder,
    *,
    model: opt.Model,
    id: Annotated[str | None, option("Utterance to show; the first one if left out.")] = None,
    count: Annotated[int, option("Number of utterances to show.", "-n")] = 1,
    settings: opt.Settings = (),
) -> list[RenderedSequence]:
    """Show training sequences of a prepared folder token by token, with codes and labels, as the model sees them."""
    from myna.core.config import make_recipe
    from myna.train.loop import render_targets

    tree = {"model": {"source": model}, "data": {"train": os.fspath(data)}, "train": {"steps": 1}}
    return render_targets(make_recipe(tree, {}, settings), id=id, count=count)


@command("render", render, example="myna render data/marta --model fledgling --frames")
def _(
    call: Call[list[RenderedSequence]], *, frames: Annotated[bool, option("Show every frame of every clip.")] = False
) -> None:
    """Green is supervised, the rest is context."""
    from myna.models import open_family, token_view

    family = open_family(call.keywords["model"])
    for sequence in call():
        console().print(token_view.token_view(sequence, family, all_frames=frames), soft_wrap=True)
