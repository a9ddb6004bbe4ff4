"""HTML report of an evaluation, without a network: diagnoses, metrics, and the worst items with players."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup

from myna.evaluate.evaluation import GROUPED_METRICS, Evaluation, MetricEstimates
from myna.evaluate.metrics import METRICS, METRICS_BY_KEY, Metric
from myna.evaluate.pipeline import load_audio
from myna.evaluate.scoring import ItemScores
from myna.evaluate.systems import BASE, REAL, ROUND_TRIP
from myna.report.document import html_document
from myna.report.markup import element, html_table, join_html
from myna.report.player import audio_figure
from myna.report.plot import Curve, line_plot
from myna.statistics import CONFIDENCE_LEVEL, Estimate

SHOWN_ITEMS = 20
"""Items with players. A page with a thousand would not open; the audio of all lies beside it."""
PLAYER_SAMPLE_RATE = 24_000
HISTOGRAM_BINS = 24
HISTOGRAMS = ("cer", "similarity", "distillmos", "speaking_rate", "pitch")
NOT_APPLICABLE = "nothing to measure"
"""Where a scorer is missing, the reason stands below; elsewhere the metric does not apply: recordings find no end."""
SYSTEM_TITLES = {REAL: "real recording", ROUND_TRIP: "real, through the codec", BASE: "untuned base"}


def evaluation_page(evaluation: Evaluation) -> str:
    return html_document(
        f"Evaluation of {evaluation.system}",
        element("h1", f"{evaluation.system}, speech evaluation"),
        element("p", _lead(evaluation), class_="lead"),
        _diagnoses(evaluation),
        element("h2", "Scores"),
        _scores(evaluation),
        *_deltas(evaluation),
        *_groups(evaluation),
        element("h2", "Distribution over the items"),
        *(_histogram(evaluation, METRICS_BY_KEY[key]) for key in HISTOGRAMS if _is_measured(evaluation, key)),
        element("h2", "Listen, the worst items first"),
        *_worst_items(evaluation),
        element("h2", "All items"),
        _all_items(evaluation),
        element("footer", element("p", _footer(evaluation))),
    )


def system_title(system: str) -> str:
    return SYSTEM_TITLES.get(system, system)


def format_estimate(metric: Metric, figure: Estimate, *, signed: bool = False) -> str:
    """A mean with its interval."""
    if figure.mean is None:
        return NOT_APPLICABLE
    low, high = (metric.format(value, signed=signed).removesuffix(" %") for value in (figure.low, figure.high))
    return f"{metric.format(figure.mean, signed=signed)} [{low}, {high}]"


def format_difference(metric: Metric, figure: Estimate) -> Markup:
    """A difference, in colour where it goes beyond its interval."""
    color = None
    if figure.excludes_zero and figure.mean is not None:
        color = {True: "good", False: "bad", None: None}[metric.is_improvement(figure.mean)]
    return element("span", format_estimate(metric, figure, signed=True), class_=color)


def worst_first(rows: Sequence[ItemScores]) -> list[ItemScores]:
    """Items with the most defects, then with the highest character error rate, then with the lowest similarity."""

    def badness(row: ItemScores) -> tuple[float, ...]:
        wrong = row.character_errors / row.characters if row.characters and row.character_errors is not None else 0.0
        return (-len(_defects(row)), -wrong, row.similarity if row.similarity is not None else 1.0)

    return sorted(rows, key=badness)


def _lead(evaluation: Evaluation) -> str:
    items = evaluation.scores.eval_set.items
    count = len({item.speaker for item in items if item.speaker})
    speakers = f"{count} speakers" if count > 1 else "one speaker"
    base = ", by its base" if BASE in evaluation.estimates else ""
    return (
        f"{len(items)} items of {speakers}, spoken by the model{base} and by the people themselves where there are "
        f"recordings. Every mean has an interval that holds {CONFIDENCE_LEVEL:.0%} of what other draws "
        "of such items would give. It is over items: other speakers may differ by more."
    )


def _diagnoses(evaluation: Evaluation) -> Markup:
    notes = [element("p", note, class_="note") for note in evaluation.notes]
    if not evaluation.diagnoses:
        return join_html((element("p", "None of the defects that are looked for was found."), *notes))
    cards = []
    for diagnosis in evaluation.diagnoses:
        first = f" First: {', '.join(diagnosis.items[:5])}." if diagnosis.items else ""
        metric = METRICS_BY_KEY.get(diagnosis.metric)
        cards.append(
            element(
                "section",
                element("h3", f"{system_title(diagnosis.system)}: {diagnosis.name}", class_="bad"),
                element("p", f"{diagnosis.text}.{first}"),
                element("p", f"Seen in: {metric.title if metric else 'differences from the base'}", class_="note"),
                class_="card",
            )
        )
    return join_html((element("h2", "What is wrong"), *cards, *notes))


def _scores(evaluation: Evaluation) -> Markup:
    table = metrics_table(evaluation.estimates, "Scores by system", keep_empty=True)
    return join_html((table, *missing_notes(evaluation.missing, "measured")))


def metrics_table(
    systems: Mapping[str, MetricEstimates],
    caption: str,
    metrics: Sequence[Metric] = METRICS,
    *,
    differences: bool = False,
    keep_empty: bool = False,
) -> Markup:
    """Metrics by system, or their differences from a base; rows without any value only with `keep_empty`."""
    rows: list[list[object]] = []
    for metric in metrics:
        estimates = [of.get(metric.key, Estimate()) for of in systems.values()]
        if not keep_empty and not any(estimate.n for estimate in estimates):
            continue
        if differences:
            title: object = metric.title + (" (points)" if metric.is_share else "")
            rows.append([title, *(format_difference(metric, estimate) for estimate in estimates)])
        else:
            title = join_html((metric.title, element("div", metric.description, class_="note")))
            rows.append([title, *(format_estimate(metric, estimate) for estimate in estimates)])
    return html_table(["", *map(system_title, systems)], rows, caption=caption) if rows else Markup()


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


def _deltas(evaluation: Evaluation) -> list[Markup]:
    if not evaluation.deltas:
        return []
    return [
        element("h2", "Against the untuned base, on the same items"),
        metrics_table(evaluation.deltas, "Differences from the base", differences=True),
        element("p", "In colour: what differs beyond its interval.", class_="note"),
    ]


def _groups(evaluation: Evaluation) -> list[Markup]:
    metrics = [metric for metric in GROUPED_METRICS if _is_measured(evaluation, metric.key)]
    tables = []
    for kind, groups in evaluation.groups.items():
        rows = []
        for group, systems in groups.items():
            estimates = systems[evaluation.system]
            count = max(estimate.n for estimate in estimates.values())
            rows.append([group, str(count), *(format_estimate(metric, estimates[metric.key]) for metric in metrics)])
        if rows:
            header = [kind, "items", *(metric.title for metric in metrics)]
            caption = f"Scores of {evaluation.system} by {kind}"
            tables += [element("h2", f"By {kind}"), html_table(header, rows, caption=caption)]
    return tables


def _is_measured(evaluation: Evaluation, key: str) -> bool:
    return evaluation.estimates[evaluation.system][key].n > 0


def _histogram(evaluation: Evaluation, metric: Metric) -> Markup:
    """How many items have which value, one outline for each system."""
    colors = {REAL: 5, evaluation.system: 0, BASE: 1, ROUND_TRIP: 2}
    values = {
        name: [part.numerator / part.denominator for row in rows if (part := metric.ratio(row)) and part.denominator]
        for name, rows in evaluation.scores.rows.items()
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
    plot = line_plot(curves, title=metric.title, x_label=metric.description, y_label="items")
    return join_html((element("h3", metric.title), plot))


def _worst_items(evaluation: Evaluation) -> list[Markup]:
    by_id = {system: {row.id: row for row in rows} for system, rows in evaluation.scores.rows.items()}
    return [
        item_section(row, {system: rows[row.id] for system, rows in by_id.items() if row.id in rows}, evaluation.folder)
        for row in worst_first(evaluation.scores.rows[evaluation.system])[:SHOWN_ITEMS]
    ]


def item_section(
    row: ItemScores,
    outputs: Mapping[str, ItemScores],
    out: Path | Mapping[str, Path],
    note: Callable[[ItemScores], object] | None = None,
) -> Markup:
    """One item as every system speaks it, on one time scale; `out` is the results folder, or that of each system."""
    max_seconds = max(output.seconds for output in outputs.values())
    figures = [
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
    about = " · ".join(part for part in (row.id, row.speaker, row.language) if part)
    return element(
        "section",
        element("h3", row.text),
        element("p", about, class_="note"),
        element("div", *figures, class_="trio", style="grid-template-columns:repeat(auto-fit, minmax(14rem, 1fr))"),
        class_="card",
    )


def _note(row: ItemScores) -> Markup:
    parts: list[object] = [element("span", defect, class_="bad") for defect in _defects(row)]
    if row.similarity is not None:
        parts.append(f"similarity {row.similarity:.2f}")
    if row.distillmos is not None:
        parts.append(f"DistillMOS {row.distillmos:.2f}")
    if row.transcript is not None and not row.looped:
        errors = f"{row.word_errors} of {row.words} words wrong: “{row.transcript}”"
        parts.append(errors if row.word_errors else "every word")
    return join_html(parts, " · ")


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


def _all_items(evaluation: Evaluation) -> Markup:
    rows = []
    for row in worst_first(evaluation.scores.rows[evaluation.system]):
        is_counted = row.word_errors is not None and not row.looped
        wrong = f"{row.word_errors} of {row.words}" if is_counted else "not measured"
        similarity = f"{row.similarity:.3f}" if row.similarity is not None else "not measured"
        name = element("a", row.id, href=row.audio) if row.audio else row.id
        rows.append([name, row.text, wrong, similarity, ", ".join(_defects(row))])
    header = ["item", "text", "word errors", "similarity", "defects"]
    table = html_table(header, rows, caption=f"All items of {evaluation.system}, the worst first")
    return element("details", element("summary", f"{len(rows)} items, the worst first"), table)


def _footer(evaluation: Evaluation) -> str:
    scorers = ", ".join(evaluation.scorers.names.values()) or "acoustic measures alone"
    return f"Scored by {scorers}. Every figure is in evaluation.json, every item in items.parquet."
