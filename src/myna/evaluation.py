"""`myna evaluate`: a run or a model beside its base and the real recordings; the engine speaks, `evaluate` listens."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from myna.config import DataSettings
from myna.data.conversation import Clip, Reference
from myna.data.utterance import Utterance, normalise_text
from myna.errors import ConfigError
from myna.evaluate.columns import COLUMNS
from myna.evaluate.ears import Ears
from myna.evaluate.judge import judge
from myna.evaluate.plan import lines_of_data, lines_of_file
from myna.evaluate.report import page, show, title
from myna.evaluate.summary import Summary, summarise
from myna.evaluate.system import BASE, REAL, ROUND_TRIP, Recordings, Spoken, System
from myna.evaluate.task import Plan, Task, clip_key, samples_of
from myna.models.base import Sampling
from myna.page.document import save
from myna.speak.engine import Engine, Line, encode_clip
from myna.train.run import Run
from myna.workflow import open_engine, progress

RESERVED = (REAL, ROUND_TRIP, BASE)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person typed."""

    subject: str
    """A run folder, or the hub name or folder of a model; NAME=... gives it a name."""
    data: Path | None = None
    lines: Path | None = None
    against: tuple[str, ...] = ()
    out: Path | None = None
    recogniser: str | None = None
    language: str = ""
    seed: int = 0
    limit: int | None = None
    batch: int = 16
    device: str = "auto"


@dataclass(slots=True)
class Speaker:
    """A model among the systems. Its weights are opened when they are needed, and let go when others need the room."""

    name: str
    open: Callable[[], Engine]
    sampling: Sampling
    about: Mapping[str, Any]
    _engine: Engine | None = None
    _revision: str = ""
    _voices: dict[str, Reference] = field(default_factory=dict)

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self._engine = self.open()
            self._revision = self._revision or revision(self._engine)
        return self._engine

    @property
    def sample_rate(self) -> int:
        return self.engine.codec.sample_rate

    def key(self, task: Task) -> str:
        if not self._revision:
            self._revision = revision(self.engine)
        return f"{self._revision}/{asdict(replace(self.sampling, max_seconds=task.cap))}"

    def can_say(self, task: Task) -> bool:  # noqa: ARG002
        return True

    def speak(self, tasks: Sequence[Task]) -> list[Spoken]:
        lines = [
            Line(task.text, tuple(map(self._voice, task.references)), scene=task.scene, id=task.id) for task in tasks
        ]
        spoken = self.engine.speak(lines, replace(self.sampling, max_seconds=tasks[0].cap))
        return [Spoken(speech.samples, speech.stopped) for speech in spoken]

    def close(self) -> None:
        self._engine = None
        self._voices.clear()

    def _voice(self, clip: Utterance) -> Reference:
        key = clip_key(clip)
        if key not in self._voices:
            codec = self.engine.codec
            codes = encode_clip(codec, samples_of(clip, codec.sample_rate))
            self._voices[key] = Reference(normalise_text(clip.text), Clip(clip.id, codes))
        return self._voices[key]


def revision(engine: Engine) -> str:
    """A model by its weights and by how they are used, wherever they came from."""
    made = hashlib.blake2b(digest_size=16)
    for about in (engine.codec.revision, engine.family.prompt_revision, engine.place):
        made.update(about.encode())
    for name, tensor in sorted(engine.model.state_dict().items()):
        made.update(f"{name} {tensor.dtype}".encode())
        made.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()


def evaluate(asked: Asked, console: Console) -> Summary:
    """Speak, listen, put down `evaluation.json`, `lines.parquet` and `report.html`."""
    plan, subject = _plan(asked), _speaker(asked.subject, asked)
    others = [_speaker(one, asked) for one in asked.against]
    base = _base(asked, others)
    out = asked.out or _out(asked)
    for note in plan.notes:
        console.print(note, markup=False, highlight=False)
    codec = subject.engine.codec
    recordings: list[System] = [
        Recordings(REAL, codec.sample_rate),
        Recordings(
            ROUND_TRIP,
            codec.sample_rate,
            codec.revision,
            lambda samples: codec.decode(encode_clip(codec, samples)),
        ),
    ]
    systems: list[System] = [*recordings, subject, *([base] if base is not None else []), *others]
    at_once = min(4, os.cpu_count() or 1)
    ears = Ears.open(asked.recogniser, at_once=at_once)
    with progress("evaluating") as bar:
        bars: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = bar.add_task(what, total=total)
                bar.console.print(what, highlight=False)
            bar.update(bars[what], completed=done, total=total)

        judged = judge(plan, systems, ears, out, batch=asked.batch, at_once=at_once, tell=tell)
    about = {system.name: system.about for system in systems}
    summary = summarise(judged, ears, subject.name, about, asked=_told(asked))
    save(out / "evaluation.json", json.dumps(summary.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    save(out / "report.html", page(summary, out))
    return summary


def show_summary(summary: Summary, out: Path, console: Console) -> None:
    """For the terminal: figures, what is missing, what is wrong, and where the page is."""
    table = Table("", *(title(name) for name in summary.systems))
    for column in COLUMNS:
        if any(figures[column.key].n for figures in summary.systems.values()):
            table.add_row(column.title, *(show(column, figures[column.key]) for figures in summary.systems.values()))
    console.print(table)
    for key, why in summary.missing.items():
        console.print(f"{key}: not measured. {why}", markup=False, highlight=False)
    for fault in summary.faults:
        console.print(f"{fault.name}: {fault.text}", style="yellow", markup=False, highlight=False)
    console.print(f"Open {out / 'report.html'}", markup=False, highlight=False, soft_wrap=True)


def folder_of(asked: Asked) -> Path:
    return asked.out or _out(asked)


def _told(asked: Asked) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(asked).items()}


def _split(subject: str) -> tuple[str, str]:
    """NAME=WHAT, or what alone, which is then called after itself."""
    name, separator, what = subject.partition("=")
    if not separator or Path(subject).exists():
        name, what = Path(subject).name or subject, subject
    if name in RESERVED:
        raise ConfigError(f"a model cannot be called {name} here", hint=f"give it another name: mine={what}")
    return name, what


def _run(what: str) -> Run | None:
    folder = Path(what)
    return Run.open(folder) if (folder / "config.yaml").is_file() else None


def _speaker(subject: str, asked: Asked, name: str | None = None) -> Speaker:
    called, what = _split(subject) if name is None else (name, subject)
    run = _run(what)

    def opened() -> Engine:
        if run is not None:
            return open_engine(run=run.folder, model=None, codec=None, device=asked.device)
        return open_engine(run=None, model=what, codec=None, device=asked.device)

    return Speaker(called, opened, Sampling(seed=asked.seed), about_run(run) if run is not None else {"model": what})


def about_run(run: Run) -> dict[str, Any]:
    """What the training itself thought of it: the loss, which is not what is heard."""
    told: dict[str, Any] = {"run": str(run.folder), "model": run.recipe.model.source}
    if run.metrics.is_file():
        rows = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
        judged = {row["step"]: row["evaluation"]["loss"] for row in rows if "evaluation" in row}
        trained = [row["loss"] for row in rows if "loss" in row]
        if judged:
            told |= {"loss": min(judged.values()), "base_loss": judged.get(0)}
        elif trained:
            told |= {"loss": trained[-1]}
    return told


def _base(asked: Asked, others: list[Speaker]) -> Speaker | None:
    """What a run was tuned from. A model has none, unless something stands against it: then the first of those."""
    run = _run(_split(asked.subject)[1])
    if run is not None:
        return _speaker(run.recipe.model.source, asked, name=BASE)
    if others:
        first = others.pop(0)
        return replace(first, name=BASE)
    return None


def _plan(asked: Asked) -> Plan:
    run = _run(_split(asked.subject)[1])
    data = asked.data
    if data is None and run is not None:
        data = run.recipe.data.evaluation or (run.recipe.data.train if asked.lines is not None else None)
    if data is None and asked.lines is None:
        raise ConfigError(
            "there is nothing to say: no --data, no --lines, and no data.evaluation in a recipe",
            hint="myna evaluate RUN --data data/HELD_OUT, or --lines FILE with one sentence a line",
        )
    if run is not None:
        settings: DataSettings | None = run.recipe.data
    else:
        settings = DataSettings(train=data) if data is not None else None
    if asked.lines is not None:
        return lines_of_file(asked.lines, data, settings, asked.seed, asked.limit, asked.language)
    assert data is not None and settings is not None
    return lines_of_data(data, settings, asked.seed, asked.limit, asked.language)


def _out(asked: Asked) -> Path:
    name, what = _split(asked.subject)
    return Path(what) / "evaluation" if _run(what) is not None else Path("evaluations") / name
