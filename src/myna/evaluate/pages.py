"""Page of an evaluation, and the parts that other pages share, as sections of `myna.report.page`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from myna.audio.files import read_audio
from myna.core.statistics import CONFIDENCE_LEVEL, Estimate
from myna.evaluate.metrics import GROUPED_METRICS, METRICS, METRICS_BY_KEY, Metric, MetricEstimates
from myna.evaluate.pipeline import load_audio, saved_references
from myna.evaluate.scoring import ItemScores
from myna.evaluate.systems import BASE, REAL, ROUND_TRIP, system_title
from myna.report import page
from myna.report.page import Curve, clip, line_plot

if TYPE_CHECKING:
    from myna.evaluate.evaluation import Evaluation

SHOWN_ITEMS = 20
"""Items with players. A page with a thousand would not open; the audio of all lies beside it."""
PLAYER_SAMPLE_RATE = 24_000
HISTOGRAM_BINS = 24
HISTOGRAMS = ("cer", "similarity", "distillmos", "speaking_rate", "pitch")


def evaluation_page(evaluation: Evaluation) -> str:
    """Render diagnoses, metrics, and the worst items with players."""
    name, items, estimates = evaluation.system, evaluation.eval_set.items, evaluation.estimates
    rows = worst_first(evaluation.rows[name])
    by_id = {system: {row.id: row for row in of} for system, of in evaluation.rows.items()}
    speakers = len({item.speaker for item in items if item.speaker})
    measured = {key for key, estimate in estimates[name].items() if estimate.n}
    sections = [
        page.heading(f"{name}, speech evaluation", 1),
        page.paragraph(
            f"{len(items)} items of {f'{speakers} speakers' if speakers > 1 else 'one speaker'}, spoken by the model"
            f"{', by its base' if BASE in estimates else ''} and by the people themselves where there are recordings. "
            f"Every mean has an interval that holds {CONFIDENCE_LEVEL:.0%} of what other draws of such items would "
            "give. It is over items: other speakers may differ by more.",
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
        *metrics_table(estimates, "Scores by system", keep_empty=True),
        *missing_notes(evaluation.missing, "measured"),
    ]
    if evaluation.differences:
        sections += [
            page.heading("Against the untuned base, on the same items"),
            *metrics_table(evaluation.differences, "Differences from the base", differences=True),
            page.paragraph("In color: what differs beyond its interval.", "note"),
        ]
    grouped = [metric for metric in GROUPED_METRICS if metric.key in measured]
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
        sections.append(item_section(row, outputs, evaluation.folder))
    header = ("item", "text", "word errors", "similarity", "defects", "seen before")
    all_items = page.table(f"All items of {name}, the worst first", header, map(_item_row, rows))
    scorers = ", ".join(evaluation.scorer_names.values()) or "acoustic measures alone"
    sections += [
        page.heading("All items"),
        page.details(f"{len(rows)} items, the worst first", all_items),
        page.footer(f"Scored by {scorers}. Every figure is in evaluation.json, every item in items.parquet."),
    ]
    return page.render_page(f"Evaluation of {name}", sections)


def worst_first(rows: Sequence[ItemScores]) -> list[ItemScores]:
    """Sort items by most defects, then by highest character error rate, then by lowest similarity."""

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
) -> list[page.Section]:
    """Make a table of metrics by system, or of their differences from a base; rows without any value only with
    `keep_empty`."""
    rows: list[list[page.Cell]] = []
    for metric in metrics:
        estimates = [of.get(metric.key, Estimate()) for of in systems.values()]
        if keep_empty or any(estimate.n for estimate in estimates):
            points = " (points)" if differences and metric.is_share else ""
            title = page.cell(metric.title + points, note="" if differences else metric.description)
            shown = map(metric.format_estimate, estimates)
            rows.append([title, *((difference_cell(metric, one) for one in estimates) if differences else shown)])
    return [page.table(caption, ["", *map(system_title, systems)], rows)] if rows else []


def difference_cell(metric: Metric, figure: Estimate) -> page.Cell:
    """Show a difference, in color if it goes beyond its interval."""
    style = ""
    if figure.excludes_zero and figure.mean is not None:
        style = {True: "good", False: "bad", None: ""}[metric.is_improvement(figure.mean)]
    return page.cell(metric.format_estimate(figure, signed=True), style)


def missing_notes(missing: Mapping[str, str], verb: str) -> list[page.Section]:
    """Say each reason once, with all metrics that it explains."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in missing.items():
        title = METRICS_BY_KEY[key].title if key in METRICS_BY_KEY else system_title(key)
        by_reason.setdefault(reason, []).append(title)
    return [
        page.paragraph(f"{', '.join(titles)}: not {verb}. {reason}", "missing") for reason, titles in by_reason.items()
    ]


def _histogram(evaluation: Evaluation, metric: Metric) -> page.Section:
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
        curves.append(Curve(system_title(name), list(outline), "faint" if name == REAL else "line", colors[name]))
    return line_plot(curves, title=metric.title, x_label=metric.description, y_label="items")


def item_section(
    row: ItemScores,
    outputs: Mapping[str, ItemScores],
    out: Path | Mapping[str, Path],
    notes: Callable[[ItemScores], list[page.Cell]] | None = None,
) -> page.Section:
    """Show one item as every system speaks it, on one time scale; `out` is the results folder, or that of each
    system."""
    max_seconds = max(output.seconds for output in outputs.values())
    clips = []
    for recording in saved_references(out / row.audio) if isinstance(out, Path) and row.audio else []:
        samples = read_audio(recording, sample_rate=PLAYER_SAMPLE_RATE)
        title, seconds = recording.stem.rpartition("+")[2], len(samples) / PLAYER_SAMPLE_RATE
        clips.append(clip(samples, PLAYER_SAMPLE_RATE, title=title, label=f"{row.id}, {title}", max_seconds=seconds))
    for system, output in outputs.items():
        samples = load_audio(output, out if isinstance(out, Path) else out[system], PLAYER_SAMPLE_RATE)
        title, noted = system_title(system), (notes or _notes)(output)
        label = f"{row.id}, {title}"
        clips.append(clip(samples, PLAYER_SAMPLE_RATE, title=title, label=label, max_seconds=max_seconds, notes=noted))
    return page.item(row.text, " · ".join(filter(None, (row.id, row.speaker, row.language))), clips)


def _item_row(row: ItemScores) -> list[page.Cell]:
    return [
        page.cell(row.id, href=row.audio),
        row.text,
        "not measured" if row.word_errors is None else f"{row.word_errors} of {row.words}",
        "not measured" if row.similarity is None else f"{row.similarity:.3f}",
        ", ".join(_defects(row)),
        _seen(row),
    ]


def _notes(row: ItemScores) -> list[page.Cell]:
    notes = [page.cell(text, "bad") for text in (*_defects(row), _seen(row)) if text]
    if row.similarity is not None:
        notes.append(f"similarity {row.similarity:.2f}")
    if row.distillmos is not None:
        notes.append(f"DistillMOS {row.distillmos:.2f}")
    if row.transcript is not None:
        errors = f"{row.word_errors} of {row.words} words wrong: “{row.transcript}”"
        notes.append(errors if row.word_errors else "every word")
    return notes


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
