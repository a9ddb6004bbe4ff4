"""Metrics of an evaluation and their estimates over items; and diagnoses of what they show, in words."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from myna.core.statistics import MIN_ITEMS, Estimate, RatioPart, estimate, paired_difference
from myna.evaluate.scoring import COPY_THRESHOLD, ItemScores

REAL, ROUND_TRIP, BASE = "real", "round_trip", "base"
SYSTEM_TITLES = {REAL: "real recording", ROUND_TRIP: "real, through the codec", BASE: "untuned base"}
MIN_SHARE = 0.05
"""Minimum share of the items for a diagnosis."""
MOST = 0.5
"""Share of the items from which a defect counts as general."""
MAX_NOISE_VOICED, MIN_REAL_VOICED = 0.25, 0.3
"""Voiced share below which an item counts as noise, and minimum voiced share of the real recordings for this rule."""
MAX_EXTRA_WER = 0.5
"""Word error rate, beyond that of the real recordings, from which speech counts as not understandable."""
CODEC_TOLERANCE = {"wer": 0.1, "similarity": -0.25, "distillmos": -1.0}
"""Differences from the recording that a codec round trip may have."""
LONG_SILENCE_SECONDS = 1.0
NOT_APPLICABLE = "nothing to measure"
"""Text for a metric that cannot be computed for a system, for example `stop_rate` for real recordings."""
MetricEstimates = dict[str, Estimate]
"""Estimates by the key of the metric."""


def system_title(system: str) -> str:
    return SYSTEM_TITLES.get(system, system)


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of speech, computed from the scores of items."""

    key: str
    title: str
    description: str
    value: str | Callable[[ItemScores], float | None] = ""
    """Field of the item's scores, or a function of them; by default the field with the name of the metric."""
    total: str = ""
    """Field to divide by, for a rate over all words or characters; without it every item counts as one."""
    better: Literal["higher", "lower", "near real"] = "lower"
    scorer: Literal["", "asr", "speaker_encoder", "distillmos", "dnsmos"] = ""
    is_share: bool = False
    is_count: bool = False
    """Whether a mean is shown as a number of items."""
    min_difference: float = 0.0
    """Smallest difference that can be heard."""

    @property
    def is_outcome(self) -> bool:
        """Whether an item either has it or not, so that the mean is a share of the items."""
        return self.is_share and not self.total and self.better != "near real"

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


_errors = partial(Metric, scorer="asr", is_share=True)
_speaker = partial(Metric, scorer="speaker_encoder")
_share = partial(Metric, is_share=True)
_acoustic = partial(Metric, better="near real")

METRICS = (
    _errors("wer", "word errors", "words changed, added or dropped", "word_errors", "words", min_difference=0.005),
    _errors(
        "cer", "character errors", "the same by characters", "character_errors", "characters", min_difference=0.002
    ),
    _errors(
        "loop_rate",
        "ASR loops",
        "items whose transcript loops: all their words count as errors",
        "looped",
        is_count=True,
    ),
    _speaker(
        *("similarity", "similarity", "to other clips of the speaker; 1 is the same voice"),
        better="higher",
        min_difference=0.005,
    ),
    _speaker("similarity_to_others", "similarity to others", "to the other speakers, for contrast", better="near real"),
    _speaker(
        *("similarity_rank1", "own speaker is nearest", "items nearer to their speaker than to any other"),
        lambda row: None if row.speaker_rank is None else row.speaker_rank == 1,
        better="higher",
        is_share=True,
    ),
    Metric(
        "distillmos", "DistillMOS", "quality from 1 to 5", scorer="distillmos", better="higher", min_difference=0.02
    ),
    Metric(
        "dnsmos", "DNSMOS", "quality from 1 to 5, as for calls", scorer="dnsmos", better="higher", min_difference=0.02
    ),
    _share("stop_rate", "stops by itself", "items that found their end", "stopped", better="higher"),
    _share(
        *("runaway_rate", "runs away", "items cut at the maximum length"),
        lambda row: None if row.stopped is None else not row.stopped,
    ),
    _share("early_rate", "ends early", "items that end long before they could be spoken", "ended_early"),
    _share("silent_rate", "silent", "items in which nothing can be heard", "silent"),
    _errors("repetition_rate", "repeats itself", "items with words again that the text has once", "repeats"),
    _errors("prompt_rate", "speaks the prompt", "items with the reference's words instead", "speaks_prompt"),
    _share(
        *("copy_rate", "copies the reference", "items that are the reference's own audio"),
        lambda row: None if row.copy_similarity is None else row.copy_similarity >= COPY_THRESHOLD,
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
"""Metrics that are shown for groups of items."""


def estimate_metrics(rows: Sequence[ItemScores], metrics: Iterable[Metric] = METRICS) -> MetricEstimates:
    return {metric.key: estimate_metric(metric, rows) for metric in metrics}


def estimate_metric(metric: Metric, rows: Sequence[ItemScores]) -> Estimate:
    known = [(part, row.speaker) for row in rows if (part := metric.ratio(row)) is not None]
    return estimate([part for part, _ in known], groups=[speaker for _, speaker in known], is_outcome=metric.is_outcome)


def estimate_difference(metric: Metric, rows: Sequence[ItemScores], base: Sequence[ItemScores]) -> Estimate:
    known = {row.id: metric.ratio(row) for row in base}
    pairs = [
        (ours, theirs, row.speaker) for row in rows if (ours := metric.ratio(row)) and (theirs := known.get(row.id))
    ]
    first, second, speakers = zip(*pairs, strict=True) if pairs else ((), (), ())
    return paired_difference(first, second, groups=speakers, is_outcome=metric.is_outcome)


def estimate_differences(rows: Sequence[ItemScores], base: Sequence[ItemScores]) -> MetricEstimates:
    return {metric.key: estimate_difference(metric, rows, base) for metric in METRICS}


def count_looped(rows: Iterable[ItemScores]) -> int:
    """Count the items whose transcript loops; they are wholly wrong in the error rates."""
    return sum(bool(row.looped) for row in rows)


def missing_metrics(scorers: Mapping[str, str]) -> dict[str, str]:
    """Return the reason for each metric whose scorer is missing; `scorers` holds the reason by scorer."""
    return {metric.key: scorers[metric.scorer] for metric in METRICS if metric.scorer in scorers}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Defect of a system."""

    system: str
    name: str
    metric: str
    """Key of the metric that shows it."""
    text: str
    items: tuple[str, ...] = ()


RATE_DIAGNOSES = {
    "silent_rate": ("silence", "says nothing that can be heard", "training may have learned silent or empty clips"),
    "runaway_rate": (
        *("never stops", "does not find the end and is cut"),
        "ends of clips may not be learned, or clips were cut inside words",
    ),
    "early_rate": (
        *("stops at once", "ends long before the text could have been spoken"),
        "clips may be shorter than their texts",
    ),
    "prompt_rate": (
        *("speaks the prompt", "says the words of the reference instead of the text"),
        "references and targets may be the same clips, or the texts may be swapped",
    ),
    "copy_rate": (
        *("copies the reference", "plays the reference back"),
        "references and targets may be the same audio: then copying is the easiest way to a small loss",
    ),
    "repetition_rate": (
        *("repeats itself", "says something again that the text has once"),
        "more training, a lower temperature, or cleaner transcripts may help",
    ),
}
"""Name, effect and likely reason of each diagnosis, by its metric."""


def diagnose(
    rows: Mapping[str, Sequence[ItemScores]],
    estimates: Mapping[str, MetricEstimates],
    differences: Mapping[str, MetricEstimates],
    metadata: Mapping[str, Mapping[str, Any]],
) -> list[Diagnosis]:
    """Diagnose the codec and every model; the order below is that of seriousness."""
    diagnoses = list(_codec(estimates))
    for system, scores in rows.items():
        if system in (REAL, ROUND_TRIP) or not scores:
            continue
        diagnoses += _rates(system, scores, estimates[system], metadata.get(system, {}))
        for check in (_noise, _wrong_speaker, _unintelligible, _silences):
            diagnoses += check(system, scores, estimates)
        if system != BASE and BASE in rows:
            changes, known = differences.get(system, {}), metadata.get(system, {})
            diagnoses += _against_base(system, scores, rows[BASE], changes, known)
    return diagnoses


def _real_mean(estimates: Mapping[str, MetricEstimates], key: str) -> float | None:
    return estimates.get(REAL, {}).get(key, Estimate()).mean


def _rates(
    system: str, rows: Sequence[ItemScores], estimates: MetricEstimates, metadata: Mapping[str, Any]
) -> Iterator[Diagnosis]:
    for metric, (name, effect, reason) in RATE_DIAGNOSES.items():
        share = estimates[metric].mean or 0.0
        items = tuple(row.id for row in rows if (part := METRICS_BY_KEY[metric].ratio(row)) and part.numerator)
        text = f"{system} {effect} in {len(items)} of {estimates[metric].n} items; {reason}"
        if metric == "copy_rate" and metadata.get("loss") is not None:
            text += f". Its loss of {metadata['loss']:.4f} does not show it"
        if share >= MIN_SHARE:
            yield Diagnosis(system, name if share >= MOST else f"{name}, at times", metric, text, items)


def _noise(system: str, rows: Sequence[ItemScores], estimates: Mapping[str, MetricEstimates]) -> Iterator[Diagnosis]:
    real, mos = _real_mean(estimates, "voiced_share"), estimates[system]["distillmos"].mean
    if real is not None and real < MIN_REAL_VOICED:
        return  # a whispered voice, or instruments: pitch says nothing here
    audible = [row for row in rows if row.speech_seconds]
    noisy = tuple(row.id for row in audible if row.voiced_share is not None and row.voiced_share < MAX_NOISE_VOICED)
    if audible and len(noisy) / len(audible) >= MIN_SHARE:
        quality = f"; DistillMOS {mos:.2f}" if mos is not None else ""
        effect = f"hardly any pitch in {len(noisy)} of {len(audible)} items: it is noise or a whisper{quality}"
        name = "noise" if len(noisy) / len(audible) >= MOST else "noise, at times"
        yield Diagnosis(system, name, "voiced_share", f"{system} has {effect}", noisy)


def _wrong_speaker(
    system: str, rows: Sequence[ItemScores], estimates: Mapping[str, MetricEstimates]
) -> Iterator[Diagnosis]:
    nearest, real = estimates[system]["similarity_rank1"], _real_mean(estimates, "similarity_rank1")
    # If real recordings are not told apart either, the encoder is at fault and not the model.
    if nearest.high is None or nearest.high >= MOST or (real is not None and real < MOST):
        return
    items = tuple(row.id for row in rows if row.speaker_rank is not None and row.speaker_rank > 1)
    own, others = estimates[system]["similarity"].mean, estimates[system]["similarity_to_others"].mean
    text = (
        f"{system} is nearer to another speaker in {len(items)} of {nearest.n} items (similarity {own:.2f} to the "
        f"right one, {others:.2f} to the others on average); speakers may be swapped, or references not heeded"
    )
    yield Diagnosis(system, "another speaker's voice", "similarity_rank1", text, items)


def _unintelligible(
    system: str, rows: Sequence[ItemScores], estimates: Mapping[str, MetricEstimates]
) -> Iterator[Diagnosis]:
    wer, real = estimates[system]["wer"], _real_mean(estimates, "wer")
    if wer.low is not None and wer.low > (real or 0.0) + MAX_EXTRA_WER:
        items = tuple(row.id for row in rows if row.word_errors and row.words and row.word_errors >= row.words / 2)
        compared = f", the real recordings have {real:.0%}" if real is not None else ""
        text = f"{system} cannot be understood: {wer.mean:.0%} word errors{compared}"
        yield Diagnosis(system, "cannot be understood", "wer", text, items)
    loops = tuple(row.id for row in rows if row.looped)
    if len(loops) / len(rows) >= MIN_SHARE:
        text = (
            f"the ASR looped in {len(loops)} of {len(rows)} items of {system}, whose words all count as errors. "
            "Listen to them: such items are often silence, noise or the same syllable over and over"
        )
        yield Diagnosis(system, "ASR loops", "loop_rate", text, loops)


def _codec(estimates: Mapping[str, MetricEstimates]) -> Iterator[Diagnosis]:
    """Diagnose a codec that damages speech: no model that uses it can be better."""
    losses = {}
    for key, tolerance in CODEC_TOLERANCE.items():
        metric, before = METRICS_BY_KEY[key], _real_mean(estimates, key)
        after = estimates.get(ROUND_TRIP, {}).get(key, Estimate()).mean
        sign = 1 if tolerance > 0 else -1
        if before is not None and after is not None and (after - before) * sign > abs(tolerance):
            losses[key] = f"{metric.title} {metric.format(before)} and {metric.format(after)}"
    if losses:
        text = f"the codec alone costs much of real recordings (before and after: {'; '.join(losses.values())})"
        yield Diagnosis(ROUND_TRIP, "the codec limits every model", next(iter(losses)), text)


def _silences(system: str, rows: Sequence[ItemScores], estimates: Mapping[str, MetricEstimates]) -> Iterator[Diagnosis]:
    for metric, side in (("leading_silence", "before"), ("trailing_silence", "after")):
        audible = [row for row in rows if row.speech_seconds]
        items = tuple(row.id for row in audible if (getattr(row, metric) or 0.0) > LONG_SILENCE_SECONDS)
        if estimates[system][metric].mean is not None and len(items) / len(rows) >= MIN_SHARE:
            seconds = f"more than {LONG_SILENCE_SECONDS:g} s"
            text = f"{system} is silent for {seconds} {side} {len(items)} of {len(rows)} items"
            yield Diagnosis(system, f"silence {side} items", metric, text, items)


def _against_base(
    system: str,
    rows: Sequence[ItemScores],
    base: Sequence[ItemScores],
    differences: MetricEstimates,
    metadata: Mapping[str, Any],
) -> Iterator[Diagnosis]:
    """Diagnose a model that cannot be told from its base by its audio or its metrics, and a loss that misleads."""
    hashes = {row.id: row.audio_hash for row in base}
    equal = tuple(row.id for row in rows if hashes.get(row.id) == row.audio_hash)
    worse = changed_metrics(differences, improved=False)
    if len(equal) == len(rows):
        text = f"{system} says every item exactly as the base does: the adapter may be empty, or not the one you mean"
        yield Diagnosis(system, "equal to the base", "differences", text, equal)
    elif len(rows) < MIN_ITEMS:
        text = f"{len(rows)} items cannot tell whether {system} is better than the base: give {MIN_ITEMS} or more"
        yield Diagnosis(system, "too few items", "differences", text)
    elif not changed_metrics(differences, improved=True) and any(delta.n for delta in differences.values()):
        text = (
            f"no metric of {system} differs from the base beyond its interval: too few items to tell, too little "
            "training, or a learning rate that is too low"
        )
        if worse:
            text = f"{system} is worse than the base in {', '.join(worse)}, and better in nothing beyond its interval"
        yield Diagnosis(system, "worse than the base" if worse else "no better than the base", "differences", text)
    loss, base_loss = metadata.get("loss"), metadata.get("base_loss")
    if loss is not None and base_loss is not None and loss < base_loss and worse:
        text = (
            f"{system} has a lower loss than its base ({loss:.4f} and {base_loss:.4f}), and yet these are worse: "
            f"{', '.join(worse)}. Judge it by these metrics"
        )
        yield Diagnosis(system, "the loss misleads", "differences", text)


def changed_metrics(differences: MetricEstimates, *, improved: bool) -> list[str]:
    """List the titles of the metrics that differ from the base beyond their interval, and by enough to be heard."""
    changes = [(METRICS_BY_KEY[key], delta.mean or 0.0) for key, delta in differences.items() if delta.excludes_zero]
    return [
        metric.title
        for metric, change in changes
        if abs(change) >= metric.min_difference and metric.is_improvement(change) is improved
    ]
