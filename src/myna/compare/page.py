"""Systems side by side as a page that opens without a network: figures, differences, and a place to listen blindly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from myna.audio.files import Samples
from myna.compare.comparison import Comparison
from myna.compare.preferences import Trial, lowest_shares
from myna.evaluate.metrics import BY_KEY, METRICS, Metric
from myna.evaluate.pipeline import sound_of
from myna.evaluate.report import NOTHING, SOUND_RATE, delta, show, title
from myna.evaluate.scoring import ItemScores
from myna.evaluate.summary import Figures
from myna.report.blind_test import Pair, blind, script, style
from myna.report.document import document
from myna.report.markup import Markup, element, escape, join, table
from myna.report.player import flac
from myna.report.spectrogram import data_uri
from myna.statistics import LEVEL, Estimate

Cell = Callable[[Metric, Estimate], object]
FIRST = ("wer", "cer", "similarity", "similarity_rank1", "distillmos", "dnsmos", "stop_rate", "early_rate", "pace")
"""Figures that are seen at once; the others are a click away."""
LOUDNESS, LOUDEST = 0.06, 0.97
"""Of speech as it is offered to the ear, and of its highest peak."""
FRAME, RANGE = 480, 0.03
"""Samples over which loudness is measured, and the share of the loudest below which there is a pause."""


def page(comparison: Comparison) -> str:
    names = ", ".join(comparison.names)
    first = comparison.names[0]
    return document(
        f"Comparison of {names}",
        element("h1", f"{names}: side by side"),
        element("p", _lead(comparison), class_="lead"),
        element("p", element("a", "Listen without knowing who it is", href="#blind")),
        *(element("p", f"{note}.", class_="note") for note in comparison.notes),
        element("h2", "Scores"),
        _figures(comparison.figures, "Scores by system", show),
        *_reasons(comparison.missing),
        element("h2", f"Against {first}, on the same lines"),
        _figures(comparison.deltas, f"Differences from {first}", delta, signed=True),
        element("p", "In colour: what differs beyond its interval.", class_="note"),
        element("h2", "Listen without knowing who it is"),
        *_listening(comparison),
        element("footer", element("p", "Every figure is in compare.json.")),
        style=style(),
        script=script(),
        sends=True,
    )


def _lead(comparison: Comparison) -> str:
    rows = comparison.sides[0].rows
    speakers = len({row.speaker for row in rows if row.speaker})
    voices = f" of {speakers} speakers" if speakers > 1 else ""
    return (
        f"{len(rows)} lines{voices}, the same for all. Every mean has an interval that holds {LEVEL:.0%} of what other "
        "draws of such lines would give; differences are taken line by line."
    )


def _figures(figures: Mapping[str, Figures], caption: str, cell: Cell, *, signed: bool = False) -> Markup:
    def rows(columns: Sequence[Metric]) -> list[list[object]]:
        return [
            [
                _called(column, signed),
                *(cell(column, one[column.key]) if column.key in one else NOTHING for one in figures.values()),
            ]
            for column in columns
            if any(column.key in one and one[column.key].n for one in figures.values())
        ]

    header = ["", *map(title, figures)]
    main = [BY_KEY[key] for key in FIRST]
    more = rows([column for column in METRICS if column not in main])
    rest = element("details", element("summary", "More figures"), table(header, more, caption=f"{caption}, the rest"))
    return join((table(header, rows(main), caption=caption), rest if more else ""))


def _called(column: Metric, signed: bool) -> Markup:
    if signed:
        return escape(f"{column.title} (points)" if column.is_share else column.title)
    return join((column.title, element("div", column.about, class_="note")))


def _reasons(missing: Mapping[str, str]) -> list[Markup]:
    """Each reason once, with all that it explains."""
    of: dict[str, list[str]] = {}
    for key, why in missing.items():
        of.setdefault(why, []).append(BY_KEY[key].title if key in BY_KEY else title(key))
    return [element("p", f"{', '.join(names)}: not compared. {why}", class_="missing") for why, names in of.items()]


def _listening(comparison: Comparison) -> list[Markup]:
    if not comparison.trials:
        return [element("p", "There is nothing to choose between: all lines sound the same.", class_="missing")]
    lines = len({trial.line for trial in comparison.trials})
    pairs = len(comparison.sides) * (len(comparison.sides) - 1) // 2
    each = f"{pairs} pairs on {lines} lines" if pairs > 1 else f"{lines} lines"
    told = (
        f"{each}. For each, play A and B and say which you would rather hear as a reading of the line. Who is A "
        "changes from line to line by the dice; both are equally loud. No picture is shown, since it could give one "
        "away. Answers stay in this browser until you save them as a file."
    )
    sounds, real = _sounds(comparison)
    rows = {row.id: row for row in comparison.sides[0].rows}
    offered = [_pair(trial, rows[trial.line], real.get(trial.line)) for trial in comparison.trials]
    most = max(1, lines)
    intervals = [lowest_shares(of, range(of + 1)).tolist() for of in range(most + 1)]
    return [
        element("p", told),
        blind(offered, sounds, name=comparison.id, intervals=intervals, level=LEVEL),
    ]


def _pair(trial: Trial, row: ItemScores, real: str | None) -> Pair:
    note = " · ".join(part for part in (row.speaker, row.language) if part)
    return Pair(trial.id, trial.text, note, trial.sounds, trial.systems, real, row.language)


def _sounds(comparison: Comparison) -> tuple[dict[str, str | None], dict[str, str]]:
    """Data URIs by the names of sounds, all of a line equally loud; and the names of the real recordings by line."""
    made: dict[str, str | None] = {}
    real: dict[str, str] = {}
    by_name = {side.name: side for side in comparison.sides}
    rows = {name: {row.id: row for row in side.rows} for name, side in by_name.items()}
    recorded = {row.id: row for row in comparison.real.rows} if comparison.real is not None else {}
    for number, line in enumerate(dict.fromkeys(trial.line for trial in comparison.trials)):
        named: dict[str, Samples] = {}
        for trial in comparison.trials:
            if trial.line == line:
                for sound, system in zip(trial.sounds, trial.systems, strict=True):
                    if sound not in named:
                        named[sound] = sound_of(rows[system][line], by_name[system].folder, SOUND_RATE)
        if line in recorded and comparison.real is not None:
            real[line] = f"real-{number}"
            named[real[line]] = sound_of(recorded[line], comparison.real.folder, SOUND_RATE)
        for name, samples in equally_loud(named).items():
            made[name] = data_uri(flac(samples, SOUND_RATE), "audio/flac") if len(samples) else None
    return made, real


def equally_loud(sounds: Mapping[str, Samples]) -> dict[str, Samples]:
    """The louder of two sounds better, whatever else it is. So all are as loud as the least of them can be."""
    levels = {name: loudness(samples) for name, samples in sounds.items()}
    reach = [
        LOUDEST * levels[name] / float(np.abs(samples).max()) for name, samples in sounds.items() if levels[name] > 0
    ]
    level = min([LOUDNESS, *reach])
    return {
        name: np.asarray(samples * (level / levels[name]) if levels[name] > 0 else samples, np.float32)
        for name, samples in sounds.items()
    }


def loudness(samples: Samples) -> float:
    """The power of what is not a pause, as an amplitude; 0 where there is nothing."""
    frames = np.pad(samples, (0, -len(samples) % FRAME)).reshape(-1, FRAME).astype(np.float64)
    levels = np.sqrt(np.square(frames).mean(axis=1))
    loudest = levels.max(initial=0.0)
    return float(np.sqrt(np.square(levels[levels >= RANGE * loudest]).mean())) if loudest > 1e-5 else 0.0
