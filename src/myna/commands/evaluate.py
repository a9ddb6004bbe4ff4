"""`myna evaluate` and `myna compare`: how well systems speak, in figures and by ear."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack

from myna.commands import options as opt
from myna.commands.display import call_with_bars, show, show_json, show_table, show_warnings
from myna.commands.options import Call, PathLike, command, option
from myna.core.errors import ConfigError
from myna.core.progress import ProgressCallback, silent

if TYPE_CHECKING:
    from myna.evaluate.comparison import Comparison
    from myna.evaluate.evaluation import Evaluation, EvaluationSettings
    from myna.evaluate.listening import PreferenceCount, Preferences


class EvaluationOptions(TypedDict, total=False):
    """Options that `evaluate` and `compare` share; `EvaluationSettings` has their defaults."""

    data: Annotated[PathLike | None, option("Prepared folder; by default the held-out data of the (first) run.")]
    sentences: Annotated[PathLike | None, option("Text file, a sentence a line, or a list in seed-tts-eval format.")]
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
    against: Annotated[Sequence[str], option("Run or model to compare with; NAME=RUN names it; repeatable.")] = (),
    out: Annotated[PathLike | None, option("Folder; RUN/evaluation or evaluations/NAME by default.", "-o")] = None,
    strength: opt.Strength = 1.0,
    progress: ProgressCallback = silent,
    **options: Unpack[EvaluationOptions],
) -> Evaluation:
    """Evaluate speech: words, speaker similarity, quality and stopping, beside real recordings and the untuned base.

    Writes evaluation.json, items.parquet and report.html. Called again after a stop, or with another ASR, it does only
    what is missing. Into a folder that holds anything but an evaluation it writes only with `force`.
    """
    from myna.evaluate import evaluation, model_card

    name, folder, settings = os.fspath(subject), Path(out) if out is not None else None, _settings(options)
    made = evaluation.evaluate_system(
        name, settings, against=tuple(against), out=folder, strength=strength, progress=progress
    )
    if made.run is not None:
        model_card.write_run_card(made.run)
    return made


@command("evaluate", evaluate, example="myna evaluate runs/marta --asr base")
def _(call: Call[Evaluation], *, as_json: opt.Json = False) -> None:
    evaluation = call_with_bars(call)
    show(*evaluation.notes, stderr=True)
    if as_json:
        show_warnings(evaluation.warnings, stderr=True)
        show_json(evaluation.to_json())
        return
    _show_metrics(evaluation)
    show(*evaluation.unmeasured())
    show(*(f"{diagnosis.name}: {diagnosis.text}" for diagnosis in evaluation.diagnoses), style="yellow")
    show(f"Open {evaluation.folder / 'report.html'}")


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
    call: Call[Comparison],
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
        comparison = call_with_bars(call)
        folder = comparison.folder
        if not as_json:
            _show_metrics(comparison)
            show(*comparison.unmeasured("compared"), *comparison.notes)
            show(f"Open {folder / 'compare.html'} to listen without knowing who it is,")
            show(f"or have answers saved: myna compare {folder} --serve")
    else:
        _show_preferences(compared.add_preferences(folder, [Path(file) for file in preferences]), stderr=as_json)
    if serve:
        compared.serve_comparison(folder, port, show)
        _show_preferences(compared.add_preferences(folder, []))
    if as_json:
        print((folder / compared.COMPARISON_FILE).read_text(encoding="utf-8"), end="")


def _settings(options: EvaluationOptions) -> EvaluationSettings:
    from myna.evaluate.evaluation import EvaluationSettings

    values: dict[str, Any] = dict(options)
    paths = {key: Path(values[key]) for key in ("data", "sentences") if values.get(key) is not None}
    return EvaluationSettings(**{**values, **paths})


def _show_metrics(results: Evaluation | Comparison) -> None:
    """Print warnings, then the metrics of each system that has items: sentences have no recordings."""
    from myna.evaluate import metrics

    show_warnings(results.warnings)
    rows, measured = [], {name: found for name, found in results.estimates.items() if results.rows[name]}
    for metric in metrics.METRICS:
        estimates = [found.get(metric.key) for found in measured.values()]
        if any(estimate is not None and estimate.n for estimate in estimates):
            rows.append([metric.title, *(metric.format_estimate(value) if value else "" for value in estimates)])
    show_table(["", *map(metrics.system_title, measured)], rows)


def _show_preferences(preferences: Preferences, *, stderr: bool = False) -> None:
    """Print the preferences of listeners, by item and for each pair of systems."""
    if not preferences.items:
        show("There are no answers of listeners yet.", stderr=stderr)
    show(*(f"{name}: {answers} answers" for name, answers in preferences.listeners), stderr=stderr)
    if preferences.not_counted:
        show(f"{preferences.not_counted} answers are about sounds that are not here, and do not count", stderr=stderr)
    if preferences.items:
        rows = [(item, *_wins_and_interval(count)) for item, count in preferences.items]
        show_table(["item", "preferred", "interval"], rows, stderr=stderr)
    for pair in preferences.pairs:
        wins, interval = _wins_and_interval(pair)
        verdict = f"{pair.preferred} is preferred" if pair.preferred else "no preference can be told"
        if pair.decided:
            show(f"{wins}; {interval}, p = {pair.p_value:.3g}: {verdict}", stderr=stderr)
        else:
            show(f"{' and '.join(pair.systems)}: no answer prefers one" + _ties(pair), stderr=stderr)


def _wins_and_interval(count: PreferenceCount) -> tuple[str, str]:
    wins = ", ".join(f"{name} {wins}" for name, wins in zip(count.systems, count.wins, strict=True))
    low, high = count.interval
    share = f"{count.share:.0%}" if count.share is not None else "nothing"
    return wins + _ties(count), f"{count.systems[0]} {share} [{100 * low:.0f}, {100 * high:.0f}]"


def _ties(count: PreferenceCount) -> str:
    return f", no difference {count.ties}" if count.ties else ""
