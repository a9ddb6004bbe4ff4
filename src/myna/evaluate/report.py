"""The evaluation as a page that opens without a network: what is wrong, the figures, the worst lines to hear."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from myna.evaluate.metrics import BY_KEY, METRICS, Metric
from myna.evaluate.pipeline import sound_of
from myna.evaluate.scoring import ItemScores
from myna.evaluate.summary import GROUPED, Figures, Summary
from myna.evaluate.systems import BASE, REAL, ROUND_TRIP
from myna.report.document import document
from myna.report.markup import Markup, element, join, table
from myna.report.player import clip
from myna.report.plot import Curve, plot
from myna.statistics import LEVEL, Estimate

SHOWN = 20
"""Lines with players. A page with a thousand would not open; the sounds of all lie beside it."""
SOUND_RATE = 24_000
BINS = 24
HISTOGRAMS = ("cer", "similarity", "distillmos", "pace", "pitch")
NOTHING = "nothing to measure"
"""Where an ear is missing, the reason stands below; elsewhere the figure does not apply: recordings find no end."""
TITLES = {REAL: "real recording", ROUND_TRIP: "real, through the codec", BASE: "untuned base"}


def page(summary: Summary, out: Path) -> str:
    """`out` holds the sounds."""
    return document(
        f"Evaluation of {summary.primary}",
        element("h1", f"{summary.primary}, judged by ear"),
        element("p", _lead(summary), class_="lead"),
        _faults(summary),
        element("h2", "Scores"),
        _scores(summary),
        *_deltas(summary),
        *_groups(summary),
        element("h2", "How the lines are spread"),
        *(_histogram(summary, BY_KEY[key]) for key in HISTOGRAMS if _measured(summary, key)),
        element("h2", "Listen, the worst lines first"),
        *_listen(summary, out),
        element("h2", "All lines"),
        _all_lines(summary),
        element("footer", element("p", _footer(summary))),
    )


def title(system: str) -> str:
    return TITLES.get(system, system)


def show(column: Metric, figure: Estimate, *, signed: bool = False) -> str:
    """A mean with its interval."""
    if figure.mean is None:
        return NOTHING
    low, high = (column.show(value, signed=signed).removesuffix(" %") for value in (figure.low, figure.high))
    return f"{column.show(figure.mean, signed=signed)} [{low}, {high}]"


def worst_first(rows: Sequence[ItemScores]) -> list[ItemScores]:
    """What went plainly wrong, then what was understood least, then what is least like the voice."""

    def badness(row: ItemScores) -> tuple[float, ...]:
        plain = (row.silent, row.stopped is False, row.early, row.says_prompt, row.looped, row.repeats)
        wrong = row.letter_errors / row.letters if row.letters and row.letter_errors is not None else 0.0
        return (-sum(map(bool, plain)), -wrong, row.similarity if row.similarity is not None else 1.0)

    return sorted(rows, key=badness)


def _lead(summary: Summary) -> str:
    plan = summary.judged.plan
    speakers = len({task.speaker for task in plan.tasks if task.speaker})
    voices = f"{speakers} speakers" if speakers > 1 else "one speaker"
    base = ", by what it was tuned from," if BASE in summary.systems else ""
    return (
        f"{len(plan.tasks)} lines of {voices}, said by the model{base} and by the people themselves where there are "
        f"recordings. Every mean has an interval that holds {LEVEL:.0%} of what other draws "
        "of such lines would give. It is over lines: other speakers may differ by more."
    )


def _faults(summary: Summary) -> Markup:
    notes = [element("p", note, class_="note") for note in summary.judged.plan.notes]
    if not summary.faults:
        return join((element("p", "None of the faults that are looked for was found."), *notes))
    found = []
    for fault in summary.faults:
        shown = f" First: {', '.join(fault.lines[:5])}." if fault.lines else ""
        column = BY_KEY[fault.column].title if fault.column in BY_KEY else "differences from the base"
        found.append(
            element(
                "section",
                element("h3", f"{title(fault.system)}: {fault.name}", class_="bad"),
                element("p", f"{fault.text}.{shown}"),
                element("p", f"Seen in: {column}", class_="note"),
                class_="card",
            )
        )
    return join((element("h2", "What is wrong"), *found, *notes))


def _scores(summary: Summary) -> Markup:
    rows = []
    for column in METRICS:
        cells = [show(column, figures[column.key]) for figures in summary.systems.values()]
        rows.append([join((column.title, element("div", column.about, class_="note"))), *cells])
    told = [element("p", f"{_name(key)}: not measured. {why}", class_="missing") for key, why in _reasons(summary)]
    header = ["", *(title(system) for system in summary.systems)]
    return join((table(header, rows, caption="Scores by system"), *told))


def _reasons(summary: Summary) -> list[tuple[str, str]]:
    """Each reason once, with all that it explains."""
    of: dict[str, list[str]] = {}
    for key, why in summary.missing.items():
        of.setdefault(why, []).append(_name(key))
    return [(", ".join(names), why) for why, names in of.items()]


def _name(key: str) -> str:
    return BY_KEY[key].title if key in BY_KEY else title(key) if key in TITLES else key


def _deltas(summary: Summary) -> list[Markup]:
    if not summary.deltas:
        return []
    rows = []
    for column in METRICS:
        if any(figures[column.key].n for figures in summary.deltas.values()):
            unit = " (points)" if column.is_share else ""
            cells = [delta(column, figures[column.key]) for figures in summary.deltas.values()]
            rows.append([column.title + unit, *cells])
    header = ["", *map(title, summary.deltas)]
    return [
        element("h2", "Against the untuned base, on the same lines"),
        table(header, rows, caption="Differences from the base"),
        element("p", "In colour: what differs beyond its interval.", class_="note"),
    ]


def delta(column: Metric, figure: Estimate) -> Markup:
    """A difference, in colour where it goes beyond its interval."""
    mood = None
    if figure.excludes_zero and figure.mean is not None and column.better != "near real":
        mood = "good" if (figure.mean > 0) == (column.better == "higher") else "bad"
    return element("span", show(column, figure, signed=True), class_=mood)


def _groups(summary: Summary) -> list[Markup]:
    made = []
    for kind, groups in summary.groups.items():
        if not groups:
            continue
        columns = [column for column in METRICS if column.key in GROUPED and _measured(summary, column.key)]
        rows = []
        for group, of in groups.items():
            figures: Figures = of[summary.primary]
            rows.append([group, str(_lines(figures)), *(show(column, figures[column.key]) for column in columns)])
        header = [kind, "lines", *(column.title for column in columns)]
        made += [element("h2", f"By {kind}"), table(header, rows, caption=f"Scores of {summary.primary} by {kind}")]
    return made


def _lines(figures: Figures) -> int:
    return max(figure.n for figure in figures.values())


def _measured(summary: Summary, key: str) -> bool:
    return summary.systems[summary.primary][key].n > 0


def _histogram(summary: Summary, column: Metric) -> Markup:
    """How many lines have which value, one outline for each system."""
    # The page has colours for four, and the first is faint: that is the recordings.
    order = [name for name in (REAL, summary.primary, BASE, ROUND_TRIP) if name in summary.judged.rows]
    values = {
        name: [
            part.above / part.below for row in summary.judged.rows[name] if (part := column.part(row)) and part.below
        ]
        for name in order
    }
    everything = [value for found in values.values() for value in found]
    low, high = min(everything), max(everything)
    if high - low < 1e-6 * max(1.0, abs(high)):  # all alike: no bins fit between them
        low, high = low - 0.5, high + 0.5
    curves = []
    for name, found in values.items():
        counts, edges = np.histogram(found, BINS, (low, high))
        points = [
            (float(edge), float(count))
            for left, right, count in zip(edges, edges[1:], counts, strict=False)
            for edge in (left, right)
        ]
        curves.append(Curve(title(name), [(low, 0.0), *points, (high, 0.0)], "faint" if name == REAL else "line"))
    if REAL not in values:
        curves.insert(0, Curve("", [], "faint"))
    return join((element("h3", column.title), plot(curves, title=column.title, across=column.about, upwards="lines")))


def _listen(summary: Summary, out: Path) -> list[Markup]:
    rows = {system: {row.id: row for row in heard} for system, heard in summary.judged.rows.items()}
    worst = worst_first(summary.judged.rows[summary.primary])[:SHOWN]
    return [_line(row, {system: of[row.id] for system, of in rows.items() if row.id in of}, out) for row in worst]


def _line(row: ItemScores, said: dict[str, ItemScores], out: Path) -> Markup:
    """One line as everybody says it, on one scale of time."""
    longest = max(one.seconds for one in said.values())
    clips = [
        clip(
            sound_of(one, out, SOUND_RATE),
            SOUND_RATE,
            title=title(system),
            label=f"{row.id}, {title(system)}",
            longest=longest,
            note=_note(one),
        )
        for system, one in said.items()
    ]
    about = " · ".join(part for part in (row.id, row.speaker, row.language) if part)
    return element(
        "section",
        element("h3", row.text),
        element("p", about, class_="note"),
        element("div", *clips, class_="trio", style="grid-template-columns:repeat(auto-fit, minmax(14rem, 1fr))"),
        class_="card",
    )


def _note(row: ItemScores) -> Markup:
    parts: list[object] = [element("span", fault, class_="bad") for fault in _marks(row)]
    if row.similarity is not None:
        parts.append(f"similarity {row.similarity:.2f}")
    if row.distillmos is not None:
        parts.append(f"DistillMOS {row.distillmos:.2f}")
    if row.heard is not None and not row.looped:
        parts.append(
            f"{row.word_errors} of {row.words} words wrong: “{row.heard}”" if row.word_errors else "every word"
        )
    return join(part for number, one in enumerate(parts) for part in ((" · ", one) if number else (one,)))


def _marks(row: ItemScores) -> list[str]:
    marks = (
        (row.silent, "silent"),
        (row.stopped is False, "cut: it found no end"),
        (row.early, "broken off"),
        (row.says_prompt, "the reference's words"),
        (row.looped, "the recogniser went round in circles"),
        (row.repeats, "says something twice"),
    )
    return [text for is_so, text in marks if is_so]


def _all_lines(summary: Summary) -> Markup:
    rows = []
    for row in worst_first(summary.judged.rows[summary.primary]):
        wrong = (
            f"{row.word_errors} of {row.words}" if row.word_errors is not None and not row.looped else "not measured"
        )
        alike = f"{row.similarity:.3f}" if row.similarity is not None else "not measured"
        name = element("a", row.id, href=row.sound) if row.sound else row.id
        rows.append([name, row.text, wrong, alike, ", ".join(_marks(row))])
    header = ["line", "text", "word errors", "similarity", "marks"]
    listed = table(header, rows, caption=f"All lines of {summary.primary}, the worst first")
    return element("details", element("summary", f"{len(rows)} lines, the worst first"), listed)


def _footer(summary: Summary) -> str:
    ears = ", ".join(summary.ears.names.values()) or "no ears beside what can be measured"
    return f"Heard by {ears}. Every figure is in evaluation.json, every line in lines.parquet."
