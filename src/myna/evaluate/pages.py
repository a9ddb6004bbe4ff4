"""HTML report of an evaluation, without a network: diagnoses, metrics, and the worst items with players."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup

from myna.audio.files import read_audio
from myna.core.statistics import CONFIDENCE_LEVEL, Estimate
from myna.evaluate.evaluation import GROUPED_METRICS, Evaluation
from myna.evaluate.metrics import METRICS, METRICS_BY_KEY, Metric, MetricEstimates
from myna.evaluate.pipeline import load_audio, saved_references
from myna.evaluate.scoring import ItemScores
from myna.evaluate.systems import BASE, REAL, ROUND_TRIP, system_title
from myna.report.document import html_document, render_template
from myna.report.markup import element, join_html
from myna.report.player import audio_figure
from myna.report.plot import Curve, line_plot

SHOWN_ITEMS = 20
"""Items with players. A page with a thousand would not open; the audio of all lies beside it."""
PLAYER_SAMPLE_RATE = 24_000
HISTOGRAM_BINS = 24
HISTOGRAMS = ("cer", "similarity", "distillmos", "speaking_rate", "pitch")


def evaluation_page(evaluation: Evaluation) -> str:
    rows = worst_first(evaluation.rows[evaluation.system])
    by_id = {system: {row.id: row for row in of} for system, of in evaluation.rows.items()}
    items = evaluation.eval_set.items
    speakers = len({item.speaker for item in items if item.speaker})
    body = render_template(
        "evaluate/report.html",
        evaluation=evaluation,
        items=items,
        speakers=speakers if speakers > 1 else "one",
        has_base=BASE in evaluation.estimates,
        confidence=CONFIDENCE_LEVEL,
        metrics=METRICS_BY_KEY,
        scores=metrics_table(evaluation.estimates, "Scores by system", keep_empty=True),
        missing=missing_notes(evaluation.missing, "measured"),
        deltas=metrics_table(evaluation.differences, "Differences from the base", differences=True),
        group_metrics=[metric for metric in GROUPED_METRICS if _is_measured(evaluation, metric.key)],
        format_estimate=Metric.format_estimate,
        histograms=[
            (METRICS_BY_KEY[key].title, _histogram(evaluation, METRICS_BY_KEY[key]))
            for key in HISTOGRAMS
            if _is_measured(evaluation, key)
        ],
        sections=[
            item_section(row, {system: of[row.id] for system, of in by_id.items() if row.id in of}, evaluation.folder)
            for row in rows[:SHOWN_ITEMS]
        ],
        rows=rows,
        system_title=system_title,
        defects=_defects,
        seen=_seen,
    )
    return html_document(f"Evaluation of {evaluation.system}", body)


def format_difference(metric: Metric, figure: Estimate) -> Markup:
    """A difference, in colour where it goes beyond its interval."""
    color = None
    if figure.excludes_zero and figure.mean is not None:
        color = {True: "good", False: "bad", None: None}[metric.is_improvement(figure.mean)]
    return element("span", metric.format_estimate(figure, signed=True), class_=color)


def worst_first(rows: Sequence[ItemScores]) -> list[ItemScores]:
    """Items with the most defects, then with the highest character error rate, then with the lowest similarity."""

    def badness(row: ItemScores) -> tuple[float, ...]:
        wrong = row.character_errors / row.characters if row.characters and row.character_errors is not None else 0.0
        return (-len(_defects(row)), -wrong, row.similarity if row.similarity is not None else 1.0)

    return sorted(rows, key=badness)


def metrics_table(
    systems: Mapping[str, MetricEstimates],
    caption: str,
    metrics: Sequence[Metric] = METRICS,
    *,
    differences: bool = False,
    keep_empty: bool = False,
) -> Markup:
    """Metrics by system, or their differences from a base; rows without any value only with `keep_empty`."""
    rows = [(metric, [of.get(metric.key, Estimate()) for of in systems.values()]) for metric in metrics]
    rows = [row for row in rows if keep_empty or any(estimate.n for estimate in row[1])]
    body = render_template(
        "evaluate/metrics_table.html",
        rows=rows,
        titles=[system_title(system) for system in systems],
        caption=caption,
        differences=differences,
        format=format_difference if differences else Metric.format_estimate,
    )
    return body if rows else Markup()


def missing_notes(missing: Mapping[str, str], verb: str) -> list[Markup]:
    """Each reason once, with all metrics that it explains."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in missing.items():
        title = METRICS_BY_KEY[key].title if key in METRICS_BY_KEY else system_title(key)
        by_reason.setdefault(reason, []).append(title)
    return [
        element("p", f"{', '.join(titles)}: not {verb}. {reason}", class_="missing")
        for reason, titles in by_reason.items()
    ]


def _is_measured(evaluation: Evaluation, key: str) -> bool:
    return evaluation.estimates[evaluation.system][key].n > 0


def _histogram(evaluation: Evaluation, metric: Metric) -> Markup:
    """How many items have which value, one outline for each system."""
    colors = {REAL: 5, evaluation.system: 0, BASE: 1, ROUND_TRIP: 2}
    values = {
        name: [part.numerator / part.denominator for row in rows if (part := metric.ratio(row)) and part.denominator]
        for name, rows in evaluation.rows.items()
        if name in colors
    }
    everything = [value for of in values.values() for value in of]
    low, high = min(everything), max(everything)
    if high - low < 1e-6 * max(1.0, abs(high)):  # all alike: no bins fit between them
        low, high = low - 0.5, high + 0.5
    curves = []
    for name, of in values.items():
        counts, edges = np.histogram(of, HISTOGRAM_BINS, (low, high))
        outline = zip(np.repeat(edges, 2).tolist(), [0.0, *np.repeat(counts, 2).tolist(), 0.0], strict=True)
        style = "faint" if name == REAL else "line"
        curves.append(Curve(system_title(name), list(outline), style, colors[name]))  # type: ignore[arg-type]
    return line_plot(curves, title=metric.title, x_label=metric.description, y_label="items")


def item_section(
    row: ItemScores,
    outputs: Mapping[str, ItemScores],
    out: Path | Mapping[str, Path],
    note: Callable[[ItemScores], object] | None = None,
) -> Markup:
    """One item as every system speaks it, on one time scale; `out` is the results folder, or that of each system."""
    max_seconds = max(output.seconds for output in outputs.values())
    references = saved_references(out / row.audio) if isinstance(out, Path) and row.audio else []
    figures = [_reference_figure(recording, row.id) for recording in references]
    figures += [
        audio_figure(
            load_audio(output, out if isinstance(out, Path) else out[system], PLAYER_SAMPLE_RATE),
            PLAYER_SAMPLE_RATE,
            title=system_title(system),
            label=f"{row.id}, {system_title(system)}",
            max_seconds=max_seconds,
            note=(note or _note)(output),
        )
        for system, output in outputs.items()
    ]
    return render_template("evaluate/item.html", row=row, figures=figures)


def _reference_figure(recording: Path, item: str) -> Markup:
    samples = read_audio(recording, sample_rate=PLAYER_SAMPLE_RATE)
    title = recording.stem.rpartition("+")[2]
    return audio_figure(
        samples,
        PLAYER_SAMPLE_RATE,
        title=title,
        label=f"{item}, {title}",
        max_seconds=len(samples) / PLAYER_SAMPLE_RATE,
    )


def _note(row: ItemScores) -> Markup:
    parts: list[object] = [element("span", defect, class_="bad") for defect in _defects(row)]
    if seen := _seen(row):
        parts.append(element("span", seen, class_="bad"))
    if row.similarity is not None:
        parts.append(f"similarity {row.similarity:.2f}")
    if row.distillmos is not None:
        parts.append(f"DistillMOS {row.distillmos:.2f}")
    if row.transcript is not None:
        errors = f"{row.word_errors} of {row.words} words wrong: “{row.transcript}”"
        parts.append(errors if row.word_errors else "every word")
    return join_html(parts, " · ")


def _seen(row: ItemScores) -> str:
    trained = {"audio": "trained on", "words": "its words were trained on"}.get(row.trained_on or "", "")
    return trained or ("chose the checkpoint" if row.chose_checkpoint else "")


def _defects(row: ItemScores) -> list[str]:
    defects = (
        (row.silent, "silent"),
        (row.stopped is False, "cut: it found no end"),
        (row.ended_early, "ends early"),
        (row.speaks_prompt, "the reference's words"),
        (row.looped, "the ASR loops"),
        (row.repeats, "says something twice"),
    )
    return [text for is_present, text in defects if is_present]
