"""`myna demo`: prepare, split, train and evaluate one voice in minutes, with a page of the speech before and after.

recordings/     manifest of the clips that are used
data/           the prepared folder; its split is data/subsets/train and data/subsets/held_out_texts
recipe.yaml     what was trained, for `myna train`; run/ is the run folder
reference.wav   the reference of all generated speech
evaluation/     audio and scores of the held-out texts: real, before and after training
scores.json     the metrics
report.html     all of it on one page, which opens without a network
"""

import os
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from myna.audio.files import probe, write_audio
from myna.audio.reference import CheckedReference, check_reference
from myna.core.config import make_recipe, override, parse_recipe
from myna.core.errors import DataError, MynaError
from myna.core.io import save_text, string_hash
from myna.core.progress import ProgressCallback, silent
from myna.core.run_folder import Run
from myna.data.manifest import Utterance, read_manifest, write_manifest
from myna.data.prepare import SOURCE_FILE, ImportSettings, import_folder, prepare_folder
from myna.data.split import TEXTS, TRAIN, DatasetSplit, split_folder, subset_folder
from myna.evaluate import pipeline, scoring
from myna.evaluate.callback import SpeechEvaluation
from myna.evaluate.items import EvalItem, EvalSet, clip_seconds, load_clip
from myna.evaluate.metrics import METRICS_BY_KEY, REAL, missing_metrics
from myna.evaluate.model_card import write_run_card
from myna.evaluate.pipeline import Recordings, SpeechSystem
from myna.models import is_model_name, open_family
from myna.models.ref import ModelRef
from myna.report import page
from myna.speak.loading import load_engine
from myna.text.normalization import alphanumeric
from myna.train.launch import start_training
from myna.train.loop import TrainingObserver
from myna.train.memory_plan import peak_memory
from myna.train.run_report import collect_curves, loss_plot

BUNDLED = Path(__file__).parent / "recordings"
"""Three minutes of a voice that fledgling was not trained on; some clips are marked `held_out`."""
MIN_TEXTS = 8
"""Minimum number of distinct texts to train and evaluate on."""
HELD_OUT_SHARE, MIN_HELD_OUT, MAX_HELD_OUT = 0.1, 3, 8
MIN_CLIP_SECONDS, MAX_CLIP_SECONDS = 1.0, 15.0
MAX_TOTAL_SECONDS = 900.0
"""Maximum seconds of all clips: a demo trains for minutes, in which more would not be seen."""
REFERENCE_SECONDS, REFERENCE_CANDIDATES = 6.0, 12
"""Preferred length of the reference, long enough for a voice and short enough to be encoded quickly; and number of
clips of about that length that are searched for one without noise, clipping or a telephone's narrow band."""
MODEL = "fledgling"
STRENGTHS = {MODEL: 0.5}
"""Scale of the LoRA in generation by model; others use all of it. A small model that takes on the whole of a distant
voice loses words, and half of it brings most of the similarity: docs/decisions/0011-fledgling.md."""
DEVICE = "cpu"
THREADS = 1
"""Threads of torch. Two would save a third of the training on an idle machine, and lose tenfold on a busy one: the
operators are so small that threads would spend their time waiting for one another."""
SCORING_WORKERS = min(2, os.cpu_count() or 1)
MAX_BAD_SHARE = 0.2
"""Share of recordings that may be unusable. Recordings for a first try often have faults."""
IMPORTED_FILES = {"manifest.jsonl", "rejected.jsonl", SOURCE_FILE, "media"}
SCORES_FOLDER = "evaluation"
BEFORE, AFTER = "before", "after"
SHOWN_METRICS = ("similarity", "wer", "loop_rate", "distillmos", "stop_rate")


@dataclass(frozen=True, slots=True)
class DemoVoice:
    """Speaker, clips, and notes on what was left out."""

    speaker: str
    clips: tuple[Utterance, ...]
    notes: tuple[str, ...] = ()

    @property
    def marked(self) -> dict[str, str]:
        """Normalized texts of the clips that the source marks as held out, by id."""
        return {clip.id: alphanumeric(clip.text) for clip in self.clips if clip.extras.get("held_out")}

    def held_out_texts(self) -> int:
        """Return how many texts to hold out: those that are marked, or a share."""
        if self.marked:
            return len(set(self.marked.values()))
        texts = len({alphanumeric(clip.text) for clip in self.clips})
        return min(MAX_HELD_OUT, max(MIN_HELD_OUT, round(HELD_OUT_SHARE * texts)))

    def write_marks(self, folder: Path, seed: int) -> None:
        """Write the source's marks as the split of a prepared folder, which splitting then completes and checks."""
        if self.marked:
            DatasetSplit(seed, 0, self.held_out_texts(), dict.fromkeys(self.marked, TEXTS)).write(folder)


def select_voice(utterances: Sequence[Utterance], source: str, seed: int) -> DemoVoice:
    """Select the clips of the speaker who has most."""
    counts = Counter(utterance.speaker for utterance in utterances if utterance.is_target)
    if not counts:
        raise DataError(f"{source} holds nothing to learn from", hint="give recordings with what is said in them")
    speaker, notes = counts.most_common(1)[0][0], []
    if len(counts) > 1:
        notes.append(f"{source} holds {len(counts)} speakers; this is `{speaker}`, who has most clips")
    clips = [utterance for utterance in utterances if utterance.is_target and utterance.speaker == speaker]
    usable = [clip for clip in clips if MIN_CLIP_SECONDS <= clip_seconds(clip) <= MAX_CLIP_SECONDS]
    limits = f"{MIN_CLIP_SECONDS:g} and {MAX_CLIP_SECONDS:g} s"
    if len(usable) < len(clips):
        notes.append(f"{len(clips) - len(usable)} clips are not between {limits} long")
    texts = len({alphanumeric(clip.text) for clip in usable})
    if texts < MIN_TEXTS and not any(clip.extras.get("held_out") for clip in usable):
        raise DataError(
            f"{source} holds {texts} clips between {limits} with words of their own; a demo wants {MIN_TEXTS} of one "
            "speaker",
            hint="record some more, or see the demo with its own voice: myna demo",
        )
    kept, total = set(), 0.0
    for clip in sorted(usable, key=lambda clip: string_hash(f"{seed}/enough/{clip.id}")):
        if clip.extras.get("held_out") or total + clip_seconds(clip) <= MAX_TOTAL_SECONDS:
            kept.add(clip.id)
            total += clip_seconds(clip)
    if len(kept) < len(usable):
        left_out = len(usable) - len(kept)
        notes.append(f"{left_out} clips are left out: {MAX_TOTAL_SECONDS / 60:g} minutes are enough for a demo")
    # References that the source names may be of another speaker, or left out.
    chosen = [
        replace(clip, extras={key: value for key, value in clip.extras.items() if key != "references"})
        for clip in usable
        if clip.id in kept
    ]
    return DemoVoice(speaker, tuple(chosen), tuple(notes))


def select_reference(clips: Sequence[Utterance]) -> Utterance:
    """Select the clip with the fewest faults among those whose lengths are nearest to `REFERENCE_SECONDS`."""
    nearest = sorted(clips, key=lambda clip: (abs(clip_seconds(clip) - REFERENCE_SECONDS), clip.id))
    return min(nearest[:REFERENCE_CANDIDATES], key=lambda clip: len(clean_reference(clip).problems))


def clean_reference(clip: Utterance, sample_rate: int = 24_000) -> CheckedReference:
    """Clean a clip for use as a reference, and find its faults."""
    rate = probe(clip.audio).sample_rate
    return check_reference(load_clip(clip, rate), rate, sample_rate)


@dataclass(frozen=True, kw_only=True)
class DemoResult(pipeline.Results):
    """Scores of the real recordings and of the speech before and after training, and how they were made."""

    source: str | None
    """Recordings, as given; None for the voice that comes with Myna."""
    model: str
    strength: float
    """Scale of the LoRA when speaking."""
    speaker: str
    train: Sequence[Utterance]
    reference_text: str
    losses: Sequence[Mapping[str, Any]]
    """Rows of the run's metrics.jsonl."""
    recipe: str
    seconds: Mapping[str, float]
    """Seconds by stage."""
    peak_memory_bytes: int

    @property
    def texts(self) -> list[str]:
        return [row.text for row in self.rows[REAL]]

    def score_table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows of the table of scores; the last row has the changes."""
        metrics = [METRICS_BY_KEY[key] for key in SHOWN_METRICS]
        rows = [
            [name, *(metric.format_estimate(estimates[metric.key]) for metric in metrics)]
            for name, estimates in self.estimates.items()
        ]
        change = self.differences[AFTER]
        rows.append(["change", *(metric.format_estimate(change[metric.key], signed=True) for metric in metrics)])
        return ["", *(metric.title for metric in metrics)], rows

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {
            "model": self.model,
            "strength": self.strength,
            "speaker": self.speaker,
            "texts": self.texts,
            "transcripts": {name: [row.transcript for row in rows] for name, rows in self.rows.items()},
            "ended_by_itself": {name: sum(bool(row.stopped) for row in self.rows[name]) for name in (BEFORE, AFTER)},
            "seconds": dict(self.seconds),
        }


def demo_recipe(out: Path, *, model: str = MODEL, seed: int = 0, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Return the recipe's differences from the defaults: a few minutes of one voice, trained in two on a laptop."""
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
    """Import recordings (None: the bundled ones), prepare the clips of one speaker, and hold out some texts. Return the
    selection, the clips to train on, and those held out."""
    source, recordings, data = voice or str(BUNDLED), out / "recordings", out / "data"
    settings = ImportSettings(format, MAX_BAD_SHARE, language)
    import_folder(source, recordings, settings, progress=progress)
    selected = select_voice(read_manifest(recordings / "manifest.jsonl"), source, seed)
    write_manifest(recordings / "manifest.jsonl", selected.clips)
    prepare_folder(
        str(recordings), data, partial(open_family, model), ImportSettings(), device=device, progress=progress
    )
    selected.write_marks(data, seed)
    split_folder(data, texts=selected.held_out_texts(), seed=seed)
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
    """Run all stages in order. `voice` is recordings in any layout that the importers read, and `settings` are changes
    to the recipe. The observer's `on_message` is given a sentence for each stage too."""
    _refuse_to_overwrite(out)
    # A wrong argument is reported now, and not after minutes.
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

    with pipeline.torch_threads(THREADS):
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
            run = start_training(
                Run(out / "run", make_recipe(recipe_file, {}).absolute(is_model_name)),
                observer,
                progress=progress,
                open_evaluation=SpeechEvaluation.from_recipe,
                describe=write_run_card,
            )
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
            scorers = scoring.Scorers.open(asr, workers=SCORING_WORKERS)
            tuned = ModelRef.find(run)
            scores = pipeline.score_systems(
                _eval_set(held_out, reference),
                [
                    Recordings(REAL, engine.codec.sample_rate),
                    SpeechSystem(BEFORE, lambda: engine, seed, {}),
                    SpeechSystem(AFTER, lambda: load_engine(tuned, device=DEVICE, strength=applied), seed, {}),
                ],
                scorers,
                out / SCORES_FOLDER,
                workers=SCORING_WORKERS,
                progress=progress,
            )
    missing = missing_metrics(scorers.missing)
    result = DemoResult(
        folder=out,
        rows=scores,
        base=BEFORE,
        unpaired=(REAL,),
        unavailable={key: missing[key] for key in SHOWN_METRICS if key in missing},
        notes=(*selected.notes, *faults),
        source=voice,
        model=model,
        strength=applied,
        speaker=selected.speaker,
        train=train,
        reference_text=reference.text,
        losses=run.read_metrics(),
        recipe=recipe_file.read_text(encoding="utf-8"),
        seconds=seconds,
        peak_memory_bytes=peak_memory(torch.device(DEVICE)),
    )
    pipeline.save_json(out / "scores.json", result.to_json())
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
        # The recordings could not be used; the user has repaired them, or tries others.
        (out / "recordings" / SOURCE_FILE).unlink(missing_ok=True)
        return
    if "report.html" in names or "data" in names:
        raise MynaError(f"{out} holds a demo already", hint=f"rm -r {out}, or choose another folder with --out")
    raise MynaError(f"{out} holds something else than a demo", hint="choose another folder with --out")


def _eval_set(held_out: list[Utterance], reference: Utterance) -> EvalSet:
    """Make an item of each held-out text, all with the same reference; similarity is to the other held-out
    recordings."""
    by_text = {alphanumeric(clip.text): clip for clip in reversed(held_out)}
    clips = sorted(by_text.values(), key=held_out.index)
    items = [EvalItem(clip.id, clip.text, clip.speaker, clip.language, (reference,), recording=clip) for clip in clips]
    return EvalSet(tuple(items), {reference.speaker: tuple(clips)})


def demo_page(result: DemoResult) -> str:
    """Render the scores, the speech before and after to listen to, and what to do next."""
    estimates, speaker = result.estimates, result.speaker
    train_length, total = _minutes(sum(map(clip_seconds, result.train))), sum(result.seconds.values())
    numbers = [
        (f"{estimates[BEFORE][key].mean:.{digits}} → {estimates[AFTER][key].mean:.{digits}}", label)
        for key, digits, label in (
            ("similarity", "2f", "similarity to the real voice"),
            ("wer", "0%", "words that are recognized wrongly"),
        )
        if estimates[BEFORE][key].n and estimates[AFTER][key].n
    ]
    numbers += [(_minutes(total), "for all of it"), (f"{result.peak_memory_bytes / 1e9:.1f} GB", "of memory at most")]
    part = f", {result.strength:.0%} of it: with more the voice is more alike, and more words are lost"
    header, rows = result.score_table()
    metrics, change = [METRICS_BY_KEY[key] for key in SHOWN_METRICS], result.differences[AFTER]
    changes = [pipeline.difference_cell(metric, change[metric.key]) for metric in metrics]
    by_id = {name: {row.id: row for row in scores} for name, scores in result.rows.items()}
    stages = [(name, f"{seconds:.1f} s") for name, seconds in result.seconds.items()]
    run, reference, recipe = (
        shlex.quote(str(result.folder / name)) for name in ("run", "reference.wav", "recipe.yaml")
    )
    model, reference_text = shlex.quote(result.model), shlex.quote(result.reference_text)
    origin = "Clone a voice only if its owner agrees."
    if result.source is None:
        origin = (
            "The voice belongs to no person: it was made with Kokoro-82M (Apache-2.0), and reads examples from WordNet."
        )
    sections = [
        page.heading(f"One voice, before and after {result.seconds['train'] / 60:.1f} minutes of training", 1),
        page.paragraph(
            f"{result.model} had never heard {speaker}. It was given {len(result.train)} clips, {train_length} in all, "
            "and a LoRA was trained on them on this machine's processor. The texts below were held out. All of them "
            "are spoken with the same clip as a reference, so what differs between before and after is the training "
            f"alone{part if result.strength != 1.0 else ''}.",
            "lead",
        ),
        page.figures(numbers),
        page.heading("Listen"),
        page.paragraph("A click on a spectrogram plays from there. Time runs to the right, frequency upwards."),
        *(
            pipeline.item_section(row, {name: of[row.id] for name, of in by_id.items()}, result.folder / SCORES_FOLDER)
            for row in result.rows[REAL]
        ),
        page.heading("Scores"),
        page.table("Scores of the real recordings, before and after", header, [*rows[:-1], [rows[-1][0], *changes]]),
        *(page.paragraph(reason, "missing") for reason in result.unmeasured()),
        page.paragraph(
            f"Over {len(result.texts)} texts, with 95 % intervals; a change whose interval holds zero says nothing, "
            f"and {len(result.texts)} texts are few. Similarity is that of each clip to the mean of the real "
            "recordings of the other texts, by ECAPA: a clip of that person has about 0.83, one of another person less "
            "than 0.2. Word errors are those of a Whisper; it makes some with real recordings too, and where its "
            "transcript loops, all words of the text are errors. Of the checkpoints that training left, the one with "
            "the lowest evaluation loss speaks.",
            "note",
        ),
        page.heading("Loss"),
        loss_plot(collect_curves(result.losses)),
        page.heading("Go on"),
        page.paragraph("The same with your own recordings, each beside a text file of the same name:"),
        page.code("myna demo --voice FOLDER --out demo-mine"),
        page.paragraph("Say something else in this voice:"),
        page.code(
            f'myna speak "Good morning." --run {run} --strength {result.strength:g} \\\n'
            f"  --reference {reference} --reference-text {reference_text} \\\n  --out good-morning.wav"
        ),
        page.paragraph("Train for longer, or otherwise; every setting of the recipe may be changed:"),
        page.code(
            f"myna prepare FOLDER --out data/mine --model {model}\n"
            f"myna train {recipe} --out runs/mine --set data.train=data/mine \\\n"
            "  --set data.evaluation=null --set train.early_stopping_patience=null --set train.steps=300"
        ),
        page.heading("How it was made"),
        page.table("How long each stage took", ("stage", "took"), [*stages, ("in all", f"{total:.1f} s")]),
        *map(page.paragraph, result.notes),
        page.details("The recipe", page.code(result.recipe), is_open=True),
        page.details("The texts it was trained on", page.bullets(clip.text for clip in result.train)),
        page.footer(origin),
    ]
    return page.render_page(f"Myna demo: {speaker}", sections)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
