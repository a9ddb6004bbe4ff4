"""`myna evaluate`: a run or a model beside its base, the real recordings and their codec round trip.

OUT/evaluation.json   every figure
OUT/items.parquet     scores of each item, with OUT/items and OUT/audio as `myna.evaluate.pipeline` writes them
OUT/report.html       the page
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from myna.core.config import DataSettings
from myna.core.errors import ConfigError, MynaError, SpeakError
from myna.core.io import DEFAULT_SPEAKER_ENCODER, claim_folder, lock_folder, save_text
from myna.core.progress import ProgressCallback, silent
from myna.core.run_folder import RunFolder
from myna.core.statistics import CONFIDENCE_LEVEL
from myna.data.split import TrainedClips
from myna.evaluate import metrics, pipeline
from myna.evaluate.items import EvalItem, EvalSet, load_eval_set
from myna.evaluate.metrics import BASE, METRICS, METRICS_BY_KEY, REAL, ROUND_TRIP, SYSTEM_TITLES, system_title
from myna.evaluate.pipeline import Recordings, SpeechSystem, System
from myna.evaluate.scoring import ItemScores, Scorers
from myna.models.ref import ModelRef, split_name
from myna.report import page
from myna.speak.engine import encode_clip
from myna.speak.loading import load_engine

EVALUATION_FILE, PAGE_FILE = "evaluation.json", "report.html"
GROUPS: Mapping[str, Callable[[ItemScores], str]] = {
    "speaker": lambda row: row.speaker or "unnamed",
    "language": lambda row: row.language or "unnamed",
    "length": lambda row: {"word": "one word", "sentence": "usual", "long": "very long"}[row.length_class],
}
SHOWN_ITEMS = 20
"""Items with players. A page with a thousand would not open; the audio of all lies beside it."""
HISTOGRAM_BINS = 24
HISTOGRAMS = ("cer", "similarity", "distillmos", "speaking_rate", "pitch")
NOT_APPLICABLE_REASONS = {
    "similarity": "no item has a recording of its speaker",
    "similarity_rank1": "there is only one speaker to choose from",
    "similarity_to_others": "there is only one speaker",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """Options that `myna evaluate` and `myna compare` share."""

    data: Path | None = None
    """Prepared data whose targets are the items, or whose speakers say the sentences."""
    sentences: Path | None = None
    """Text file with one sentence a line, or a list as of seed-tts-eval."""
    asr: str | None = None
    speaker_encoder: str = DEFAULT_SPEAKER_ENCODER
    language: str = ""
    """Language of items that name none."""
    seed: int = 0
    limit: int | None = None
    """Maximum number of items."""
    batch_size: int = 16
    device: str = "auto"
    model: str | None = None
    """Base model of the runs and adapters, if it is not the one that they name."""
    force: bool = False
    """Write into a folder that holds something else."""

    def to_json(self) -> dict[str, Any]:
        values = {key: value for key, value in asdict(self).items() if key != "force"}
        return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}

    @property
    def inputs(self) -> list[Path]:
        return [path for path in (self.data, self.sentences) if path is not None]

    def eval_set(self, subject: "Subject") -> EvalSet:
        """Load the items of `sentences` or of `data`; by default the held-out data of the subject."""
        data, sentences, run = self.data, self.sentences, subject.ref.run
        if data is None and run is not None:
            data = run.recipe.data.evaluation or (run.recipe.data.train if sentences is not None else None)
        if data is None and sentences is None:
            raise ConfigError(
                "there is nothing to say: no `data`, no `sentences`, and no data.evaluation in a recipe",
                hint="myna evaluate RUN --data data/HELD_OUT, or --sentences FILE with one sentence a line",
            )
        settings = run.recipe.data if run is not None else DataSettings(train=data) if data is not None else None
        scene = subject.ref.metadata.scene if subject.ref.is_trained else ""
        return load_eval_set(data, sentences, settings, self.seed, self.limit, self.language, scene)

    def score(
        self, eval_set: EvalSet, systems: Sequence[System], out: Path, reuse: Sequence[Path], progress: ProgressCallback
    ) -> tuple[dict[str, list[ItemScores]], Scorers, list[str]]:
        """Open the scorers, score the systems and mark items that they had seen. Also return notes for the user."""
        scorers, size = Scorers.open(self.asr, self.speaker_encoder, device=self.device), self.batch_size
        seen: list[str] = []
        rows = pipeline.score_systems(
            eval_set,
            systems,
            scorers,
            out,
            batch_size=size,
            progress=progress,
            save_references=True,
            reuse=reuse,
            annotate=lambda rows: seen.extend(mark_seen_items(systems, eval_set.items, rows)),
        )
        return rows, scorers, [*eval_set.notes, *scorers.notes, *seen]


@dataclass(frozen=True, kw_only=True)
class Evaluation(pipeline.Results):
    """Results of one system beside the recordings and its base, with groups of items and diagnoses."""

    system: str
    """System that was evaluated."""
    eval_set: EvalSet
    scorer_names: Mapping[str, str]
    metadata: Mapping[str, Mapping[str, Any]]
    """Run, model and loss by system."""
    run: RunFolder | None = None

    @cached_property
    def groups(self) -> dict[str, dict[str, dict[str, metrics.MetricEstimates]]]:
        """Metrics by kind of group, group and system; none of a kind that has only one group."""
        found: dict[str, dict[str, dict[str, metrics.MetricEstimates]]] = {}
        for kind, group_of in GROUPS.items():
            names = sorted({group_of(row) for rows in self.rows.values() for row in rows})
            found[kind] = {}
            for group in names if len(names) > 1 else ():  # one group would repeat the figures of all items
                rows = {name: [row for row in of if group_of(row) == group] for name, of in self.rows.items()}
                found[kind][group] = {
                    name: metrics.estimate_metrics(of, metrics.GROUPED_METRICS) for name, of in rows.items()
                }
        return found

    @cached_property
    def diagnoses(self) -> list[metrics.Diagnosis]:
        return metrics.diagnose(self.rows, self.estimates, self.differences, self.metadata)

    @property
    def missing(self) -> dict[str, str]:
        """Reason for each metric without a value, and for missing recordings."""
        missing = {}
        for metric in METRICS:
            if metric.key in self.unavailable:
                missing[metric.key] = self.unavailable[metric.key]
            elif not any(estimates[metric.key].n for estimates in self.estimates.values()):
                missing[metric.key] = NOT_APPLICABLE_REASONS.get(metric.key, "it applies to no item")
        if REAL in self.rows and not self.rows[REAL]:
            missing[REAL] = "these items have no recordings; give --data with what was really spoken"
        return missing

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {
            "model": self.system,
            "items": len(self.eval_set.items),
            "trained_on": {
                name: {row.id: row.trained_on for row in rows if row.trained_on} for name, rows in self.rows.items()
            },
            "groups": {
                kind: {group: pipeline.estimates_to_json(systems) for group, systems in groups.items()}
                for kind, groups in self.groups.items()
            },
            "diagnoses": [asdict(diagnosis) for diagnosis in self.diagnoses],
            "scorers": dict(self.scorer_names),
            "metadata": {name: dict(metadata) for name, metadata in self.metadata.items()},
        }


@dataclass(frozen=True, slots=True)
class Subject:
    """Run, adapter or model to evaluate, with its name in the report."""

    name: str
    ref: ModelRef

    @classmethod
    def parse(cls, text: str, base: str | None = None) -> "Subject":
        """Resolve SOURCE or NAME=SOURCE; a run or an adapter is opened on another `base` model if one is given."""
        name, source = split_name(text)
        if name in SYSTEM_TITLES:
            raise ConfigError(f"a model cannot be called {name} here", hint=f"give it another name: mine={source}")
        return cls(name, ModelRef.find(source, base))

    def system(self, *, seed: int, device: str, strength: float = 1.0, codec: str | None = None) -> SpeechSystem:
        """Return the system; its weights are loaded when it speaks. `strength` scales its LoRA."""
        ref = self.ref
        metadata: dict[str, Any] = {"model": ref.base_source}
        if not ref.is_trained and strength != 1.0:
            raise SpeakError(
                f"`strength` scales the LoRA of a run, and {ref.source} is a model by itself", hint="leave it out"
            )
        if ref.is_trained:
            metadata = run_metadata(ref.run) if ref.run is not None else metadata | {"adapter": str(ref.folder)}
        return SpeechSystem(
            self.name,
            lambda: load_engine(ref, codec=codec, device=device, strength=strength),
            seed,
            metadata | ({"strength": strength} if strength != 1.0 else {}),
        )


def run_metadata(run: RunFolder) -> dict[str, Any]:
    """Read run folder, model and evaluation loss: that of the best checkpoint by speech, if speech was evaluated."""
    metadata: dict[str, Any] = {"run": str(run.folder), "model": run.recipe.model.source}
    notes: list[str] = []
    rows = run.read_metrics(notes.append)
    metadata |= {"notes": notes} if notes else {}
    # A loss that was not finite is None.
    losses = {row["step"]: row["evaluation"]["loss"] for row in rows if "evaluation" in row}
    train_losses = [row["loss"] for row in rows if "loss" in row]
    best_steps = [row["speech_eval"]["best_step"] for row in rows if "speech_eval" in row]
    if losses:
        lowest = min((loss for loss in losses.values() if loss is not None), default=None)
        metadata |= {"loss": losses.get(best_steps[-1], lowest) if best_steps else lowest, "base_loss": losses.get(0)}
    elif train_losses:
        metadata |= {"loss": train_losses[-1]}
    return metadata


def evaluate_system(
    name: str,
    settings: EvaluationSettings,
    *,
    against: Sequence[str] = (),
    out: Path | None = None,
    strength: float = 1.0,
    progress: ProgressCallback = silent,
) -> Evaluation:
    """Evaluate a run folder, or the hub name or folder of an adapter or a model; NAME=... gives it a name.

    `strength` scales the LoRA of this system, and not of the systems `against` it. A run is compared with the model it
    was tuned from, and a model with the first of the others.
    """
    seed, device = settings.seed, settings.device
    subject = Subject.parse(name, settings.model)
    eval_set = settings.eval_set(subject)
    if not subject.ref.is_trained and settings.model is not None:
        raise ConfigError(
            f"{subject.ref.source} is a model by itself, and has no base", hint="leave out --model, or use --against"
        )
    system = subject.system(seed=seed, device=device, strength=strength)
    others = [Subject.parse(other).system(seed=seed, device=device) for other in against]
    base = []
    if subject.ref.is_trained:
        untuned = Subject(BASE, ModelRef.find(subject.ref.base_source))
        base = [untuned.system(seed=seed, device=device, codec=subject.ref.metadata.codec)]
    elif others:
        base = [replace(others.pop(0), name=BASE)]
    run = subject.ref.run
    out = out or (run.folder / "evaluation" if run is not None else Path("evaluations") / subject.name)
    inputs = [Path(subject.ref.source), *settings.inputs]
    claim_folder(out, "evaluation", known=(EVALUATION_FILE, pipeline.ITEMS_FOLDER), inputs=inputs, force=settings.force)
    with lock_folder(out, "evaluating into"):
        codec = system.engine.codec
        rate, revision = codec.sample_rate, codec.revision
        systems: list[System] = [
            Recordings(REAL, rate),
            Recordings(ROUND_TRIP, rate, revision, lambda clip: codec.decode(encode_clip(codec, clip))),
            *(system, *base, *others),
        ]
        rows, scorers, notes = settings.score(eval_set, systems, out, (), progress)
        metadata = {one.name: one.metadata for one in systems}
        evaluation = Evaluation(
            folder=out,
            rows=rows,
            base=BASE,
            unpaired=(REAL, ROUND_TRIP),
            unavailable=metrics.missing_metrics(scorers.missing),
            notes=[*notes, *(note for known in metadata.values() for note in known.get("notes", ()))],
            settings={
                **{"subject": name, "against": list(against), "out": str(out), "strength": strength},
                **settings.to_json(),
            },
            system=subject.name,
            eval_set=eval_set,
            scorer_names=scorers.names,
            metadata=metadata,
            run=run,
        )
        pipeline.save_json(out / EVALUATION_FILE, evaluation.to_json())
        save_text(out / PAGE_FILE, evaluation_page(evaluation))
        return evaluation


def mark_seen_items(
    systems: Iterable[System], items: Sequence[EvalItem], rows: Mapping[str, Sequence[ItemScores]]
) -> list[str]:
    """Set `trained_on` and `chose_checkpoint` of the scores of each run; return notes on what cannot be known."""
    notes = []
    for system in systems:
        run = RunFolder.find(Path(system.metadata["run"])) if "run" in system.metadata else None
        if run is None:
            continue
        try:
            trained = TrainedClips.open(run.recipe)
        except MynaError as error:
            notes.append(f"whether {system.name} was trained on these items cannot be told: {error.what}")
            continue
        clips = [trained.clip(item.id, item.speaker, item.text, item.recording) for item in items]
        found = trained.find(clips, unnamed_speakers=True)
        # The run may be a `best/` or a checkpoint in the folder whose items chose the best checkpoint.
        folders = (run.folder, *run.folder.absolute().parents[:2])
        files = (folder / "speech_eval" / pipeline.step_folder(0) / pipeline.ITEMS_FILE for folder in folders)
        chose = next((file for file in files if run.recipe.evaluates_speech and file.is_file()), None)
        chosen_by = {(row.id, row.text) for row in pipeline.read_item_scores(chose)} if chose is not None else set()
        for row in rows[system.name]:
            row.trained_on = found.get(row.id, "")
            row.chose_checkpoint = (row.id, row.text) in chosen_by
    return notes


def evaluation_page(evaluation: Evaluation) -> str:
    """Render diagnoses, metrics, and the worst items with players."""
    name, items, estimates = evaluation.system, evaluation.eval_set.items, evaluation.estimates
    rows = pipeline.worst_first(evaluation.rows[name])
    by_id = {system: {row.id: row for row in of} for system, of in evaluation.rows.items()}
    speakers = len({item.speaker for item in items if item.speaker})
    measured = {key for key, estimate in estimates[name].items() if estimate.n}
    sections = [
        page.heading(f"{name}, speech evaluation", 1),
        page.paragraph(
            f"{len(items)} items of {f'{speakers} speakers' if speakers > 1 else 'one speaker'}, spoken by the model"
            f"{', by its base' if BASE in estimates else ''} and by the people themselves where there are recordings. "
            f"Every mean has an interval that holds {CONFIDENCE_LEVEL:.0%} of what other draws of such items would "
            f"give, {'of these items or of other such speakers' if speakers > 1 else 'by this speaker'}.",
            "lead",
        ),
        *(page.paragraph(f"{warning}.", "missing bad") for warning in evaluation.warnings),
    ]
    if evaluation.diagnoses:
        sections.append(page.heading("What is wrong"))
    else:
        sections.append(page.paragraph("None of the defects that are looked for was found."))
    for diagnosis in evaluation.diagnoses:
        first = f" First: {', '.join(diagnosis.items[:5])}." if diagnosis.items else ""
        metric = METRICS_BY_KEY.get(diagnosis.metric)
        sections.append(
            page.card(
                f"{system_title(diagnosis.system)}: {diagnosis.name}",
                page.paragraph(f"{diagnosis.text}.{first}"),
                page.paragraph(f"Seen in: {metric.title if metric else 'differences from the base'}", "note"),
                style="bad",
            )
        )
    sections += [
        *(page.paragraph(note, "note") for note in evaluation.notes),
        page.heading("Scores"),
        *pipeline.metrics_table(estimates, "Scores by system", keep_empty=True),
        *(page.paragraph(sentence, "missing") for sentence in evaluation.unmeasured()),
    ]
    if evaluation.differences:
        sections += [
            page.heading("Against the untuned base, on the same items"),
            *pipeline.metrics_table(evaluation.differences, "Differences from the base", differences=True),
            page.paragraph("In color: what differs beyond its interval.", "note"),
        ]
    grouped = [metric for metric in metrics.GROUPED_METRICS if metric.key in measured]
    for kind, groups in evaluation.groups.items():
        if groups:
            of_group = [(group, systems[name]) for group, systems in groups.items()]
            cells = [
                (group, str(max(one.n for one in of.values())), *(m.format_estimate(of[m.key]) for m in grouped))
                for group, of in of_group
            ]
            header = (kind, "items", *(metric.title for metric in grouped))
            sections += [page.heading(f"By {kind}"), page.table(f"Scores of {name} by {kind}", header, cells)]
    sections.append(page.heading("Distribution over the items"))
    for key in HISTOGRAMS:
        if key in measured:
            sections += [page.heading(METRICS_BY_KEY[key].title, 3), _histogram(evaluation, METRICS_BY_KEY[key])]
    sections.append(page.heading("Listen, the worst items first"))
    for row in rows[:SHOWN_ITEMS]:
        outputs = {system: of[row.id] for system, of in by_id.items() if row.id in of}
        sections.append(pipeline.item_section(row, outputs, evaluation.folder))
    header = ("item", "text", "word errors", "similarity", "defects", "seen before")
    all_items = page.table(f"All items of {name}, the worst first", header, map(_item_row, rows))
    scorers = ", ".join(evaluation.scorer_names.values()) or "acoustic measures alone"
    sections += [
        page.heading("All items"),
        page.details(f"{len(rows)} items, the worst first", all_items),
        page.footer(f"Scored by {scorers}. Every figure is in evaluation.json, every item in items.parquet."),
    ]
    return page.render_page(f"Evaluation of {name}", sections)


def _histogram(evaluation: Evaluation, metric: metrics.Metric) -> page.Section:
    """Plot how many items have which value, one outline for each system."""
    colors = {REAL: 5, evaluation.system: 0, BASE: 1, ROUND_TRIP: 2}
    values = {
        name: [part.numerator / part.denominator for row in rows if (part := metric.ratio(row)) and part.denominator]
        for name, rows in evaluation.rows.items()
        if name in colors
    }
    everything = [value for of in values.values() for value in of]
    low, high = min(everything), max(everything)
    if high - low < 1e-6 * max(1.0, abs(high)):  # no bins fit between equal values
        low, high = low - 0.5, high + 0.5
    curves = []
    for name, of in values.items():
        counts, edges = np.histogram(of, HISTOGRAM_BINS, (low, high))
        outline = zip(np.repeat(edges, 2).tolist(), [0.0, *np.repeat(counts, 2).tolist(), 0.0], strict=True)
        curves.append(page.Curve(system_title(name), list(outline), "faint" if name == REAL else "line", colors[name]))
    return page.line_plot(curves, title=metric.title, x_label=metric.description, y_label="items")


def _item_row(row: ItemScores) -> list[page.Cell]:
    return [
        page.cell(row.id, href=row.audio),
        row.text,
        "not measured" if row.word_errors is None else f"{row.word_errors} of {row.words}",
        "not measured" if row.similarity is None else f"{row.similarity:.3f}",
        ", ".join(pipeline.item_defects(row)),
        pipeline.seen_before(row),
    ]
