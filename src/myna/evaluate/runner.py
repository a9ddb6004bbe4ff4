"""`myna evaluate`: a run or a model beside its base and the real recordings; the engine speaks, `evaluate` listens."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from myna.config import DataSettings
from myna.errors import ConfigError
from myna.evaluate.eval_set import eval_set_from_data, eval_set_from_file
from myna.evaluate.items import EvalSet
from myna.evaluate.metrics import METRICS
from myna.evaluate.pipeline import SystemScores, score_systems
from myna.evaluate.report import page, show, title
from myna.evaluate.scorers import Scorers
from myna.evaluate.speaker_encoders import RESEMBLYZER
from myna.evaluate.speech_system import SpeechSystem
from myna.evaluate.summary import Summary, summarise
from myna.evaluate.systems import BASE, REAL, ROUND_TRIP, Recordings, System
from myna.report.document import save
from myna.speak.engine import Engine, encode_clip
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
    voices: str = RESEMBLYZER
    strength: float = 1.0
    """Share of what the subject's LoRA has learned; what stands against it speaks with all of its own."""


def evaluate(asked: Asked, console: Console) -> Summary:
    """Speak, listen, put down `evaluation.json`, `lines.parquet` and `report.html`."""
    plan, subject = plan_of(asked), speaker_of(asked.subject, asked, strength=asked.strength)
    others = [speaker_of(one, asked) for one in asked.against]
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
    judged, ears = hear("evaluating", plan, systems, asked, out)
    about = {system.name: system.about for system in systems}
    summary = summarise(judged, ears, subject.name, about, asked=_told(asked))
    save(out / "evaluation.json", json.dumps(summary.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    save(out / "report.html", page(summary, out))
    return summary


def show_summary(summary: Summary, out: Path, console: Console) -> None:
    """For the terminal: figures, what is missing, what is wrong, and where the page is."""
    table = Table("", *(title(name) for name in summary.systems))
    for column in METRICS:
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


def split_name(subject: str) -> tuple[str, str]:
    """NAME=WHAT, or what alone, which is then called after itself."""
    name, separator, what = subject.partition("=")
    if not separator or Path(subject).exists():
        name, what = Path(subject).name or subject, subject
    if name in RESERVED:
        raise ConfigError(f"a model cannot be called {name} here", hint=f"give it another name: mine={what}")
    return name, what


def run_at(what: str) -> Run | None:
    """A run folder, its `best/` or one of its checkpoints; None for a model."""
    folder = Path(what)
    is_checkpoint = folder.absolute().parent.name == "checkpoints" and folder.is_dir()
    return Run.to_speak_with(folder) if is_checkpoint or (folder / "config.yaml").is_file() else None


def hear(
    doing: str,
    plan: EvalSet,
    systems: Sequence[System],
    asked: Asked,
    out: Path,
    before: Callable[[System], None] = lambda _: None,
) -> tuple[SystemScores, Scorers]:
    """All systems by all ears that are asked for, with a bar for each."""
    at_once = min(4, os.cpu_count() or 1)
    ears = Scorers.open(asked.recogniser, asked.voices, at_once=at_once)
    with progress(doing) as bar:
        bars: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = bar.add_task(what, total=total)
                bar.console.print(what, highlight=False)
            bar.update(bars[what], completed=done, total=total)

        judged = score_systems(plan, systems, ears, out, batch=asked.batch, at_once=at_once, tell=tell, before=before)
    return judged, ears


def speaker_of(subject: str, asked: Asked, name: str | None = None, strength: float = 1.0) -> SpeechSystem:
    called, what = split_name(subject) if name is None else (name, subject)
    run = run_at(what)

    def opened() -> Engine:
        folder, model = (run.folder, None) if run is not None else (None, what)
        return open_engine(run=folder, model=model, codec=None, device=asked.device, strength=strength)

    about = about_run(run) if run is not None else {"model": what}
    return SpeechSystem(called, opened, asked.seed, about | ({"strength": strength} if strength != 1.0 else {}))


def about_run(run: Run) -> dict[str, Any]:
    """What the training itself thought of it: the loss, which is not what is heard. Where somebody listened, it is that
    of the checkpoint that was heard best."""
    told: dict[str, Any] = {"run": str(run.folder), "model": run.recipe.model.source}
    if run.metrics.is_file():
        rows = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
        judged = {row["step"]: row["evaluation"]["loss"] for row in rows if "evaluation" in row}
        trained = [row["loss"] for row in rows if "loss" in row]
        heard = [row["speech_eval"]["best_step"] for row in rows if "speech_eval" in row]
        if judged:
            lowest = min(judged.values())
            told |= {"loss": judged.get(heard[-1], lowest) if heard else lowest, "base_loss": judged.get(0)}
        elif trained:
            told |= {"loss": trained[-1]}
    return told


def _base(asked: Asked, others: list[SpeechSystem]) -> SpeechSystem | None:
    """What a run was tuned from. A model has none, unless something stands against it: then the first of those."""
    run = run_at(split_name(asked.subject)[1])
    if run is not None:
        return speaker_of(run.recipe.model.source, asked, name=BASE)
    if others:
        first = others.pop(0)
        return replace(first, name=BASE)
    return None


def plan_of(asked: Asked) -> EvalSet:
    run = run_at(split_name(asked.subject)[1])
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
        return eval_set_from_file(asked.lines, data, settings, asked.seed, asked.limit, asked.language)
    assert data is not None and settings is not None
    return eval_set_from_data(data, settings, asked.seed, asked.limit, asked.language)


def _out(asked: Asked) -> Path:
    name, what = split_name(asked.subject)
    return Path(what) / "evaluation" if run_at(what) is not None else Path("evaluations") / name
