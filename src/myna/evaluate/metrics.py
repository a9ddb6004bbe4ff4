"""Metrics of an evaluation: contribution of an item, scorer, better direction; and their estimates over items."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from myna.core.statistics import Estimate, RatioPart, estimate, paired_difference
from myna.evaluate.scoring import COPY_THRESHOLD, ItemScores

NOT_APPLICABLE = "nothing to measure"
"""Shown for a metric that applies to no item of a system: recordings do not find their end."""
MetricEstimates = dict[str, Estimate]
"""Estimates by the key of the metric."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of speech, computed from the scores of items."""

    key: str
    title: str
    description: str
    better: Literal["higher", "lower", "near real"]
    value: str | Callable[[ItemScores], float | None] = ""
    """Field of the item's scores, or a function of them; by default the field with the name of the metric."""
    total: str = ""
    """Field to divide by, for a rate over all words or characters; without it every item counts as one."""
    scorer: Literal["", "asr", "speaker_encoder", "distillmos", "dnsmos"] = ""
    is_share: bool = False
    is_count: bool = False
    """Whether a mean is shown as a number of items."""
    min_difference: float = 0.0
    """Smallest difference that can be heard."""

    def ratio(self, row: ItemScores) -> RatioPart | None:
        """Return what an item adds to the metric; None if it does not apply to the item."""
        value = self.value(row) if callable(self.value) else getattr(row, self.value or self.key)
        if not self.total:
            return None if value is None else RatioPart(float(value))
        total = getattr(row, self.total)
        return RatioPart(float(value or 0), float(total)) if total else None

    def format(self, value: float | None, *, signed: bool = False) -> str:
        if value is None:
            return "not measured"
        if self.is_share:
            return f"{100 * value:+.1f}" if signed else f"{100 * value:.1f} %"
        return f"{value:+.3f}" if signed else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"

    def format_estimate(self, figure: Estimate, *, signed: bool = False) -> str:
        """Format a mean with its interval."""
        if figure.mean is None:
            return NOT_APPLICABLE
        if self.is_count and not signed:
            return f"{round(figure.mean * figure.n)} of {figure.n}"
        low, high = (self.format(value, signed=signed).removesuffix(" %") for value in (figure.low, figure.high))
        return f"{self.format(figure.mean, signed=signed)} [{low}, {high}]"

    def is_improvement(self, difference: float) -> bool | None:
        """Whether a difference is an improvement; None for a metric that should be near that of real recordings."""
        return None if self.better == "near real" else (difference > 0) == (self.better == "higher")


_defect = partial(Metric, better="lower", is_share=True)
_errors = partial(_defect, scorer="asr")
_speaker = partial(Metric, scorer="speaker_encoder")
_mos = partial(Metric, better="higher", min_difference=0.02)
_acoustic = partial(Metric, better="near real")

METRICS = (
    _errors(
        *("wer", "word errors", "words changed, added or dropped"),
        value="word_errors",
        total="words",
        min_difference=0.005,
    ),
    _errors(
        *("cer", "character errors", "the same by characters"),
        value="character_errors",
        total="characters",
        min_difference=0.002,
    ),
    _errors(
        *("loop_rate", "ASR loops", "items whose transcript loops: all their words count as errors"),
        value="looped",
        is_count=True,
    ),
    _speaker(
        *("similarity", "similarity", "to other clips of the speaker; 1 is the same voice", "higher"),
        min_difference=0.005,
    ),
    _speaker("similarity_to_others", "similarity to others", "to the other speakers, for contrast", "near real"),
    _speaker(
        *("similarity_rank1", "own speaker is nearest", "items nearer to their speaker than to any other", "higher"),
        value=lambda row: None if row.speaker_rank is None else row.speaker_rank == 1,
        is_share=True,
    ),
    _mos("distillmos", "DistillMOS", "quality from 1 to 5", scorer="distillmos"),
    _mos("dnsmos", "DNSMOS", "quality from 1 to 5, as for calls", scorer="dnsmos"),
    Metric("stop_rate", "stops by itself", "items that found their end", "higher", "stopped", is_share=True),
    _defect(
        *("runaway_rate", "runs away", "items cut at the maximum length"),
        value=lambda row: None if row.stopped is None else not row.stopped,
    ),
    _defect("early_rate", "ends early", "items that end long before they could be spoken", value="ended_early"),
    _defect("silent_rate", "silent", "items in which nothing can be heard", value="silent"),
    _errors("repetition_rate", "repeats itself", "items with words again that the text has once", value="repeats"),
    _errors("prompt_rate", "speaks the prompt", "items with the reference's words instead", value="speaks_prompt"),
    _defect(
        *("copy_rate", "copies the reference", "items that are the reference's own audio"),
        value=lambda row: None if row.copy_similarity is None else row.copy_similarity >= COPY_THRESHOLD,
    ),
    _acoustic("leading_silence", "silence before", "seconds"),
    _acoustic("trailing_silence", "silence after", "seconds"),
    _acoustic("pause_share", "pauses", "share of the time", is_share=True),
    _acoustic("speaking_rate", "speaking rate", "characters a second"),
    _acoustic("pitch", "pitch", "hertz"),
    _acoustic("pitch_range", "pitch range", "semitones"),
    _acoustic("voiced_share", "voiced", "share of speech that has a pitch; noise has none", is_share=True),
)
METRICS_BY_KEY = {metric.key: metric for metric in METRICS}
GROUPED_METRICS = tuple(
    METRICS_BY_KEY[key]
    for key in ("wer", "cer", "loop_rate", "similarity", "similarity_rank1", "distillmos", "stop_rate", "early_rate")
)
"""Metrics of groups of items."""


def estimate_metrics(rows: Sequence[ItemScores], metrics: Iterable[Metric] = METRICS) -> MetricEstimates:
    return {metric.key: estimate_metric(metric, rows) for metric in metrics}


def estimate_metric(metric: Metric, rows: Sequence[ItemScores]) -> Estimate:
    return estimate([part for row in rows if (part := metric.ratio(row)) is not None])


def estimate_differences(rows: Sequence[ItemScores], base: Sequence[ItemScores]) -> MetricEstimates:
    """Estimate the differences of all metrics on the items that both have spoken."""
    return {metric.key: estimate_difference(metric.ratio, rows, base) for metric in METRICS}


def estimate_difference(
    ratio: Callable[[ItemScores], RatioPart | None], rows: Sequence[ItemScores], base: Sequence[ItemScores]
) -> Estimate:
    known = {row.id: ratio(row) for row in base}
    pairs = [(ours, theirs) for row in rows if (ours := ratio(row)) and (theirs := known.get(row.id))]
    return paired_difference([ours for ours, _ in pairs], [theirs for _, theirs in pairs])


def count_looped(rows: Iterable[ItemScores]) -> int:
    """Count the items whose transcript loops; they are wholly wrong in the error rates."""
    return sum(bool(row.looped) for row in rows)


def missing_metrics(scorers: Mapping[str, str]) -> dict[str, str]:
    """Return the reason for each metric whose scorer is missing; `scorers` holds the reason by scorer."""
    return {metric.key: scorers[metric.scorer] for metric in METRICS if metric.scorer in scorers}
