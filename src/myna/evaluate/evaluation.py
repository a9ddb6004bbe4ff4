"""`myna evaluate`: a run or a model beside its base, the real recordings and their codec round trip.

OUT/evaluation.json   every figure
OUT/items.parquet     scores of each item, with OUT/items and OUT/audio as `myna.evaluate.pipeline` writes them
OUT/report.html       the page
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from myna.core.errors import ConfigError, MynaError
from myna.core.io import DEFAULT_SPEAKER_ENCODER, claim_folder, lock_folder, save_text
from myna.core.progress import ProgressCallback, silent
from myna.core.run_folder import RunFolder
from myna.data.split import ComparedClip, TrainedClips
from myna.evaluate import metrics, pages, pipeline, scoring
from myna.evaluate.items import EvalItem, EvalSet
from myna.evaluate.systems import BASE, REAL, ROUND_TRIP, Recordings, Subject, System
from myna.models.files import format_names
from myna.speak.engine import encode_clip

EVALUATION_FILE, PAGE_FILE = "evaluation.json", "report.html"
GROUPS: Mapping[str, Callable[[scoring.ItemScores], str]] = {
    "speaker": lambda row: row.speaker or "unnamed",
    "language": lambda row: row.language or "unnamed",
    "length": lambda row: {"word": "one word", "sentence": "usual", "long": "very long"}[row.length_class],
}
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

    def open_scorers(self) -> scoring.Scorers:
        return scoring.Scorers.open(self.asr, self.speaker_encoder, device=self.device)

    def eval_set(self, subject: Subject) -> EvalSet:
        """Load the items; by default the held-out data of the subject."""
        return subject.eval_set(self.data, self.sentences, seed=self.seed, limit=self.limit, language=self.language)


@dataclass(frozen=True, kw_only=True)
class Results:
    """Scores of systems on the same items: metrics, differences from one system, and what is missing."""

    folder: Path
    rows: Mapping[str, Sequence[scoring.ItemScores]]
    """Item scores by system."""
    base: str
    """System that differences are taken from."""
    unpaired: tuple[str, ...] = ()
    """Systems without differences."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Reason for each metric whose scorer could not be opened, by metric."""
    notes: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def estimates(self) -> dict[str, metrics.MetricEstimates]:
        """Metrics by system."""
        return {name: self._comparable(metrics.estimate_metrics(rows)) for name, rows in self.rows.items()}

    @cached_property
    def differences(self) -> dict[str, metrics.MetricEstimates]:
        """Differences from the base by system, on the items that both have spoken."""
        base = self.rows.get(self.base)
        names = [name for name in self.rows if name not in (self.base, *self.unpaired)]
        if base is None:
            return {}
        return {
            name: self._comparable(
                {one.key: metrics.estimate_difference(one.ratio, self.rows[name], base) for one in metrics.METRICS}
            )
            for name in names
        }

    @cached_property
    def incomparable(self) -> dict[str, str]:
        """Reason for each metric that different scorers have measured, which says nothing about the systems."""
        found: dict[str, str] = {}
        for scorer in sorted({metric.scorer for metric in metrics.METRICS if metric.scorer}):
            names = sorted({getattr(row, f"{scorer}_model") for rows in self.rows.values() for row in rows} - {""})
            if len(names) > 1:
                reason = (
                    f"measured by different scorers or against other clips ({'; '.join(names)}); evaluate them alike"
                )
                found |= {metric.key: reason for metric in metrics.METRICS if metric.scorer == scorer}
        return found

    @property
    def missing(self) -> dict[str, str]:
        """Reason for each metric without a value, by metric."""
        return {**self.unavailable, **self.incomparable}

    @property
    def warnings(self) -> list[str]:
        """Sentences that belong above every figure: items that a system had seen before."""
        return seen_warnings(self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return the schema that `myna evaluate`, `myna compare` and `myna demo` write."""
        return {
            "warnings": self.warnings,
            "settings": dict(self.settings),
            "items": max(map(len, self.rows.values()), default=0),
            "looped": {name: metrics.count_looped(rows) for name, rows in self.rows.items()},
            "systems": estimates_to_json(self.estimates),
            "differences": estimates_to_json(self.differences),
            "missing": self.missing,
            "notes": list(self.notes),
        }

    def _comparable(self, estimates: metrics.MetricEstimates) -> metrics.MetricEstimates:
        return {key: estimate for key, estimate in estimates.items() if key not in self.incomparable}


@dataclass(frozen=True, kw_only=True)
class Evaluation(Results):
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
        for metric in metrics.METRICS:
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
                kind: {group: estimates_to_json(systems) for group, systems in groups.items()}
                for kind, groups in self.groups.items()
            },
            "diagnoses": [asdict(diagnosis) for diagnosis in self.diagnoses],
            "scorers": dict(self.scorer_names),
            "metadata": {name: dict(metadata) for name, metadata in self.metadata.items()},
        }


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
    base = subject.base_system(seed=seed, device=device)
    if base is None and others:
        base = replace(others.pop(0), name=BASE)
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
            *(system, *([base] if base is not None else []), *others),
        ]
        scorers, notes = settings.open_scorers(), list(eval_set.notes)
        seen_notes: list[str] = []
        rows = pipeline.score_systems(
            eval_set,
            systems,
            scorers,
            out,
            batch_size=settings.batch_size,
            progress=progress,
            save_references=True,
            annotate=lambda rows: seen_notes.extend(mark_seen_items(systems, eval_set.items, rows)),
        )
        metadata = {one.name: one.metadata for one in systems}
        metadata[subject.name] = {
            **metadata[subject.name],
            "notes": [*metadata[subject.name].get("notes", ()), *seen_notes],
        }
        notes += [*scorers.notes, *(note for known in metadata.values() for note in known.get("notes", ()))]
        evaluation = Evaluation(
            folder=out,
            rows=rows,
            base=BASE,
            unpaired=(REAL, ROUND_TRIP),
            unavailable=metrics.missing_metrics(scorers.missing),
            notes=notes,
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
        save_json(out / EVALUATION_FILE, evaluation.to_json())
        save_text(out / PAGE_FILE, pages.evaluation_page(evaluation))
        return evaluation


def save_json(file: Path, content: Mapping[str, Any]) -> None:
    save_text(file, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def estimates_to_json(systems: Mapping[str, metrics.MetricEstimates]) -> dict[str, Any]:
    return {name: {key: value.to_json() for key, value in of.items()} for name, of in systems.items()}


def mark_seen_items(
    systems: Iterable[System], items: Sequence[EvalItem], rows: Mapping[str, Sequence[scoring.ItemScores]]
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
        keys = [trained.key(one.audio, one.span) if (one := item.recording) is not None else "" for item in items]
        clips = [ComparedClip(item.id, item.speaker, item.text, key) for item, key in zip(items, keys, strict=True)]
        found = trained.find(clips, unnamed_speakers=True)
        # The run may be a `best/` or a checkpoint in the folder whose items chose the best checkpoint.
        folders = (run.folder, *run.folder.absolute().parents[:2])
        files = (folder / "speech_eval" / pipeline.step_folder(0) / pipeline.ITEMS_FILE for folder in folders)
        chose = next((file for file in files if file.is_file()), None)
        chosen_by = {(row.id, row.text) for row in pipeline.read_item_scores(chose)} if chose is not None else set()
        for row in rows[system.name]:
            row.trained_on = found.get(row.id, "")
            row.chose_checkpoint = (row.id, row.text) in chosen_by
    return notes


def seen_warnings(rows: Mapping[str, Sequence[scoring.ItemScores]]) -> list[str]:
    """Say for the head of a report how many items each system had seen before."""
    warnings = []
    for system, scores in rows.items():
        trained = {row.id: row.trained_on for row in scores if row.trained_on}
        if trained:
            same = Counter(trained.values())
            warnings.append(
                f"{system} was trained on {len(trained)} of these {len(scores)} items ({same['audio']} with the same "
                f"audio, {same['words']} with the same words): {format_names(list(trained))}. Its scores on them say "
                "nothing about new texts; hold items out before training: myna split DATA --texts 20"
            )
        if chose := sum(bool(row.chose_checkpoint) for row in scores):
            warnings.append(
                f"{chose} of these {len(scores)} items chose the checkpoint of {system}: its gain on them is too high. "
                "Evaluate it on other items; those that chose nothing are in speech_eval/report.html of the run"
            )
    return warnings
