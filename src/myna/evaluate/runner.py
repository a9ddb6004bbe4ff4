"""Evaluation of a run or a model beside its base, the real recordings and their codec round trip."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from myna.config import DataSettings
from myna.errors import ConfigError
from myna.evaluate.eval_set import load_eval_set
from myna.evaluate.evaluation import Evaluation
from myna.evaluate.items import EvalSet
from myna.evaluate.pipeline import score_systems
from myna.evaluate.report import evaluation_page
from myna.evaluate.scorers import Scorers
from myna.evaluate.speaker_encoders import RESEMBLYZER
from myna.evaluate.systems import BASE, REAL, ROUND_TRIP, Recordings, SpeechSystem, System
from myna.io import save_text
from myna.progress import ProgressCallback, silent
from myna.speak.engine import encode_clip
from myna.speak.loading import load_engine
from myna.train.run import Run

EVALUATION_FILE = "evaluation.json"
RESERVED_NAMES = (REAL, ROUND_TRIP, BASE)


def evaluate_system(
    subject: str,
    *,
    data: Path | None = None,
    sentences: Path | None = None,
    against: Sequence[str] = (),
    out: Path | None = None,
    asr: str | None = None,
    speaker_encoder: str = RESEMBLYZER,
    language: str = "",
    seed: int = 0,
    limit: int | None = None,
    batch_size: int = 16,
    device: str = "auto",
    strength: float = 1.0,
    progress: ProgressCallback = silent,
) -> Evaluation:
    """Evaluate a run folder, or the hub name or folder of a model; NAME=... gives it a name.

    Writes `evaluation.json`, `items.parquet` and `report.html` into `out`. `strength` scales the LoRA of the subject,
    and not of the systems `against` it.
    """
    settings = {key: value for key, value in locals().items() if key != "progress"}
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    eval_set = resolve_eval_set(subject, data, sentences, seed=seed, limit=limit, language=language)
    system = resolve_system(subject, seed=seed, device=device, strength=strength)
    others = [resolve_system(other, seed=seed, device=device) for other in against]
    name, source = split_subject(subject)
    run = Run.find(Path(source))
    # A run is compared with what it was tuned from, and a model with the first of the others.
    bases: list[SpeechSystem] = []
    if run is not None:
        bases = [resolve_system(run.recipe.model.source, seed=seed, device=device, name=BASE)]
    elif others:
        bases = [replace(others.pop(0), name=BASE)]
    out = out or (Path(source) / "evaluation" if run is not None else Path("evaluations") / name)
    codec = system.engine.codec
    systems: list[System] = [
        Recordings(REAL, codec.sample_rate),
        Recordings(ROUND_TRIP, codec.sample_rate, codec.revision, lambda clip: codec.decode(encode_clip(codec, clip))),
        *(system, *bases, *others),
    ]
    scorers = Scorers.open(asr, speaker_encoder)
    scores = score_systems(eval_set, systems, scorers, out, batch_size=batch_size, progress=progress)
    metadata = {one.name: one.metadata for one in systems}
    evaluation = Evaluation(scores, scorers, name, out, metadata, settings)
    content = json.dumps(evaluation.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
    save_text(out / EVALUATION_FILE, content + "\n")
    save_text(out / "report.html", evaluation_page(evaluation))
    return evaluation


def split_subject(subject: str) -> tuple[str, str]:
    """Name and source of NAME=SOURCE, or of a source alone, which then is its own name."""
    name, separator, source = subject.partition("=")
    if not separator or Path(subject).exists():
        name, source = Path(subject).name or subject, subject
    if name in RESERVED_NAMES:
        raise ConfigError(f"a model cannot be called {name} here", hint=f"give it another name: mine={source}")
    return name, source


def resolve_system(
    subject: str, *, seed: int, device: str, name: str | None = None, strength: float = 1.0
) -> SpeechSystem:
    """The system of a subject; its weights are loaded when it speaks."""
    name, source = split_subject(subject) if name is None else (name, subject)
    run = Run.find(Path(source))
    metadata = run_metadata(run) if run is not None else {"model": source}
    metadata |= {"strength": strength} if strength != 1.0 else {}
    folder, model = (run.folder, None) if run is not None else (None, source)
    return SpeechSystem(
        name, lambda: load_engine(run=folder, model=model, device=device, strength=strength), seed, metadata
    )


def run_metadata(run: Run) -> dict[str, Any]:
    """Run folder, model and evaluation loss: that of the best checkpoint by speech, if speech was evaluated."""
    metadata: dict[str, Any] = {"run": str(run.folder), "model": run.recipe.model.source}
    if run.metrics.is_file():
        rows = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
        losses = {row["step"]: row["evaluation"]["loss"] for row in rows if "evaluation" in row}
        train_losses = [row["loss"] for row in rows if "loss" in row]
        best_steps = [row["speech_eval"]["best_step"] for row in rows if "speech_eval" in row]
        if losses:
            lowest = min(losses.values())
            metadata |= {"loss": losses.get(best_steps[-1], lowest) if best_steps else lowest}
            metadata |= {"base_loss": losses.get(0)}
        elif train_losses:
            metadata |= {"loss": train_losses[-1]}
    return metadata


def resolve_eval_set(
    subject: str, data: Path | None, sentences: Path | None, *, seed: int, limit: int | None, language: str
) -> EvalSet:
    """Items of `sentences` or of `data`; a run's own held-out data by default."""
    run = Run.find(Path(split_subject(subject)[1]))
    if data is None and run is not None:
        data = run.recipe.data.evaluation or (run.recipe.data.train if sentences is not None else None)
    if data is None and sentences is None:
        raise ConfigError(
            "there is nothing to say: no --data, no --sentences, and no data.evaluation in a recipe",
            hint="myna evaluate RUN --data data/HELD_OUT, or --sentences FILE with one sentence a line",
        )
    settings = run.recipe.data if run is not None else DataSettings(train=data) if data is not None else None
    return load_eval_set(data, sentences, settings, seed, limit, language)
