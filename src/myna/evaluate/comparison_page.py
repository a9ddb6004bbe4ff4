"""Comparison page: metrics with intervals, paired differences, and a blind listening test."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from markupsafe import Markup

from myna.audio.files import Samples
from myna.core.statistics import CONFIDENCE_LEVEL
from myna.evaluate.comparison import Comparison
from myna.evaluate.listening import binomial_lower_bounds
from myna.evaluate.metrics import METRICS, METRICS_BY_KEY, MetricEstimates
from myna.evaluate.pages import PLAYER_SAMPLE_RATE, metrics_table, missing_notes
from myna.evaluate.pipeline import load_audio
from myna.report.blind_test import BlindTestPair, blind_test_section
from myna.report.document import html_document, page_asset
from myna.report.markup import element, join_html
from myna.report.player import encode_flac
from myna.report.spectrogram import data_uri

MAIN_METRICS = (
    *("wer", "cer", "loop_rate", "similarity", "similarity_rank1", "distillmos", "dnsmos"),
    *("stop_rate", "early_rate", "speaking_rate"),
)
"""Metrics that are seen at once; the others are a click away."""
TARGET_RMS, MAX_PEAK = 0.06, 0.97
"""Level of speech in the listening test, and the highest peak, which may keep it below that."""
FRAME_SAMPLES, PAUSE_SHARE = 480, 0.03
"""Frames whose level is below this share of the loudest are pauses and do not count."""


def comparison_page(comparison: Comparison) -> str:
    names = ", ".join(comparison.names)
    first = comparison.names[0]
    return html_document(
        f"Comparison of {names}",
        element("h1", f"{names}: side by side"),
        element("p", _lead(comparison), class_="lead"),
        *(element("p", f"{warning}.", class_="missing bad") for warning in comparison.warnings),
        element("p", element("a", "Listen without knowing who it is", href="#blind")),
        *(element("p", f"{note}.", class_="note") for note in comparison.notes),
        element("h2", "Scores"),
        _metrics_tables(comparison.estimates, "Scores by system"),
        *missing_notes(comparison.missing, "compared"),
        element("h2", f"Against {first}, on the same items"),
        _metrics_tables(comparison.differences, f"Differences from {first}", differences=True),
        element("p", "In color: what differs beyond its interval.", class_="note"),
        element("h2", "Listen without knowing who it is"),
        *_listening_test(comparison),
        element("footer", element("p", "Every figure is in compare.json.")),
        css=page_asset("blind_test.css"),
        script=page_asset("blind_test.js"),
        allow_post=True,
    )


def _lead(comparison: Comparison) -> str:
    rows = comparison.systems[0].rows
    speakers = len({row.speaker for row in rows if row.speaker})
    of_speakers = f" of {speakers} speakers" if speakers > 1 else ""
    return (
        f"{len(rows)} items{of_speakers}, the same for all. Every mean has an interval that holds "
        f"{CONFIDENCE_LEVEL:.0%} of what other draws of such items would give; differences are taken item by item."
    )


def _metrics_tables(systems: Mapping[str, MetricEstimates], caption: str, *, differences: bool = False) -> Markup:
    main = [METRICS_BY_KEY[key] for key in MAIN_METRICS]
    others = [metric for metric in METRICS if metric.key not in MAIN_METRICS]
    rest = metrics_table(systems, f"{caption}, the rest", others, differences=differences)
    more = element("details", element("summary", "More figures"), rest) if rest else Markup()
    return join_html((metrics_table(systems, caption, main, differences=differences), more))


def _listening_test(comparison: Comparison) -> list[Markup]:
    if not comparison.trials:
        return [element("p", "There is nothing to choose between: all items sound the same.", class_="missing")]
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
        BlindTestPair(
            trial.id,
            trial.text,
            " · ".join(part for part in (rows[trial.item].speaker, rows[trial.item].language) if part),
            trial.sounds,
            trial.systems,
            real.get(trial.item),
            rows[trial.item].language,
        )
        for trial in comparison.trials
    ]
    intervals = [binomial_lower_bounds(n, range(n + 1)).tolist() for n in range(items + 1)]
    section = blind_test_section(offered, sounds, name=comparison.id, intervals=intervals, level=CONFIDENCE_LEVEL)
    return [element("p", instructions), section]


def _encode_sounds(comparison: Comparison) -> tuple[dict[str, str | None], dict[str, str]]:
    """Data URIs by sound id, all sounds of an item equally loud; and the ids of the real recordings by item."""
    uris: dict[str, str | None] = {}
    real_ids: dict[str, str] = {}
    rows = {system.name: {row.id: row for row in system.rows} for system in comparison.systems}
    folders = {system.name: system.folder for system in comparison.systems}
    real = comparison.real
    recordings = {row.id: row for row in real.rows} if real is not None else {}
    for number, item in enumerate(dict.fromkeys(trial.item for trial in comparison.trials)):
        systems = {
            sound: system
            for trial in comparison.trials
            if trial.item == item
            for sound, system in zip(trial.sounds, trial.systems, strict=True)
        }
        samples = {
            sound: load_audio(rows[system][item], folders[system], PLAYER_SAMPLE_RATE)
            for sound, system in systems.items()
        }
        if real is not None and item in recordings:
            real_ids[item] = f"real-{number}"
            samples[real_ids[item]] = load_audio(recordings[item], real.folder, PLAYER_SAMPLE_RATE)
        for name, sound in match_loudness(samples).items():
            uris[name] = data_uri(encode_flac(sound, PLAYER_SAMPLE_RATE), "audio/flac") if len(sound) else None
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
    """Root mean square without pauses; 0 for silence."""
    frames = np.pad(samples, (0, -len(samples) % FRAME_SAMPLES)).reshape(-1, FRAME_SAMPLES).astype(np.float64)
    levels = np.sqrt(np.square(frames).mean(axis=1))
    loudest = levels.max(initial=0.0)
    return float(np.sqrt(np.square(levels[levels >= PAUSE_SHARE * loudest]).mean())) if loudest > 1e-5 else 0.0
