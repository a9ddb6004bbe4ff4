"""`myna import`, `prepare`, `split` and `render`: from recordings to training sequences."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict, Unpack

from myna.commands import options as opt
from myna.commands.command import command
from myna.commands.display import console, progress_bars, show_notes
from myna.commands.options import PathLike, option
from myna.core.io import report_disk_errors
from myna.core.progress import ProgressCallback, silent

if TYPE_CHECKING:
    from myna.data.dataset import DataFolder
    from myna.models.base import RenderedSequence

PreparedFolder = Annotated[PathLike, option("A folder made by `myna prepare`.")]


class ImportOptions(TypedDict, total=False):
    """Options of commands that read a source."""

    format: opt.Layout
    max_bad: Annotated[float, option("Share of bad items above which the import fails; 0.01 by default.")]
    language: opt.Language
    speaker: Annotated[str, option("Speaker of utterances whose source names none.")]


@report_disk_errors()
def import_dataset(
    source: opt.Source, out: opt.Out, *, progress: ProgressCallback = silent, **options: Unpack[ImportOptions]
) -> DataFolder:
    """Read recordings and texts in any supported layout into one manifest, without encoding them.

    Bad items go to rejected.jsonl with their reason."""
    from myna.data.prepare import ImportSettings, import_folder

    return import_folder(os.fspath(source), Path(out), ImportSettings(**options), progress=progress)


@command("import", import_dataset, example="myna import recordings --out data/marta")
def _(call: Callable[..., DataFolder]) -> None:
    with progress_bars() as progress:
        folder = call(progress=progress)
    show_notes(folder.notes, console())


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
    byte for byte: docs/guides/many-machines.md
    """
    from myna.core.pools import absolute_folder
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
def _(call: Callable[..., DataFolder]) -> None:
    with progress_bars() as progress:
        made = call(progress=progress)
    summary = f"{made.utterances} utterances have codes in {made.folder}; {made.encoded} clips were encoded now"
    show_notes([*made.notes, summary], console())


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
def _(call: Callable[..., Mapping[str, DataFolder]]) -> None:
    parts = call()
    counts = [f"{part.folder}: {part.utterances} utterances" for part in parts.values()]
    show_notes([*counts, *(note for part in parts.values() for note in part.notes)], console())


def render(
    data: PreparedFolder,
    *,
    model: opt.Model,
    id: Annotated[str | None, option("Utterance to show; the first one if left out.")] = None,
    count: Annotated[int, option("How many utterances to show.", "-n")] = 1,
    settings: opt.Settings = (),
) -> list[RenderedSequence]:
    """Show training sequences of a prepared folder token by token, with codes and labels, as the model sees them."""
    from myna.core.config import make_recipe
    from myna.train.loop import render_targets

    tree = {"model": {"source": model}, "data": {"train": os.fspath(data)}, "train": {"steps": 1}}
    return render_targets(make_recipe(tree, {}, settings), id=id, count=count)


@command("render", render, example="myna render data/marta --model fledgling --frames")
def _(
    call: partial[list[RenderedSequence]],
    *,
    frames: Annotated[bool, option("Show every frame of every clip.")] = False,
) -> None:
    """Green is supervised, the rest is context."""
    from myna.models import open_family
    from myna.models.token_view import token_view

    family = open_family(call.keywords["model"])
    for sequence in call():
        console().print(token_view(sequence, family, all_frames=frames), soft_wrap=True)
