"""`myna evaluate` and `myna compare`: how well systems speak, in figures and by ear."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack

from rich.console import Console
from rich.table import Table

from myna.commands import options as opt
from myna.commands.command import command
from myna.commands.display import console, progress_bars, show_notes, show_warnings
from myna.commands.options import PathLike, option
from myna.core.errors import ConfigError
from myna.core.progress import ProgressCallback, silent

if TYPE_CHECKING:
    from myna.evaluate.comparison import Comparison
    from myna.evaluate.evaluation import Evaluation, EvaluationSettings
    from myna.evaluate.listening import PreferenceCount, Preferences


class EvaluationOptions(TypedDict, total=False):
    """Options that `evaluate` and `compare` share; `EvaluationSettings` has their defaults."""

    data: Annotated[PathLike | None, option("Prepared folder; by default the held-out data of the (first) run.")]
    sentences: Annotated[PathLike | None, option("Text file, a sentence a line; or a list as of seed-tts-eval.")]
    asr: opt.ASR
    speaker_encoder: opt.SpeakerEncoder
    language: opt.Language
    model: opt.BaseModel
    limit: opt.Limit
    seed: opt.Seed
    batch_size: opt.BatchSize
    device: opt.Device
    force: opt.Force


def evaluate(
    subject: Annotated[PathLike, option("A run folder, or the hub name or folder of an adapter or of a model.")],
    *,
    against: Annotated[Sequence[str], option("Another run or model, or NAME=IT; repeatable.")] = (),
    out: Annotated[PathLike | None, option("Folder; RUN/evaluation or evaluations/NAME by default.", "-o")] = None,
    strength: opt.Strength = 1.0,
    progress: ProgressCallback = silent,
    **options: Unpack[EvaluationOptions],
) -> Evaluation:
    """Evaluate speech: words, speaker similarity, quality and stopping, beside real recordings and the untuned base.

    Writes evaluation.json, items.parquet and report.html. Called again after a stop, or with another ASR, it does only
    what is missing. Into a folder that holds anything but an evaluation it writes only with `force`.
    """
    from myna.evaluate.evaluation import evaluate_system
    from myna.evaluate.model_card import write_run_card

    folder = Path(out) if out is not None else None
    settings = _settings(options)
    evaluation = evaluate_system(
        os.fspath(subject), settings, against=tuple(against), out=folder, strength=strength, progress=progress
    )
    if evaluation.run is not None:
        write_run_card(evaluation.run)
    return evaluation


@command("evaluate", evaluate, example="myna evaluate runs/marta --asr base")
def _(call: Callable[..., Evaluation], *, as_json: opt.Json = False) -> None:
    with progress_bars() as progress:
        evaluation = call(progress=progress)
    show_notes(evaluation.notes, console(stderr=True))
    if as_json:
        show_warnings(evaluation.warnings, console(stderr=True))
        print(json.dumps(evaluation.to_json(), indent=2, ensure_ascii=False))
        return
    _show_metrics(evaluation, console())
    show_notes([f"{key}: not measured. {reason}" for key, reason in evaluation.missing.items()], console())
    for diagnosis in evaluation.diagnoses:
        console().print(f"{diagnosis.name}: {diagnosis.text}", style="yellow", markup=False, highlight=False)
    show_notes([f"Open {evaluation.folder / 'report.html'}"], console())


def compare(
    subjects: Annotated[
        Sequence[PathLike],
        option("Runs, adapters, models or folders of evaluations, or NAME=IT; or one folder that this has made."),
    ],
    *,
    out: Annotated[PathLike | None, option("Folder; comparisons/NAMES by default.", "-o")] = None,
    trials: Annotated[int, option("Sentences to hear blindly, of those compared.", least=1)] = 20,
    progress: ProgressCallback = silent,
    **options: Unpack[EvaluationOptions],
) -> Comparison:
    """Compare two or more systems on the same sentences: metrics with paired differences, and a page for blind
    listening.

    Writes compare.json and compare.html, which opens without a network: A or B by a key, names at the end, answers
    saved as a file. What `myna evaluate` has generated and scored of a run is reused. A folder of an evaluation is
    taken as it is: `runs/marta/evaluation`, and `runs/marta/evaluation:base` for the untuned model beside it.
    """
    from myna.evaluate.comparison import compare_systems

    names, folder = [os.fspath(one) for one in subjects], Path(out) if out is not None else None
    return compare_systems(names, _settings(options), out=folder, trials=trials, progress=progress)


@command("compare", compare, example="myna compare runs/marta runs/again -o marta-again")
def _(
    call: partial[Comparison],
    *,
    preferences: Annotated[Sequence[PathLike], option("Answers that the page saved; repeatable.")] = (),
    serve: Annotated[bool, option("Give the page to browsers on this machine and save their answers.")] = False,
    port: Annotated[int, option("Port of --serve; 0 is any free one.", least=0, most=65535)] = 8765,
    as_json: opt.Json = False,
) -> None:
    """`myna compare marta-again --preferences anna.json --preferences ben.json` adds up the answers of listeners.
    `myna compare marta-again --serve` saves answers as they are given."""
    from myna.evaluate import comparison as compared

    subjects = call.keywords["subjects"]
    folder = Path(subjects[0])
    if len(subjects) > 1 or not compared.is_comparison(folder):
        if preferences:
            raise ConfigError(
                "preferences belong to a comparison that is made already",
                hint="myna compare FOLDER --preferences FILE, where FOLDER holds compare.json",
            )
        with progress_bars() as progress:
            comparison = call(progress=progress)
        folder = comparison.folder
        if not as_json:
            _show_comparison(comparison, console())
    else:
        files = [Path(file) for file in preferences]
        _show_preferences(compared.add_preferences(folder, files), console(stderr=as_json))
    if serve:
        compared.serve_comparison(folder, port, lambda message: show_notes([message], console()))
        _show_preferences(compared.add_preferences(folder, []), console())
    if as_json:
        print((folder / compared.COMPARISON_FILE).read_text(encoding="utf-8"), end="")


def _settings(options: EvaluationOptions) -> EvaluationSettings:
    from myna.evaluate.evaluation import EvaluationSettings

    values: dict[str, Any] = dict(options)
    paths = {key: Path(values[key]) for key in ("data", "sentences") if values.get(key) is not None}
    return EvaluationSettings(**{**values, **paths})


def _show_metrics(results: Evaluation | Comparison, console: Console) -> None:
    """Print warnings, then the metrics of each system."""
    from myna.evaluate.metrics import METRICS
    from myna.evaluate.systems import system_title

    show_warnings(results.warnings, console)
    table = Table("", *map(system_title, results.estimates))
    for metric in METRICS:
        estimates = [metrics.get(metric.key) for metrics in results.estimates.values()]
        if any(estimate is not None and estimate.n for estimate in estimates):
            table.add_row(metric.title, *(metric.format_estimate(value) if value else "" for value in estimates))
    console.print(table)


def _show_comparison(comparison: Comparison, console: Console) -> None:
    """Print metrics side by side, those that cannot be compared, and where the page is."""
    _show_metrics(comparison, console)
    show_notes([f"{key}: not compared. {reason}" for key, reason in comparison.missing.items()], console)
    listen = f"Open {comparison.folder / 'compare.html'} to listen without knowing who it is,"
    save = f"or have answers saved: myna compare {comparison.folder} --serve"
    show_notes([*comparison.notes, listen, save], console)


def _show_preferences(preferences: Preferences, console: Console) -> None:
    """Print the preferences of listeners, by item and for each pair of systems."""
    if not preferences.items:
        console.print("There are no answers of listeners yet.")
    show_notes([f"{name}: {answers} answers" for name, answers in preferences.listeners], console)
    if preferences.not_counted:
        console.print(f"{preferences.not_counted} answers are about sounds that are not here, and do not count")
    if preferences.items:
        table = Table("item", "preferred", "interval")
        for item, count in preferences.items:
            table.add_row(item, _wins(count), _preference_interval(count))
        console.print(table)
    show_notes([_verdict(pair) for pair in preferences.pairs], console)


def _verdict(pair: PreferenceCount) -> str:
    if not pair.decided:
        return f"{' and '.join(pair.systems)}: no answer prefers one" + _ties(pair)
    verdict = f"{pair.preferred} is preferred" if pair.preferred else "no preference can be told"
    return f"{_wins(pair)}; {_preference_interval(pair)}, sign test p = {pair.p_value:.3g}: {verdict}"


def _wins(count: PreferenceCount) -> str:
    return ", ".join(f"{name} {wins}" for name, wins in zip(count.systems, count.wins, strict=True)) + _ties(count)


def _ties(count: PreferenceCount) -> str:
    return f", no difference {count.ties}" if count.ties else ""


def _preference_interval(count: PreferenceCount) -> str:
    low, high = count.interval
    share = f"{count.share:.0%}" if count.share is not None else "nothing"
    return f"{count.systems[0]} {share} [{100 * low:.0f}, {100 * high:.0f}]"
