"""The steps of the way, one function each: what the command line and the demo both call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from myna.config import load_recipe
from myna.data.codes import encode_corpus
from myna.data.corpus import Corpus, Prepared
from myna.data.importers import import_source, write_import
from myna.data.lengths import text_tokens
from myna.data.utterance import Utterance
from myna.errors import DataError, SpeakError
from myna.models import open_family
from myna.models.adapting import load_adapter, merge
from myna.speak.engine import Engine
from myna.train.checkpoint import learned_with
from myna.train.loop import train as run_training
from myna.train.precision import decide, pick_device
from myna.train.processes import Place, launch, reporting
from myna.train.run import Run

console = Console()
notices = Console(stderr=True)


def import_into(
    source: str, out: Path, format: str | None, max_bad: float, language: str, speaker: str
) -> list[Utterance]:
    """The manifest of a source, written to `out`."""
    if Path(source).absolute() in (out.absolute(), (out / "manifest.jsonl").absolute()):
        raise DataError(f"{source} would be imported over itself", hint="choose another folder with --out")
    with progress("importing") as bar:
        task = bar.add_task("importing", total=None)
        imported = import_source(
            source,
            media=out / "media",
            format=format,
            language=language,
            speaker=speaker,
            progress=lambda done: bar.update(task, completed=done),
        )
    write_import(imported, out, max_bad=max_bad)
    console.print(
        f"{len(imported.utterances)} utterances from {source} ({imported.format}), {len(imported.rejected)} rejected"
    )
    return imported.utterances


def prepare(
    source: str,
    out: Path,
    model: str,
    codec: str | None = None,
    format: str | None = None,
    max_bad: float = 0.01,
    language: str = "",
    speaker: str = "",
    device: str = "auto",
) -> None:
    """Import a source and bring its codes up to date."""
    utterances = import_into(source, out, format, max_bad, language, speaker)
    family = open_family(model, codec=codec)
    coder = family.load_codec(device=pick_device(device))
    with progress("encoding", TextColumn("{task.fields[pace]}")) as bar:
        task = bar.add_task("encoding", total=None, pace="")

        def advance(now: Any) -> None:
            bar.update(task, completed=now.clips, total=now.total_clips, pace=f"{now.pace:.1f} audio-hours/hour")

        report = encode_corpus(utterances, coder, out, on_progress=advance, on_notice=bar.console.print)
    for id in report.too_short:
        console.print(f"left out: {id} is shorter than one frame")
    Prepared.of(coder).write(out)
    # What training wants to know of all utterances at once, so that it need not wait for it.
    corpus = Corpus.open(out)
    if family.has_weights:
        text_tokens(corpus, family)
    console.print(f"{report.utterances} utterances have codes in {out}; {report.encoded} clips were encoded now")


def train(
    recipe: Path, out: Path | None = None, settings: list[str] | None = None, gpus: int = 1, dry_run: bool = False
) -> Run | None:
    """Train a recipe into a run folder. None where another process has the last word."""
    loaded, place = load_recipe(recipe, settings).absolute(), Place.find()
    folder = out or Path("runs") / loaded.name
    if gpus > 1:
        words = ["train", recipe, "--out", folder, *_set(settings), *(["--dry-run"] if dry_run else [])]
        launch(gpus, words, loaded.train.device)
        return None
    with reporting(), _TrainDisplay(shown=place.leads) as display:
        # Rank 0 makes the folder; the others never write to it.
        run = Run.create(folder, loaded) if place.leads else Run(folder, loaded)
        run_training(loaded, run, display, dry_run=dry_run)
    return run if place.leads else None


def resume(folder: Path, settings: list[str] | None = None, gpus: int = 1) -> Run | None:
    """Go on with a run from its newest checkpoint. `settings` may say how it is trained, not what it learns."""
    run, place = Run.open(folder, settings), Place.find()
    if gpus > 1:
        launch(gpus, ["train", "--resume", folder, *_set(settings)], run.recipe.train.device)
        return None
    with reporting(), _TrainDisplay(shown=place.leads) as display:
        run_training(run.recipe, run, display, resume=True)
    return run if place.leads else None


def _set(settings: list[str] | None) -> list[str]:
    return [f"--set={setting}" for setting in settings or []]


def open_engine(*, run: Path | None, model: str | None, codec: str | None, device: str) -> Engine:
    """The engine for a run or for an untuned model."""
    if (run is None) == (model is None):
        raise SpeakError("give either --run or --model", hint="--run runs/NAME, or --model HUB_NAME_OR_FOLDER")
    target = pick_device(device)
    dtype = decide("auto", target).frozen
    if run is None:
        family = open_family(str(model), codec=codec)
        return Engine(
            family, family.load_model(dtype=dtype, device=target, text_head=False), family.load_codec(device=target)
        )
    tuned = Run.open(run)
    settings = tuned.recipe.model
    family = open_family(settings.source, revision=settings.revision, codec=codec or settings.codec)
    if tuned.model.is_dir():
        # Full training saves the model and not its codec, which is the base's still.
        family = open_family(str(tuned.model), codec=family.codec_source)
    weights = family.load_model(dtype=dtype, device=target, text_head=tuned.recipe.needs_text_head)
    if not tuned.model.is_dir():
        weights = merge(load_adapter(weights, tuned.adapter))
    coder, known = family.load_codec(device=target), learned_with(tuned)
    for what, now in (("codec", coder.revision), ("prompt", family.prompt_revision)):
        if known.get(what, now) != now:
            raise SpeakError(
                f"{run} was trained with another {what} than would speak now",
                hint=f"use the {what} it was trained with",
            )
    return Engine(family, weights, coder, tuned.recipe.data.reference_place)


@contextmanager
def progress(title: str, *columns: Any, shown: bool = True) -> Iterator[Progress]:
    """A bar with counts and the time left, on standard error."""
    with Progress(
        TextColumn(f"[bold]{title}"),
        BarColumn(),
        MofNCompleteColumn(),
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=notices,
        disable=not shown,
    ) as bar:
        yield bar


class _TrainDisplay:
    """A live line with the loss and the time left."""

    def __init__(self, *, shown: bool = True) -> None:
        self._shown = shown
        self._stack = progress("training", TextColumn("{task.fields[state]}"), shown=shown)
        self._last: dict[str, Any] = {}

    def __enter__(self) -> _TrainDisplay:
        self._bar = self._stack.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def say(self, text: str) -> None:
        if self._shown:
            self._bar.console.print(text, highlight=False)

    def planned(self, steps: int, done: int) -> None:
        self._task = self._bar.add_task("training", total=steps, completed=done, state="")

    def stepped(self, row: dict[str, Any]) -> None:
        if "evaluation" in row:
            heard = row["evaluation"]
            gain = f", {heard['against_base']:+.4f} against the untuned model" if "against_base" in heard else ""
            self.say(f"step {row['step']}: evaluation loss {heard['loss']:.4f}{gain}")
            return
        speed = row["speed"]
        pace = f"{speed['tokens_per_second']:,.0f} tokens/s  {speed['audio_per_second']:.1f} audio-s/s"
        state = f"loss {row['loss']:.4f}  {pace}"
        self._bar.update(self._task, completed=row["step"], state=state)
