"""Pages of evaluations, comparisons and training runs, as sections of `myna.report.page`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from myna.audio.files import Samples, read_audio
from myna.core.statistics import CONFIDENCE_LEVEL, Estimate
from myna.evaluate import ranking
from myna.evaluate.listening import binomial_lower_bounds
from myna.evaluate.metrics import GROUPED_METRICS, METRICS, METRICS_BY_KEY, Metric, MetricEstimates
from myna.evaluate.pipeline import load_audio, saved_references, step_folder
from myna.evaluate.scoring import ItemScores
from myna.evaluate.systems import BASE, REAL, ROUND_TRIP, system_title
from myna.report import page
from myna.report.media import Curve, clip, data_uri, encode_flac, line_plot

if TYPE_CHECKING:
    from myna.evaluate.comparison import Comparison
    from myna.evaluate.evaluation import Evaluation

SHOWN_ITEMS = 20
"""Items with players. A page with a thousand would not open; the audio of all lies beside it."""
SHOWN_STEP_ITEMS = 6
"""Items with players on the page of a training run, each at several steps."""
PLAYER_SAMPLE_RATE = 24_000
HISTOGRAM_BINS = 24
HISTOGRAMS = ("cer", "similarity", "distillmos", "speaking_rate", "pitch")
COMPARED_METRICS = (
    *("wer", "cer", "loop_rate", "similarity", "similarity_rank1", "distillmos", "dnsmos"),
    *("stop_rate", "early_rate", "speaking_rate"),
)
"""Metrics of a comparison that are seen at once; the others are a click away."""
TARGET_RMS, MAX_PEAK = 0.06, 0.97
"""Level of speech in the listening test, and the highest peak, which may keep the level below that."""
FRAME_SAMPLES, PAUSE_SHARE = 480, 0.03
"""Frames whose level is below this share of the loudest are pauses and do not count."""


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
        line_plot([Curve("score", points, "dots")], title="The score over the steps", x_label="steps", y_label="score"),
        page.heading("Listen"),
        *_step_items(history, shown, folder),
        page.footer("Every item of every step lies beside this page, with its spectrogram."),
    ]
    return page.render_page(title, sections)


def _step_row(one: ranking.CheckpointScore, best: int | None, forgets: bool) -> list[page.Cell]:
    """Show a checkpoint; the base model is only compared with."""
    is_base = one.step == 0
    confirmed = ranking.format_score(one.confirmed_gain, signed=True) if one.confirmed_gain.n else "not spoken"
    row: list[page.Cell] = [
        ranking.step_name(one.step),
        ranking.format_score(one.score),
        "" if is_base else ranking.format_score(one.gain, signed=True),
        "" if is_base else confirmed,
        *(metric.format(one.metrics[metric.key]) for metric in ranking.SHOWN_METRICS),
        str(one.looped),
    ]
    if forgets:
        row.append("" if is_base else ranking.format_score(one.forgetting_change, signed=True))
    verdict = page.cell("the best", "good") if one.step == best else page.cell("; ".join(one.violations), "bad")
    return [*row, "" if is_base else verdict]


def _step_items(history: ranking.TrainingHistory, shown: int, folder: Path) -> list[page.Section]:
    """Show some items: as recorded, by the base model, and at the best and the latest step."""
    steps = dict.fromkeys((history.steps[0].step, shown, history.steps[-1].step))
    rows = {REAL: {row.id: row for row in history.recordings}}
    rows |= {
        ranking.step_name(one.step): {row.id: row for row in one.rows} for one in history.steps if one.step in steps
    }
    folders = {REAL: folder / "real"} | {ranking.step_name(step): folder / step_folder(step) for step in steps}
    order = [REAL, *map(ranking.step_name, steps)]
    return [
        item_section(
            row,
            {name: rows[name][row.id] for name in order if row.id in rows[name]},
            folders,
            lambda row: [f"score {ranking.item_score(row).numerator:.2f}: “{row.transcript or ''}”"],
        )
        for row in history.steps[0].rows[:SHOWN_STEP_ITEMS]
    ]


def comparison_page(comparison: Comparison) -> str:
    """Render metrics with intervals, paired differences, and a blind listening test."""
    names, first = ", ".join(comparison.names), comparison.names[0]
    rows = comparison.systems[0].rows
    speakers = len({row.speaker for row in rows if row.speaker})
    listen = "Listen without knowing who it is"
    sections = [
        page.heading(f"{names}: side by side", 1),
        page.paragraph(
            f"{len(rows)} items{f' of {speakers} speakers' if speakers > 1 else ''}, the same for all. Every mean has "
            f"an interval that holds {CONFIDENCE_LEVEL:.0%} of what other draws of such items would give; differences "
            "are taken item by item.",
            "lead",
        ),
        *(page.paragraph(f"{warning}.", "missing bad") for warning in comparison.warnings),
        page.paragraph(listen, href="#blind"),
        *(page.paragraph(f"{note}.", "note") for note in comparison.notes),
        page.heading("Scores"),
        *_compared_metrics(comparison.estimates, "Scores by system"),
        *missing_notes(comparison.missing, "compared"),
        page.heading(f"Against {first}, on the same items"),
        *_compared_metrics(comparison.differences, f"Differences from {first}", differences=True),
        page.paragraph("In color: what differs beyond its interval.", "note"),
        page.heading(listen),
        *_listening_test(comparison),
        page.footer("Every figure is in compare.json."),
    ]
    return page.render_page(f"Comparison of {names}", sections, allow_post=True)


def _compared_metrics(
    systems: Mapping[str, MetricEstimates], caption: str, *, differences: bool = False
) -> list[page.Section]:
    main = [METRICS_BY_KEY[key] for key in COMPARED_METRICS]
    others = [metric for metric in METRICS if metric.key not in COMPARED_METRICS]
    rest = metrics_table(systems, f"{caption}, the rest", others, differences=differences)
    more = [page.details("More figures", *rest)] if rest else []
    return [*metrics_table(systems, caption, main, differences=differences), *more]


def _listening_test(comparison: Comparison) -> list[page.Section]:
    if not comparison.trials:
        return [page.paragraph("There is nothing to choose between: all items sound the same.", "missing")]
    items = len({trial.item for trial in comparison.trials})
    pairs = len(comparison.systems) * (len(comparison.systems) - 1) // 2
    count = f"{pairs} pairs on {items} items" if pairs > 1 else f"{items} items"
    instructions = (
        f"{count}. For each, play A and B and say which you would rather hear as a reading of the text. Which system "
        "is A changes at random from item to item; both are equally loud. No spectrogram is shown, since it could give "
        "one away. Answers stay in this browser until you save them as a file."
    )
    sounds, real = _encode_sounds(comparison)
    rows = {row.id: row for row in comparison.systems[0].rows}
    offered = [
        {
            "id": trial.id,
            "text": trial.text,
            "note": " · ".join(filter(None, (rows[trial.item].speaker, rows[trial.item].language))),
            "language": rows[trial.item].language,
            "sounds": trial.sounds,
            "names": trial.systems,
            "real": real.get(trial.item),
        }
        for trial in comparison.trials
    ]
    intervals = [binomial_lower_bounds(n, range(n + 1)).tolist() for n in range(items + 1)]
    test = page.blind_test(offered, sounds, name=comparison.id, intervals=intervals, level=CONFIDENCE_LEVEL)
    return [page.paragraph(instructions), test]


def _encode_sounds(comparison: Comparison) -> tuple[dict[str, str | None], dict[str, str]]:
    """Return data URIs by sound id, all sounds of an item equally loud; and ids of the real recordings by item."""
    uris: dict[str, str | None] = {}
    real_ids: dict[str, str] = {}
    rows = {system.name: {row.id: row for row in system.rows} for system in comparison.systems}
    folders = {system.name: system.folder for system in comparison.systems}
    real = comparison.real
    recordings = {row.id: row for row in real.rows} if real is not None else {}
    for number, name in enumerate(dict.fromkeys(trial.item for trial in comparison.trials)):
        samples = {
            sound: load_audio(rows[system][name], folders[system], PLAYER_SAMPLE_RATE)
            for trial in comparison.trials
            if trial.item == name
            for sound, system in zip(trial.sounds, trial.systems, strict=True)
        }
        if real is not None and name in recordings:
            real_ids[name] = f"real-{number}"
            samples[real_ids[name]] = load_audio(recordings[name], real.folder, PLAYER_SAMPLE_RATE)
        for id, sound in match_loudness(samples).items():
            uris[id] = data_uri(encode_flac(sound, PLAYER_SAMPLE_RATE), "audio/flac") if len(sound) else None
    return uris, real_ids


def match_loudness(sounds: Mapping[str, Samples]) -> dict[str, Samples]:
    """Bring all sounds to one level without clipping any: of two sounds the louder one seems better."""
    levels = {name: speech_rms(samples) for name, samples in sounds.items()}
    reachable = [
        MAX_PEAK * levels[name] / float(np.abs(samples).max()) for name, samples in sounds.items() if levels[name] > 0
    ]
    level = min([TARGET_RMS, *reachable])
    return {
        name: np.asarray(samples * (level / levels[name]) if levels[name] > 0 else samples, np.float32)
        for name, samples in sounds.items()
    }


def speech_rms(samples: Samples) -> float:
    """Compute the root mean square without pauses; 0 for silence."""
    frames = np.pad(samples, (0, -len(samples) % FRAME_SAMPLES)).reshape(-1, FRAME_SAMPLES).astype(np.float64)
    levels = np.sqrt(np.square(frames).mean(axis=1))
    loudest = levels.max(initial=0.0)
    return float(np.sqrt(np.square(levels[levels >= PAUSE_SHARE * loudest]).mean())) if loudest > 1e-5 else 0.0
