"""Evaluation of a run or a model beside its base, the real recordings and their codec round trip."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from myna.core.config import DataSettings
from myna.core.errors import ConfigError, SpeakError
from myna.core.io import claim_folder, lock_folder, save_text
from myna.core.progress import ProgressCallback, silent
from myna.evaluate.eval_set import load_eval_set
from myna.evaluate.evaluation import Evaluation
from myna.evaluate.items import EvalSet
from myna.evaluate.pipeline import score_systems
from myna.evaluate.report import evaluation_page
from myna.evaluate.results import ITEMS_FOLDER
from myna.evaluate.scorers import Scorers
from myna.evaluate.seen_items import mark_seen_items
from myna.evaluate.systems import BASE, REAL, ROUND_TRIP, Recordings, SpeechSystem, System
from myna.listen.speaker_encoders import RESEMBLYZER
from myna.speak.engine import encode_clip
from myna.speak.loading import load_engine
from myna.speak.tuned import find_tuned
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
    model: str | None = None,
    force: bool = False,
    progress: ProgressCallback = silent,
) -> Evaluation:
    """Evaluate a run folder, or the hub name or folder of an adapter or a model; NAME=... gives it a name.

    Writes `evaluation.json`, `items.parquet` and `report.html` into `out`. `strength` scales the LoRA of the subject,
    and not of the systems `against` it; `model` is its base model, where it is not the one that it names.
    """
    settings = {key: value for key, value in locals().items() if key not in ("force", "progress")}
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    eval_set = resolve_eval_set(subject, data, sentences, seed=seed, limit=limit, language=language)
    system = resolve_system(subject, seed=seed, device=device, strength=strength, base=model)
    others = [resolve_system(other, seed=seed, device=device) for other in against]
    name, source = split_subject(subject)
    tuned = find_tuned(source, model)
    if tuned is None and model is not None:
        raise ConfigError(f"{source} is a model by itself, and has no base", hint="leave out --model, or use --against")
    if tuned is None and strength != 1.0:
        raise SpeakError(f"--strength scales the LoRA of a run, and {source} is a model by itself", hint="leave it out")
    # A run is compared with what it was tuned from, and a model with the first of the others.
    bases: list[SpeechSystem] = []
    if tuned is not None:
        known = tuned.metadata
        bases = [resolve_system(tuned.base_source, seed=seed, device=device, name=BASE, codec=known.codec)]
    elif others:
        bases = [replace(others.pop(0), name=BASE)]
    out = out or (Path(source) / "evaluation" if Run.find(Path(source)) is not None else Path("evaluations") / name)
    inputs = [Path(source), *(path for path in (data, sentences) if path is not None)]
    claim_folder(out, "evaluation", known=(EVALUATION_FILE, ITEMS_FOLDER), inputs=inputs, force=force)
    with lock_folder(out, "evaluating into"):
        codec = system.engine.codec
        systems: list[System] = [
            Recordings(REAL, codec.sample_rate),
            Recordings(
                ROUND_TRIP, codec.sample_rate, codec.revision, lambda clip: codec.decode(encode_clip(codec, clip))
            ),
            *(system, *bases, *others),
        ]
        scorers = Scorers.open(asr, speaker_encoder, device=device)
        seen_notes: list[str] = []
        scores = score_systems(
            eval_set,
            systems,
            scorers,
            out,
            batch_size=batch_size,
            progress=progress,
            save_references=True,
            annotate=lambda rows: seen_notes.extend(mark_seen_items(systems, eval_set.items, rows)),
        )
        metadata = {one.name: one.metadata for one in systems}
        metadata[name] = {**metadata[name], "notes": [*metadata[name].get("notes", ()), *seen_notes]}
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
    subject: str,
    *,
    seed: int,
    device: str,
    name: str | None = None,
    strength: float = 1.0,
    base: str | None = None,
    codec: str | None = None,
) -> SpeechSystem:
    """The system of a subject, an adapter or a run on another `base` model if one is named; its weights are loaded when
    it speaks."""
    name, source = split_subject(subject) if name is None else (name, subject)
    tuned = find_tuned(source, base)
    run, model = (source, base) if tuned is not None else (None, source)
    metadata: dict[str, Any] = {"model": source}
    if tuned is not None:
        known = {"adapter": str(tuned.folder), "model": tuned.base_source}
        metadata = run_metadata(tuned.run) if tuned.run is not None else known
    metadata |= {"strength": strength} if strength != 1.0 else {}
    return SpeechSystem(
        name,
        lambda: load_engine(run=run, model=model, codec=codec, device=device, strength=strength),
        seed,
        metadata,
    )


def run_metadata(run: Run) -> dict[str, Any]:
    """Run folder, model and evaluation loss: that of the best checkpoint by speech, if speech was evaluated."""
    metadata: dict[str, Any] = {"run": str(run.folder), "model": run.recipe.model.source}
    notes: list[str] = []
    rows = run.read_metrics(notes.append)
    metadata |= {"notes": notes} if notes else {}
    # A loss that was no number is None.
    losses = {row["step"]: row["evaluation"]["loss"] for row in rows if "evaluation" in row}
    finite = [loss for loss in losses.values() if loss is not None]
    train_losses = [row["loss"] for row in rows if "loss" in row]
    best_steps = [row["speech_eval"]["best_step"] for row in rows if "speech_eval" in row]
    if losses:
        lowest = min(finite, default=None)
        metadata |= {"loss": losses.get(best_steps[-1], lowest) if best_steps else lowest}
        metadata |= {"base_loss": losses.get(0)}
    elif train_losses:
        metadata |= {"loss": train_losses[-1]}
    return metadata


def resolve_eval_set(
    subject: str, data: Path | None, sentences: Path | None, *, seed: int, limit: int | None, language: str
) -> EvalSet:
    """Items of `sentences` or of `data`; a run's own held-out data by default."""
    tuned = find_tuned(split_subject(subject)[1])
    run = tuned.run if tuned is not None else None
    if data is None and run is not None:
        data = run.recipe.data.evaluation or (run.recipe.data.train if sentences is not None else None)
    if data is None and sentences is None:
        raise ConfigError(
            "there is nothing to say: no --data, no --sentences, and no data.evaluation in a recipe",
            hint="myna evaluate RUN --data data/HELD_OUT, or --sentences FILE with one sentence a line",
        )
    settings = run.recipe.data if run is not None else DataSettings(train=data) if data is not None else None
    scene = tuned.metadata.scene if tuned is not None else ""
    return load_eval_set(data, sentences, settings, seed, limit, language, scene)
