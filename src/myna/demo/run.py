"""`myna demo`: prepare, split, train and evaluate one voice in minutes, with a page of the speech before and after.

recordings/     manifest of the clips that are used
data/           the prepared folder; its split is data/subsets/train and data/subsets/held_out_texts
recipe.yaml     what was trained, for `myna train`; run/ is the run folder
reference.wav   the reference of all generated speech
evaluation/     audio and scores of the held-out texts: real, before and after training
scores.json     the metrics
report.html     all of it on one page, which opens without a network
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from myna import api
from myna.audio.files import write_audio
from myna.core.config import override, parse_recipe
from myna.core.errors import MynaError
from myna.core.io import save_text
from myna.core.progress import ProgressCallback, silent
from myna.data.manifest import Utterance, read_manifest, write_manifest
from myna.data.split import TEXTS, TRAIN, subset_folder
from myna.demo.report import AFTER, BEFORE, DemoResult, demo_page
from myna.demo.voice import BUNDLED, DemoVoice, clean_reference, select_reference, select_voice
from myna.evaluate.items import EvalItem, EvalSet
from myna.evaluate.pipeline import score_systems, torch_threads
from myna.evaluate.scoring import Scorers
from myna.evaluate.systems import REAL, Recordings, SpeechSystem
from myna.models import open_family
from myna.models.ref import ModelRef
from myna.speak.loading import load_engine
from myna.text.normalization import alphanumeric
from myna.train.memory_plan import peak_memory

if TYPE_CHECKING:
    from myna.train.loop import TrainingObserver

MODEL = "fledgling"
STRENGTHS = {MODEL: 0.5}
"""Of the LoRA in generation, by model; others use all of it. A small model that takes on the whole of a distant voice
loses words, and half of it brings most of the similarity: docs/decisions/0011-fledgling.md."""
DEVICE = "cpu"
THREADS = 1
"""Two would save a third of the training on an idle machine, and lose tenfold on a busy one: the operators are so small
that threads would spend their time waiting for one another."""
SCORING_WORKERS = min(2, os.cpu_count() or 1)
MAX_BAD_SHARE = 0.2
"""Of recordings that may be unusable: a first try is no corpus."""
IMPORTED_FILES = {"manifest.jsonl", "rejected.jsonl", "media"}


def demo_recipe(out: Path, *, model: str = MODEL, seed: int = 0, settings: Sequence[str] = ()) -> dict[str, Any]:
    """The recipe's differences from the defaults: a few minutes of one voice, trained in two on a laptop."""
    tree: dict[str, Any] = {
        "name": "demo",
        "model": {"source": model},
        "data": {
            "train": str(subset_folder(out / "data", TRAIN)),
            "evaluation": str(subset_folder(out / "data", TEXTS)),
            "row_tokens": 1024,
        },
        "adapt": {"rank": 8, "alpha": 16},
        "loss": {"codebook_weights": "1/k"},
        "train": {
            "steps": 60,
            "batch_size": 2,
            "learning_rate": 2e-3,
            "warmup": 10,
            "ema_decay": 0.95,
            "evaluate_every": 20,
            "early_stopping_patience": 3,
            "device": DEVICE,
            "seed": seed,
        },
    }
    for setting in settings:
        override(tree, setting)
    return tree


def prepare_voice(
    voice: str | None,
    out: Path,
    *,
    model: str,
    format: str | None = None,
    language: str = "",
    seed: int = 0,
    device: str = DEVICE,
    progress: ProgressCallback = silent,
) -> tuple[DemoVoice, list[Utterance], list[Utterance]]:
    """Import recordings (None: the bundled ones), prepare the clips of one speaker, and hold out some texts. Returns
    the selection, the clips to train on, and those held out."""
    source, recordings, data = voice or str(BUNDLED), out / "recordings", out / "data"
    api.import_dataset(source, recordings, format=format, max_bad=MAX_BAD_SHARE, language=language, progress=progress)
    selected = select_voice(read_manifest(recordings / "manifest.jsonl"), source, seed)
    write_manifest(recordings / "manifest.jsonl", selected.clips)
    api.prepare(recordings, data, model=model, device=device, progress=progress)
    selected.write_marks(data, seed)
    api.split(data, texts=selected.held_out_texts(), seed=seed)
    train, held_out = (read_manifest(subset_folder(data, subset) / "manifest.jsonl") for subset in (TRAIN, TEXTS))
    return selected, train, held_out


def run_demo(
    out: Path,
    *,
    voice: str | None = None,
    format: str | None = None,
    language: str = "",
    model: str = MODEL,
    seed: int = 0,
    asr: str | None = None,
    settings: Sequence[str] = (),
    strength: float | None = None,
    progress: ProgressCallback = silent,
    observer: TrainingObserver | None = None,
) -> DemoResult:
    """All stages in order. `voice` is recordings in any layout that the importers read, and `settings` are changes to
    the recipe. The observer's `on_message` is given a sentence for each stage too."""
    _refuse_to_overwrite(out)
    # A wrong argument should be reported now, and not after minutes.
    open_family(model)
    recipe = demo_recipe(out, model=model, seed=seed, settings=settings)
    parse_recipe(recipe, where="the demo's recipe with --set")
    applied = STRENGTHS.get(model, 1.0) if strength is None else strength
    seconds: dict[str, float] = {}

    def notify(message: str) -> None:
        if observer is not None:
            observer.on_message(message)

    @contextmanager
    def stage(name: str, description: str) -> Iterator[None]:
        notify(f"{len(seconds) + 1}  {name}: {description}")
        start = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - start

    with torch_threads(THREADS):
        with stage("prepare", "recordings are read, encoded and split"):
            selected, train, held_out = prepare_voice(
                voice, out, model=model, format=format, language=language, seed=seed, progress=progress
            )
            for note in selected.notes:
                notify(note)
            notify(f"{len(train)} clips to train on, {len(held_out)} held out")
        with stage("train", "a LoRA learns the voice"):
            recipe_file = out / "recipe.yaml"
            recipe_file.write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), encoding="utf-8")
            run = api.train(recipe_file, out=out / "run", progress=progress, observer=observer)
            if not run.is_finished:
                raise MynaError(
                    "the training was stopped, so there is nothing to compare",
                    hint=f"rm -r {out}, and begin again; or only train on: myna train --resume {run.folder}",
                )
        with stage("evaluate", "the held-out texts are spoken before and after training, and scored"):
            engine = load_engine(ModelRef.find(model), device=DEVICE)
            chosen = select_reference(train)
            cleaned = clean_reference(chosen, engine.codec.sample_rate)
            write_audio(out / "reference.wav", cleaned.samples, engine.codec.sample_rate)
            reference = replace(chosen, audio=out / "reference.wav", span=None)
            faults = tuple(f"the reference, {chosen.id}: {problem}" for problem in cleaned.problems)
            for fault in faults:
                notify(fault)
            scorers = Scorers.open(asr, workers=SCORING_WORKERS)
            tuned = ModelRef.find(run)
            scores = score_systems(
                _eval_set(held_out, reference),
                [
                    Recordings(REAL, engine.codec.sample_rate),
                    SpeechSystem(BEFORE, lambda: engine, seed, {}),
                    SpeechSystem(AFTER, lambda: load_engine(tuned, device=DEVICE, strength=applied), seed, {}),
                ],
                scorers,
                out / "evaluation",
                workers=SCORING_WORKERS,
                progress=progress,
            )
    result = DemoResult(
        out=out,
        source=voice,
        model=model,
        strength=applied,
        speaker=selected.speaker,
        train=train,
        reference_text=reference.text,
        scores=scores,
        unavailable=scorers.missing,
        losses=run.read_metrics(),
        recipe=recipe_file.read_text(encoding="utf-8"),
        notes=(*selected.notes, *faults),
        seconds=seconds,
        peak_memory_bytes=peak_memory(torch.device(DEVICE)),
    )
    save_text(out / "scores.json", json.dumps(result.to_json(), indent=2, ensure_ascii=False) + "\n")
    save_text(out / "report.html", demo_page(result))
    return result


def _refuse_to_overwrite(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise MynaError(f"{out} is a file", hint="choose another folder with --out")
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    if not names:
        return
    imported = {path.name for path in (out / "recordings").iterdir()} if (out / "recordings").is_dir() else {""}
    if names == {"recordings"} and imported <= IMPORTED_FILES:
        return  # recordings that could not be used: they have been mended, or others are tried
    if "report.html" in names or "data" in names:
        raise MynaError(f"{out} holds a demo already", hint=f"rm -r {out}, or choose another folder with --out")
    raise MynaError(f"{out} holds something else than a demo", hint="choose another folder with --out")


def _eval_set(held_out: list[Utterance], reference: Utterance) -> EvalSet:
    """Each held-out text once, all with the same reference; similarity is to the other held-out recordings."""
    by_text = {alphanumeric(clip.text): clip for clip in reversed(held_out)}
    clips = sorted(by_text.values(), key=held_out.index)
    items = [EvalItem(clip.id, clip.text, clip.speaker, clip.language, (reference,), recording=clip) for clip in clips]
    return EvalSet(tuple(items), {reference.speaker: tuple(clips)})
