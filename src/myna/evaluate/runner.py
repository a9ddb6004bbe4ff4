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
from myna.core.run_folder import RunFolder
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
from myna.models.ref import ModelRef, split_name
from myna.speak.engine import encode_clip
from myna.speak.loading import load_engine

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
    name, ref = parse_subject(subject, model)
    eval_set = resolve_eval_set(ref, data, sentences, seed=seed, limit=limit, language=language)
    system = resolve_system(name, ref, seed=seed, device=device, strength=strength)
    others = [resolve_system(*parse_subject(other), seed=seed, device=device) for other in against]
    if not ref.is_trained and model is not None:
        raise ConfigError(
            f"{ref.source} is a model by itself, and has no base", hint="leave out --model, or use --against"
        )
    if not ref.is_trained and strength != 1.0:
        raise SpeakError(
            f"--strength scales the LoRA of a run, and {ref.source} is a model by itself", hint="leave it out"
        )
    # A run is compared with what it was tuned from, and a model with the first of the others.
    bases: list[SpeechSystem] = []
    if ref.is_trained:
        base = ModelRef.find(ref.base_source)
        bases = [resolve_system(BASE, base, seed=seed, device=device, codec=ref.metadata.codec)]
    elif others:
        bases = [replace(others.pop(0), name=BASE)]
    out = out or (ref.run.folder / "evaluation" if ref.run is not None else Path("evaluations") / name)
    inputs = [Path(ref.source), *(path for path in (data, sentences) if path is not None)]
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


def subject_name(subject: str) -> str:
    """Name of NAME=SOURCE, or of a source alone."""
    name, source = split_name(subject)
    if name in RESERVED_NAMES:
        raise ConfigError(f"a model cannot be called {name} here", hint=f"give it another name: mine={source}")
    return name


def parse_subject(subject: str, base: str | None = None) -> tuple[str, ModelRef]:
    """Resolve SOURCE or NAME=SOURCE, a run or an adapter on another `base` model if one is given."""
    return subject_name(subject), ModelRef.find(split_name(subject)[1], base)


def resolve_system(
    name: str,
    ref: ModelRef,
    *,
    seed: int,
    device: str,
    strength: float = 1.0,
    codec: str | None = None,
) -> SpeechSystem:
    """Return the system of a run, an adapter or a model; its weights are loaded when it speaks."""
    metadata: dict[str, Any] = {"model": ref.base_source}
    if ref.is_trained:
        metadata = run_metadata(ref.run) if ref.run is not None else metadata | {"adapter": str(ref.folder)}
    metadata |= {"strength": strength} if strength != 1.0 else {}
    return SpeechSystem(
        name,
        lambda: load_engine(ref, codec=codec, device=device, strength=strength),
        seed,
        metadata,
    )


def run_metadata(run: RunFolder) -> dict[str, Any]:
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
    ref: ModelRef, data: Path | None, sentences: Path | None, *, seed: int, limit: int | None, language: str
) -> EvalSet:
    """Items of `sentences` or of `data`; a run's own held-out data by default."""
    run = ref.run
    if data is None and run is not None:
        data = run.recipe.data.evaluation or (run.recipe.data.train if sentences is not None else None)
    if data is None and sentences is None:
        raise ConfigError(
            "there is nothing to say: no --data, no --sentences, and no data.evaluation in a recipe",
            hint="myna evaluate RUN --data data/HELD_OUT, or --sentences FILE with one sentence a line",
        )
    settings = run.recipe.data if run is not None else DataSettings(train=data) if data is not None else None
    scene = ref.metadata.scene if ref.is_trained else ""
    return load_eval_set(data, sentences, settings, seed, limit, language, scene)
