"""Speech evaluation during training, with the same items and sampling seeds at every step, to rank checkpoints. Without
a recognizer the items are spoken and kept, and nothing is ranked.

RUN/speech_eval/
  real/               the recordings of the items, if there are any
  step-000000/        the base model; then a folder for every evaluated step
    audio/spoken/     generated audio, lossless
    spectrograms/     spectrograms of that audio
    items.parquet     scores, item by item
    forgetting/       audio and scores of the forgetting set
    confirmation/     audio and scores of the items that choose nothing, by the base model and by each new best
  report.html         all steps side by side, rewritten at every evaluation
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from torch import nn

from myna.core.config import Recipe, SpeechEvalSettings
from myna.core.errors import ConfigError, TrainingError
from myna.core.io import atomic_write, remove_temporary_files, safe_file_name, save_text
from myna.core.progress import ProgressCallback, silent
from myna.data.codec import Codec
from myna.data.conversation import Reference
from myna.data.split import TrainedClips
from myna.evaluate import pipeline, ranking, scoring
from myna.evaluate.items import EvalItem, EvalSet, load_eval_set, split_items
from myna.evaluate.metrics import REAL
from myna.evaluate.pipeline import Recordings, SpeechSystem, System
from myna.models import open_family
from myna.models.base import SpeakingFamily
from myna.report import page
from myna.speak.engine import Engine
from myna.train.callbacks import AutocastContext, LoggedSample, SpeechScores
from myna.train.distributed import ProcessInfo

SPOKEN = "spoken"
"""Name of the model among the systems; its folder tells the checkpoint."""
REQUIRED_SCORERS = ("asr", "speaker_encoder", "distillmos")
"""Scorers that the ranking rule needs."""
SHOWN_STEP_ITEMS = 6
"""Items with players on the page of a training run, each at several steps."""
BESIDE = "Every item of every step lies beside this page, with its spectrogram."
TRACKED_ITEMS = 4
"""Number of items whose audio goes to the trackers at each evaluation."""


@dataclass(slots=True)
class SpeechEvaluation:
    """Evaluation callback of the training loop; `folder` is RUN/speech_eval."""

    recipe: Recipe
    folder: Path
    scorers: scoring.Scorers
    family: SpeakingFamily
    device: torch.device
    eval_set: EvalSet
    """Items that choose the best checkpoint."""
    confirmation_set: EvalSet | None = None
    """Items that choose nothing and confirm the gain of the best; None if there is only one item."""
    forgetting_set: EvalSet | None = None
    codec: Codec | None = None
    """Codec; None on a GPU, where it is loaded for each evaluation, since training needs the memory in between."""
    progress: ProgressCallback = silent
    steps: dict[int, ranking.StepScores] = field(default_factory=dict)
    recordings: list[scoring.ItemScores] = field(default_factory=list)
    _references: dict[str, Reference] = field(default_factory=dict)

    @classmethod
    def from_recipe(cls, recipe: Recipe, run: Path, progress: ProgressCallback = silent) -> Self:
        """Open everything that is needed, so that missing data or scorers are found now."""
        settings, model, data = recipe.speech_eval, recipe.model, recipe.data
        family = open_family(model.source, revision=model.revision, codec=model.codec)
        if not isinstance(family, SpeakingFamily):
            raise ConfigError(
                f"`speech_eval` is for models that speak, and {family.source} answers in words",
                hint="leave `speech_eval` out of the recipe, and evaluate the run with `myna answer`",
            )
        choice = (settings.seed, settings.limit, settings.language)
        speakers = settings.data or data.evaluation or (data.train if settings.sentences is not None else None)
        eval_set = load_eval_set(speakers, settings.sentences, data, *choice, data.scene)
        choosing, confirming = list(eval_set.items), list[EvalItem]()
        if recipe.evaluates_speech:
            choosing, confirming = split_items(eval_set.items, settings.seed)
        forgetting_set, forgetting = None, settings.forgetting_data if recipe.evaluates_speech else None
        if forgetting is not None:
            prepared, sentences = (forgetting, None) if forgetting.is_dir() else (None, forgetting)
            forgetting_set = load_eval_set(prepared, sentences, data if prepared else None, *choice)
        if recipe.evaluates_speech:
            trained = TrainedClips.open(recipe)
            spoken = "sentences" if settings.sentences is not None else "data"
            for setting, one in ((spoken, eval_set), ("forgetting_data", forgetting_set)):
                items = one.items if one is not None else ()
                clips = [trained.clip(item.id, item.speaker, item.text, item.recording) for item in items]
                hint = f"take these lines out of {settings.sentences}" if setting == "sentences" else ""
                trained.check_unseen(f"speech_eval.{setting}", clips, hint=hint)
        device = ProcessInfo.from_environment().device(recipe.train.device)
        codec = family.load_codec(device="cpu")  # on a GPU this only checks that it is there
        return cls(
            recipe=recipe,
            folder=run / "speech_eval",
            scorers=open_required_scorers(settings) if recipe.evaluates_speech else scoring.Scorers(),
            family=family,
            device=device,
            eval_set=replace(eval_set, items=tuple(choosing)),
            confirmation_set=replace(eval_set, items=tuple(confirming)) if confirming else None,
            forgetting_set=forgetting_set,
            codec=codec if device.type == "cpu" else None,
            progress=progress,
        )

    @property
    def history(self) -> ranking.TrainingHistory:
        steps = [self.steps[step] for step in sorted(self.steps)]
        return ranking.TrainingHistory(self.recipe.name, steps, self.recipe.speech_eval, self.recordings)

    def describe(self) -> Sequence[str]:
        items, speakers = len(self.eval_set.items), len({item.speaker for item in self.eval_set.items})
        if not self.recipe.evaluates_speech:
            return [f"speech samples: {items} sentences are spoken, kept and not scored", *self.eval_set.notes]
        confirming = len(self.confirmation_set.items) if self.confirmation_set is not None else 0
        forgetting = f", and {len(self.forgetting_set.items)} of the forgetting set" if self.forgetting_set else ""
        scorers = ", ".join(self.scorers.names[scorer] for scorer in REQUIRED_SCORERS)
        return [
            f"speech evaluation: {items} items of {speakers} speakers choose the best checkpoint, {confirming} others "
            f"confirm its gain{forgetting}, scored by {scorers}",
            *self.eval_set.notes,
            *(self.forgetting_set.notes if self.forgetting_set is not None else ()),
        ]

    def restore(self, step: int) -> None:
        remove_temporary_files(self.folder)
        self.steps = {}
        for folder in sorted(self.folder.glob("step-*")):
            number = int(folder.name.removeprefix("step-"))
            if number > step or not (folder / pipeline.ITEMS_FILE).is_file():
                continue
            was_best = (folder / "confirmation" / pipeline.ITEMS_FILE).is_file()
            self.steps[number] = ranking.StepScores(
                number,
                self._restore_rows(self.eval_set, folder),
                self._restore_rows(self.forgetting_set, folder / "forgetting"),
                self._restore_rows(self.confirmation_set if was_best else None, folder / "confirmation"),
            )
        if self.steps and (self.folder / "real" / pipeline.ITEMS_FILE).is_file():
            self.recordings = pipeline.read_item_scores(self.folder / "real" / pipeline.ITEMS_FILE)

    def run(self, step: int, model: nn.Module, autocast: AutocastContext) -> SpeechScores:
        codec = self.codec or self.family.load_codec(device=self.device)
        engine = Engine(
            self.family, model, codec, reference_placement=self.recipe.data.reference_placement, autocast=autocast
        )
        folder = self.folder / pipeline.step_folder(step)
        rows = self._score(self.eval_set, self._system(engine), folder)
        forgetting = self._score(self.forgetting_set, self._system(engine), folder / "forgetting")
        self.steps[step] = ranking.StepScores(step, rows, forgetting)
        if step == 0:
            self.recordings = self._score(self.eval_set, Recordings(REAL, codec.sample_rate), self.folder / "real")
        samples = self._spectrograms(rows, folder, codec.sample_rate)
        if not self.recipe.evaluates_speech:
            save_text(self.folder / "report.html", samples_page(self.history, self.folder))
            return SpeechScores({}, is_best=False, samples=samples)
        best = self.history.best_step
        if step in (0, best):
            confirmation = self._score(self.confirmation_set, self._system(engine), folder / "confirmation")
            self.steps[step] = replace(self.steps[step], confirmation=confirmation)
            self._spectrograms(confirmation, folder / "confirmation", codec.sample_rate)
        history = self.history
        save_text(self.folder / "report.html", training_page(history, self.folder))
        checkpoint = next(one for one in history.checkpoints if one.step == step)
        return SpeechScores(checkpoint.to_json(best), best == step, history.is_highest, samples)

    def summarize(self) -> Sequence[str]:
        conclusion = ranking.training_conclusion(self.history) if self.recipe.evaluates_speech else []
        return [*conclusion, f"listen to it: {self.folder / 'report.html'}"]

    def _system(self, engine: Engine) -> SpeechSystem:
        seed = self.recipe.speech_eval.seed
        return SpeechSystem(SPOKEN, lambda: engine, seed, {}, Engine.trainable_fingerprint, self._references)

    def _score(self, eval_set: EvalSet | None, system: System, folder: Path) -> list[scoring.ItemScores]:
        if eval_set is None:
            return []
        size = self.recipe.speech_eval.batch_size
        rows = pipeline.score_systems(eval_set, [system], self.scorers, folder, batch_size=size, progress=self.progress)
        return rows[system.name]

    def _restore_rows(self, eval_set: EvalSet | None, folder: Path) -> list[scoring.ItemScores]:
        """Read the scores of a step; they must come from the scorers and items that are used now, to be comparable."""
        if eval_set is None:
            return []
        rows = (
            pipeline.read_item_scores(folder / pipeline.ITEMS_FILE) if (folder / pipeline.ITEMS_FILE).is_file() else []
        )
        for scorer, name in self.scorers.names.items():
            # The name of a speaker encoder is followed by a hash of the clips it was compared with.
            models = {getattr(row, f"{scorer}_model") for row in rows} - {"", name}
            if others := [model for model in models if not model.startswith(f"{name} ")]:
                raise TrainingError(
                    f"{folder} was scored by {min(others)}, and now {name} would score",
                    hint="go on with the scorers that the run began with, or start a run of its own",
                )
        if {row.id: row.text for row in rows} != {item.id: item.text for item in eval_set.items}:
            raise TrainingError(
                f"{folder} has other items than would be spoken now",
                hint="go on with the items that the run began with, or start a run of its own",
            )
        return rows

    def _spectrograms(self, rows: Sequence[scoring.ItemScores], folder: Path, sample_rate: int) -> list[LoggedSample]:
        """Write spectrograms of all items; return the first ones, with their audio, for the trackers."""
        logged = []
        for index, row in enumerate(rows):
            if row.audio:
                samples = pipeline.load_audio(row, folder, sample_rate)
                pixels = page.mel_spectrogram_pixels(samples, sample_rate)
                with atomic_write(folder / "spectrograms" / f"{safe_file_name(row.id)}.png") as temporary:
                    temporary.write_bytes(page.encode_png(pixels))
                if index < TRACKED_ITEMS:
                    logged.append(LoggedSample(row.id, samples, sample_rate, page.color_palette()[pixels]))
        return logged


def open_required_scorers(settings: SpeechEvalSettings) -> scoring.Scorers:
    """Open the scorers that the ranking rule needs, and no others, since each takes time at every evaluation."""
    scorers = scoring.Scorers.open(settings.asr, settings.speaker_encoder)
    lacking = [f"{scorer}: {scorers.missing[scorer]}" for scorer in REQUIRED_SCORERS if scorer in scorers.missing]
    if lacking:
        raise ConfigError(
            "`speech_eval.asr` asks for scorers that are not here: " + "; ".join(lacking),
            hint="myna setup metrics, or install what is named; or only keep samples, without scores: "
            "--set speech_eval.asr=null",
        )
    names = {scorer: scorers.names[scorer] for scorer in REQUIRED_SCORERS}
    return replace(scorers, dnsmos=None, names=names, missing={})


def training_page(history: ranking.TrainingHistory, folder: Path) -> str:
    """Render the speech evaluations of a training run; `folder` holds a folder for each step, and `real`."""
    title = f"{history.name}, speech evaluations during training"
    best, checkpoints = history.best_step, history.checkpoints
    points = [(float(one.step), one.score.mean) for one in checkpoints if one.score.mean is not None]
    quality = f", and a DistillMOS of {history.min_mos:.2f}" if history.min_mos is not None else ""
    forgets = any(one.forgetting_change.n for one in checkpoints)
    titles = [metric.title for metric in ranking.SHOWN_METRICS]
    header = ["", "score", "over the base", "over the base, on items that chose nothing", *titles, "ASR loops"]
    header += [*(["forgetting set"] if forgets else []), ""]
    shown = best if best is not None else checkpoints[-1].step
    sections = [
        page.heading(title, 1),
        *(page.paragraph(f"{text[0].upper()}{text[1:]}.", "lead") for text in ranking.training_conclusion(history)),
        page.heading("Step by step"),
        page.paragraph(ranking.RULE),
        page.paragraph(
            f"Required of the best: the end of {history.constraints.min_stop_rate:.0%} of the items{quality}.", "note"
        ),
        page.table("Scores at each step", header, [_step_row(one, best, forgets) for one in checkpoints]),
        page.line_plot(
            [page.Curve("score", points, "dots")], title="The score over the steps", x_label="steps", y_label="score"
        ),
        page.heading("Listen"),
        *_step_items(history, shown, folder),
        page.footer(BESIDE),
    ]
    return page.render_page(title, sections)


def samples_page(history: ranking.TrainingHistory, folder: Path) -> str:
    """Render what was spoken without being scored: by the base model, in the middle and at the latest step."""
    title, middle = f"{history.name}, speech during training", history.steps[len(history.steps) // 2].step
    lead = "The same sentences at each step. Nothing is scored: `speech_eval.asr` would rank the checkpoints."
    items = _step_items(history, middle, folder)
    return page.render_page(title, [page.heading(title, 1), page.paragraph(lead, "lead"), *items, page.footer(BESIDE)])


def _step_row(one: ranking.CheckpointScore, best: int | None, forgets: bool) -> list[page.Cell]:
    """Show a checkpoint; the base model is only compared with."""
    is_base = one.step == 0
    confirmed = ranking.SCORE.format_estimate(one.confirmed_gain, signed=True) if one.confirmed_gain.n else "not spoken"
    row: list[page.Cell] = [
        ranking.step_name(one.step),
        ranking.SCORE.format_estimate(one.score),
        "" if is_base else ranking.SCORE.format_estimate(one.gain, signed=True),
        "" if is_base else confirmed,
        *(metric.format(one.metrics[metric.key]) for metric in ranking.SHOWN_METRICS),
        str(one.looped),
    ]
    if forgets:
        row.append("" if is_base else ranking.SCORE.format_estimate(one.forgetting_change, signed=True))
    verdict = page.cell("the best", "good") if one.step == best else page.cell("; ".join(one.violations), "bad")
    return [*row, "" if is_base else verdict]


def _step_items(history: ranking.TrainingHistory, shown: int, folder: Path) -> list[page.Section]:
    """Show some items: as recorded, by the base model, and at the best and the latest step."""
    steps = dict.fromkeys((history.steps[0].step, shown, history.steps[-1].step))
    rows = {REAL: {row.id: row for row in history.recordings}}
    rows |= {
        ranking.step_name(one.step): {row.id: row for row in one.rows} for one in history.steps if one.step in steps
    }
    folders = {REAL: folder / "real"} | {ranking.step_name(step): folder / pipeline.step_folder(step) for step in steps}
    order = [REAL, *map(ranking.step_name, steps)]
    return [
        pipeline.item_section(
            row,
            {name: rows[name][row.id] for name in order if row.id in rows[name]},
            folders,
            lambda row: [f"score {ranking.item_score(row):.2f}: “{row.transcript}”"] if row.asr_model else [],
        )
        for row in history.steps[0].rows[:SHOWN_STEP_ITEMS]
    ]
