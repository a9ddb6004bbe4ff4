"""The panel that listens while a model learns: the same lines and the same dice at every evaluation, ranked by ear.

RUN/speech_eval/
  real/               the recordings of the lines, where there are such
  step-000000/        the untuned model; then a folder for every step at which the panel listened
    sounds/spoken/    what was said, lossless
    pictures/         the same for the eye
    lines.parquet     what was heard, line by line
    guard/            the same for the lines of the guard
  report.html         all steps side by side, made anew each time

It is what the loop calls its `Audience`, and stands above the rooms, since it joins the one that speaks and the one
that listens.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from myna.config import DataSettings, Recipe, SpeechEvalSettings
from myna.data.codec import Codec
from myna.data.conversation import Reference
from myna.errors import ConfigError, TrainingError
from myna.evaluate.eval_set import eval_set_from_data, eval_set_from_file
from myna.evaluate.history import TrainingHistory, conclusion, page, step_folder
from myna.evaluate.items import EvalSet
from myna.evaluate.pipeline import Tell, score_systems, sound_of
from myna.evaluate.ranking import Constraints, StepScores
from myna.evaluate.results import file_name, read_rows
from myna.evaluate.scorers import Scorers
from myna.evaluate.scoring import ItemScores
from myna.evaluate.speech_system import SpeechSystem, revision_in_training
from myna.evaluate.systems import REAL, Recordings, System
from myna.io import replacing
from myna.models import open_family
from myna.models.base import Family
from myna.report.document import save
from myna.report.spectrogram import mel_pixels, palette, png
from myna.speak.engine import Engine
from myna.train.callbacks import AutocastContext, LoggedSample, SpeechScores
from myna.train.distributed import ProcessInfo

SPOKEN = "spoken"
"""What the model is called among the systems; which model it is, the folder says."""
NEEDED = ("words", "voice", "distillmos")
"""Ears without which the rule cannot be followed."""
TRACKED = 4
"""Lines whose sound goes to the trackers each time."""
AT_ONCE = min(4, os.cpu_count() or 1)


@dataclass(slots=True)
class SpeechEvaluation:
    """`folder` is RUN/speech_eval."""

    recipe: Recipe
    folder: Path
    ears: Scorers
    family: Family
    device: torch.device
    plan: EvalSet
    guard: EvalSet | None = None
    codec: Codec | None = None
    """None on a card, where it is opened each time: training needs the room in between."""
    tell: Tell = lambda *_: None
    """Told how far it is."""
    listenings: dict[int, StepScores] = field(default_factory=dict)
    """By step."""
    real: list[ItemScores] = field(default_factory=list)
    _voices: dict[str, Reference] = field(default_factory=dict)

    @classmethod
    def convene(cls, recipe: Recipe, run: Path, tell: Tell = lambda *_: None) -> SpeechEvaluation:
        """Everything that can be missing is found missing now, and not when the first evaluation comes."""
        settings, model = recipe.speech_eval, recipe.model
        family = open_family(model.source, revision=model.revision, codec=model.codec)
        if family.listens:
            raise ConfigError(
                f"`speech_eval.asr` is for models that speak, and {family.source} answers in words",
                hint="--set speech_eval.asr=null, and judge the run with `myna listen`",
            )
        plan = _plan(settings, recipe.data)
        guard = _guard(settings, recipe.data) if settings.forgetting_data is not None else None
        device = ProcessInfo.find().device(recipe.train.device)
        codec = family.load_codec(device="cpu")  # elsewhere only to see that it is there
        kept = codec if device.type == "cpu" else None
        return cls(
            recipe, run / "speech_eval", open_required_scorers(settings), family, device, plan, guard, kept, tell
        )

    @property
    def course(self) -> TrainingHistory:
        settings = self.recipe.speech_eval
        listenings = [self.listenings[step] for step in sorted(self.listenings)]
        return TrainingHistory(
            self.recipe.name, listenings, Constraints(settings.min_stop_rate, settings.min_mos), self.real
        )

    def introduce(self) -> Sequence[str]:
        speakers = len({task.speaker for task in self.plan.tasks})
        guard = f", and {len(self.guard.tasks)} of the guard" if self.guard is not None else ""
        heard_by = ", ".join(self.ears.names[ear] for ear in NEEDED)
        return [
            f"listening: {len(self.plan.tasks)} lines of {speakers} speakers{guard}, heard by {heard_by}",
            *self.plan.notes,
            *(self.guard.notes if self.guard is not None else ()),
        ]

    def recall(self, step: int) -> None:
        self.listenings = {}
        for folder in sorted(self.folder.glob("step-*")):
            number = int(folder.name.removeprefix("step-"))
            if number <= step and (folder / "lines.parquet").is_file():
                guard = folder / "guard" / "lines.parquet"
                rows, guarded = read_rows(folder / "lines.parquet"), read_rows(guard) if guard.is_file() else []
                self._check_same_ears(folder, [*rows, *guarded])
                _check_same_lines(folder, rows, self.plan)
                if self.guard is not None:
                    _check_same_lines(folder / "guard", guarded, self.guard)
                self.listenings[number] = StepScores(number, rows, guarded)
        if self.listenings and (self.folder / "real" / "lines.parquet").is_file():
            self.real = read_rows(self.folder / "real" / "lines.parquet")

    def hear(self, step: int, model: nn.Module, numbers: AutocastContext) -> SpeechScores:
        codec = self.codec or self.family.load_codec(device=self.device)
        engine = Engine(self.family, model, codec, self.recipe.data.reference_placement, numbers)
        folder = self.folder / step_folder(step)
        rows = self._judge(self.plan, self._speaker(engine), folder)
        guarded = self._judge(self.guard, self._speaker(engine), folder / "guard") if self.guard is not None else []
        self.listenings[step] = StepScores(step, rows, guarded)
        if step == 0:
            self.real = self._judge(self.plan, Recordings(REAL, codec.sample_rate), self.folder / "real")
        self._draw(rows, folder, codec.sample_rate)
        course = self.course
        save(self.folder / "report.html", page(course, self.folder))
        best = course.best.step if course.best is not None else None
        verdict = next(one for one in course.verdicts if one.step == step)
        samples = [_sample(row, folder, codec.sample_rate) for row in rows[:TRACKED] if row.sound]
        return SpeechScores(verdict.row(best), best == step, course.goes_up, samples)

    def conclude(self) -> Sequence[str]:
        return [*conclusion(self.course), f"hear it all: {self.folder / 'report.html'}"]

    def _speaker(self, engine: Engine) -> SpeechSystem:
        seed = self.recipe.speech_eval.seed
        return SpeechSystem(SPOKEN, lambda: engine, seed, {}, known_by=revision_in_training, voices=self._voices)

    def _judge(self, plan: EvalSet, system: System, folder: Path) -> list[ItemScores]:
        batch = self.recipe.speech_eval.batch_size
        judged = score_systems(plan, [system], self.ears, folder, batch=batch, at_once=AT_ONCE, tell=self.tell)
        return judged.rows[system.name]

    def _check_same_ears(self, folder: Path, rows: Sequence[ItemScores]) -> None:
        """Marks of two recognisers cannot be compared, so a run goes on with the ears it began with."""
        for ear in NEEDED:
            # The voices that were compared with stand behind the name of that ear.
            others = {
                name for row in rows if (name := getattr(row, f"{ear}_by")) and not _is(name, self.ears.names[ear])
            }
            if others:
                raise TrainingError(
                    f"{folder} was heard by {min(others)}, and now {self.ears.names[ear]} would listen",
                    hint="go on with the ears that the run began with, or start a run of its own",
                )

    def _draw(self, rows: Sequence[ItemScores], folder: Path, sample_rate: int) -> None:
        for row in rows:
            if row.sound:
                with replacing(folder / "pictures" / f"{file_name(row.id)}.png") as temporary:
                    temporary.write_bytes(png(mel_pixels(sound_of(row, folder, sample_rate), sample_rate)))


def open_required_scorers(settings: SpeechEvalSettings) -> Scorers:
    """Those that the rule needs, and no others, since each takes its time at every evaluation."""
    ears = Scorers.open(settings.asr, settings.speaker_encoder, at_once=AT_ONCE)
    lacking = [f"{ear}: {ears.missing[ear]}" for ear in NEEDED if ear in ears.missing]
    if lacking:
        raise ConfigError(
            "`speech_eval.asr` asks for ears that are not here: " + "; ".join(lacking),
            hint="make ears, or install what is named; or train without listening: --set speech_eval.asr=null",
        )
    return replace(ears, dnsmos=None, names={ear: ears.names[ear] for ear in NEEDED}, missing={})


def _plan(settings: SpeechEvalSettings, data: DataSettings) -> EvalSet:
    held_out = settings.data or data.evaluation
    if settings.sentences is not None:
        voices = held_out or data.train
        return eval_set_from_file(settings.sentences, voices, data, settings.seed, settings.limit, settings.language)
    assert held_out is not None, "the recipe was checked"
    return eval_set_from_data(held_out, data, settings.seed, settings.limit, settings.language)


def _guard(settings: SpeechEvalSettings, data: DataSettings) -> EvalSet:
    assert settings.forgetting_data is not None
    if settings.forgetting_data.is_dir():
        return eval_set_from_data(settings.forgetting_data, data, settings.seed, settings.limit, settings.language)
    return eval_set_from_file(settings.forgetting_data, None, None, settings.seed, settings.limit, settings.language)


def _check_same_lines(folder: Path, rows: Sequence[ItemScores], plan: EvalSet) -> None:
    if {row.id: row.text for row in rows} != {task.id: task.text for task in plan.tasks}:
        raise TrainingError(
            f"{folder} has other lines than would be said now",
            hint="go on with the lines that the run began with, or start a run of its own",
        )


def _is(heard_by: str, ear: str) -> bool:
    return heard_by == ear or heard_by.startswith(f"{ear} ")


def _sample(row: ItemScores, folder: Path, sample_rate: int) -> LoggedSample:
    samples = sound_of(row, folder, sample_rate)
    picture: Any = palette()[mel_pixels(samples, sample_rate)]
    return LoggedSample(row.id, samples, sample_rate, picture)
