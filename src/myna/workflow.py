"""The steps of the way, one function each: what the command line and the demo both call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from myna.config import Recipe, load_recipe
from myna.data.code_store import encode_corpus
from myna.data.codec import Encoder
from myna.data.dataset import DatasetInfo, PreparedDataset
from myna.data.importers import import_source, write_import
from myna.data.lengths import text_tokens
from myna.data.pronunciation import metrics
from myna.data.utterance import Utterance
from myna.errors import DataError, SpeakError, TrainingError
from myna.evaluate.callback import SpeechEvaluation
from myna.io import replacing
from myna.models import open_family
from myna.models.base import Family
from myna.models.lora import load_adapter, merge
from myna.speak.answering import AnswerEngine
from myna.speak.engine import Engine
from myna.train.checkpoint import checkpoint_steps, learned_with
from myna.train.distributed import ProcessInfo, launch, reporting
from myna.train.loop import train as run_training
from myna.train.precision import decide, pick_device
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
    coder = family.load_encoder(device=pick_device(device))
    with progress("encoding", TextColumn("{task.fields[pace]}")) as bar:
        task = bar.add_task("encoding", total=None, pace="")

        def advance(now: Any) -> None:
            bar.update(task, completed=now.clips, total=now.total_clips, pace=f"{now.pace:.1f} audio-hours/hour")

        report = encode_corpus(utterances, coder, out, on_progress=advance, on_notice=bar.console.print)
    for id in report.too_short:
        console.print(f"left out: {id} is shorter than one frame")
    DatasetInfo.of(coder).write(out)
    # What training wants to know of all utterances at once, so that it need not wait for it.
    corpus = PreparedDataset.open(out)
    if family.has_weights:
        text_tokens(corpus, family)
    console.print(f"{report.utterances} utterances have codes in {out}; {report.encoded} clips were encoded now")


def train(
    recipe: Path, out: Path | None = None, settings: list[str] | None = None, gpus: int = 1, dry_run: bool = False
) -> Run | None:
    """Train a recipe into a run folder. None where another process has the last word."""
    loaded, place = load_recipe(recipe, settings).absolute(), ProcessInfo.find()
    folder = out or Path("runs") / loaded.name
    if gpus > 1:
        words = ["train", recipe, "--out", folder, *_set(settings), *(["--dry-run"] if dry_run else [])]
        _launch(gpus, words, Run(folder, loaded))
        return None
    with reporting(), _TrainDisplay(shown=place.leads) as display:
        panel = _panel(loaded, folder, place, display)
        # Rank 0 makes the folder; the others never write to it.
        run = Run.create(folder, loaded) if place.leads else Run(folder, loaded)
        run_training(loaded, run, display, panel, dry_run=dry_run)
    return run if place.leads else None


def resume(folder: Path, settings: list[str] | None = None, gpus: int = 1) -> Run | None:
    """Go on with a run from its newest checkpoint. `settings` may say how it is trained, not what it learns."""
    run, place = Run.open(folder, settings), ProcessInfo.find()
    if gpus > 1:
        _launch(gpus, ["train", "--resume", folder, *_set(settings)], run)
        return None
    with reporting(), _TrainDisplay(shown=place.leads) as display:
        panel = _panel(run.recipe, folder, place, display) if not run.is_finished else None
        run_training(run.recipe, run, display, panel, resume=True)
    return run if place.leads else None


def _launch(gpus: int, words: list[Any], run: Run) -> None:
    """Train in several processes. Asked to stop while they learn, they save and say how to go on; before that
    they just end, and only we can say so."""
    before = checkpoint_steps(run)
    if launch(gpus, words, run.recipe.train.device) or run.is_finished or checkpoint_steps(run) != before:
        return
    begun = (run.folder / "config.yaml").is_file()
    raise TrainingError(
        "stopped as asked, before anything new was saved",
        hint=f"myna train --resume {run.folder}" if begun else "give the same command again",
    )


def _panel(recipe: Recipe, folder: Path, place: ProcessInfo, display: _TrainDisplay) -> SpeechEvaluation | None:
    """Whoever listens while the model learns, where the recipe asks for it: on rank 0."""
    return (
        SpeechEvaluation.convene(recipe, folder, display.listening) if recipe.evaluates_speech and place.leads else None
    )


def how_to_try(run: Run) -> str:
    """What to type next."""
    model = run.recipe.model
    if open_family(model.source, revision=model.revision, codec=model.codec).listens:
        return f"Ask it:  myna listen RECORDING.wav --run {run.folder}"
    return f'Hear it:  myna speak "your words" --run {run.folder} --voice REF.wav --voice-text "..." -o out.wav'


def _set(settings: list[str] | None) -> list[str]:
    return [f"--set={setting}" for setting in settings or []]


def open_engine(
    *, run: Path | None, model: str | None, codec: str | None, device: str, strength: float = 1.0
) -> Engine:
    """The engine for a run or for an untuned model; for a run by so much of what its LoRA has learned."""
    opened = _open_model(run, model, codec, device, strength)
    coder = opened.family.load_codec(device=opened.device)
    if opened.run is None:
        return Engine(opened.family, opened.weights, coder)
    _check_made_with(opened.run, coder, opened.family)
    return Engine(opened.family, opened.weights, coder, opened.run.recipe.data.reference_placement)


def open_listener(*, run: Path | None, model: str | None, device: str) -> AnswerEngine:
    """The same for a model that answers in words."""
    opened = _open_model(run, model, None, device)
    encoder = opened.family.load_encoder(device=opened.device)
    if opened.run is not None:
        _check_made_with(opened.run, encoder, opened.family)
    return AnswerEngine(opened.family, opened.weights, encoder)


def listen(listener: AnswerEngine, corpus: PreparedDataset, out: Path, max_tokens: int) -> list[dict[str, Any]]:
    """Answer every clip of a prepared folder that has an answer; what was said beside what was due, a line each."""
    clips = listener.corpus(corpus)
    if not clips:
        raise DataError(
            f"{corpus.folder} has no answers to compare with", hint="prepare it from recordings with scores"
        )
    due = dict(zip(corpus.table.id.to_pylist(), corpus.table.answer.to_pylist(), strict=True))
    rows: list[dict[str, Any]] = []
    with progress("listening") as bar:
        task = bar.add_task("listening", total=len(clips))
        answers = listener.answer(clips, max_tokens, lambda done: bar.update(task, completed=done))
        for clip, said in zip(clips, answers, strict=True):
            rows.append({"id": clip.id, "answer": said.text, "due": due[clip.id], "stopped": said.stopped})
    with replacing(out) as temporary:
        temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return rows


def judge_answers(corpus: PreparedDataset, rows: list[dict[str, Any]]) -> Table | None:
    """Figures of pronunciation, for people; None where the answers of a folder are no assessments."""
    utterances = {utterance.id: utterance for utterance in corpus.utterances}
    due = [metrics.Due.of(utterances[row["id"]]) for row in rows]
    known = [each for each in due if each is not None]
    if len(known) < len(due):
        return None
    meant = [each.assessment for each in known]
    judged = metrics.score_answers(meant, [row["answer"] for row in rows])
    deaf = metrics.score_answers(meant, metrics.canonical(meant))
    published = {each.corpus for each in known} == {metrics.PUBLISHED_FOR}
    unreadable = sum(judged.unreadable.values())
    table = Table(title=f"{judged.utterances} utterances, {unreadable} answers that cannot be read")
    for title in ("", "ours", "who hears no mistake", *(["the paper"] if published else [])):
        table.add_column(title)
    for cells in judged.table(deaf, published=published):
        table.add_row(*cells[: len(table.columns)])
    return table


class _Opened(NamedTuple):
    family: Family
    weights: nn.Module
    run: Run | None
    device: torch.device


def _open_model(run: Path | None, model: str | None, codec: str | None, device: str, strength: float = 1.0) -> _Opened:
    if (run is None) == (model is None):
        raise SpeakError("give either --run or --model", hint="--run runs/NAME, or --model HUB_NAME_OR_FOLDER")
    if run is None and strength != 1.0:
        raise SpeakError("--strength is of what a run has learned", hint="give --run, or leave it out")
    target = pick_device(device)
    dtype = decide("auto", target).frozen
    if run is None:
        family = open_family(str(model), codec=codec)
        return _Opened(family, family.load_model(dtype=dtype, device=target, text_head=False), None, target)
    tuned = Run.to_speak_with(run)
    settings = tuned.recipe.model
    family = open_family(settings.source, revision=settings.revision, codec=codec or settings.codec)
    if tuned.model.is_dir():
        if strength != 1.0:
            raise SpeakError(f"{run} was trained in full, and has no LoRA", hint="leave out --strength")
        # Full training saves the model and not its codec, which is the base's still.
        family = open_family(str(tuned.model), codec=family.codec_source)
    weights = family.load_model(dtype=dtype, device=target, text_head=tuned.recipe.needs_text_head)
    if not tuned.model.is_dir():
        weights = merge(load_adapter(weights, tuned.adapter), strength)
    return _Opened(family, weights, tuned, target)


def _check_made_with(run: Run, coder: Encoder, family: Family) -> None:
    known = learned_with(run)
    for what, now in (("codec", coder.revision), ("prompt", family.prompt_revision)):
        if known.get(what, now) != now:
            raise SpeakError(
                f"{run.folder} was trained with another {what} than would speak now",
                hint=f"use the {what} it was trained with",
            )


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


def _heard(told: dict[str, Any]) -> str:
    """What was heard at a step, in a line."""
    gain = f", {told['gain']:+.3f} over the untuned model" if "gain" in told else ""
    words = f", {told['wer']:.1%} word errors" if told["wer"] is not None else ""
    voice = f", similarity {told['similarity']:.3f}" if told["similarity"] is not None else ""
    return f"mark {told['mark']:.3f}{gain}{words}{voice}"


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

    def listening(self, what: str, done: int, total: int) -> None:
        """It may take minutes, in which no step is made."""
        self._bar.update(self._task, state=f"{what}, line {done} of {total}")

    def stepped(self, row: dict[str, Any]) -> None:
        if "evaluation" in row:
            heard = row["evaluation"]
            gain = f", {heard['against_base']:+.4f} against the untuned model" if "against_base" in heard else ""
            self.say(f"step {row['step']}: evaluation loss {heard['loss']:.4f}{gain}")
            return
        if "speech_eval" in row:
            self.say(f"step {row['step']}: {_heard(row['listen'])}")
            return
        speed = row["speed"]
        pace = f"{speed['tokens_per_second']:,.0f} tokens/s  {speed['audio_per_second']:.1f} audio-s/s"
        state = f"loss {row['loss']:.4f}  {pace}"
        self._bar.update(self._task, completed=row["step"], state=state)
