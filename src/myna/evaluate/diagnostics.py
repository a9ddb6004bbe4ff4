"""Diagnoses: what is plainly wrong with a model, in words, with the metric that shows it and the items to listen to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from myna.core.statistics import Estimate
from myna.evaluate.metrics import METRICS_BY_KEY
from myna.evaluate.scoring import ItemScores
from myna.evaluate.systems import BASE, REAL, ROUND_TRIP

MIN_SHARE = 0.05
"""Share of the items from which a diagnosis is made."""
MOST = 0.5
"""Share from which it is the rule and not the exception."""
MAX_NOISE_VOICED, MIN_REAL_VOICED = 0.25, 0.3
"""An item is noise where less than this share is voiced, if the real recordings have more than that."""
MAX_EXTRA_WER = 0.5
"""Word error rate above that of the real recordings from which speech cannot be understood."""
CODEC_TOLERANCE = {"wer": 0.1, "similarity": -0.15, "distillmos": -1.0}
"""By how much a codec round trip may be worse than the recording."""
LONG_SILENCE_SECONDS = 1.0
Estimates = Mapping[str, Estimate]


@dataclass(frozen=True, slots=True)
class Diagnosis:
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
"""By the metric: name, what happens, and a likely reason."""


def diagnose(
    rows: Mapping[str, Sequence[ItemScores]],
    estimates: Mapping[str, Estimates],
    differences: Mapping[str, Estimates],
    metadata: Mapping[str, Mapping[str, Any]],
) -> list[Diagnosis]:
    """Diagnoses of the codec and of every model, the most serious first as they stand here."""
    diagnoses = list(_codec(estimates))
    for system, scores in rows.items():
        if system in (REAL, ROUND_TRIP) or not scores:
            continue
        diagnoses += _rates(system, scores, estimates[system], metadata.get(system, {}))
        for check in (_noise, _wrong_speaker, _unintelligible, _silences):
            diagnoses += check(system, scores, estimates)
        if system != BASE and BASE in rows:
            diagnoses += _no_gain(system, scores, rows[BASE], differences.get(system, {}))
            diagnoses += _misleading_loss(system, differences.get(system, {}), metadata.get(system, {}))
    return diagnoses


def _real_mean(estimates: Mapping[str, Estimates], key: str) -> float | None:
    return estimates.get(REAL, {}).get(key, Estimate()).mean


def _rates(
    system: str, rows: Sequence[ItemScores], estimates: Estimates, metadata: Mapping[str, Any]
) -> Iterator[Diagnosis]:
    for metric, (name, effect, reason) in RATE_DIAGNOSES.items():
        share = estimates[metric].mean or 0.0
        items = tuple(row.id for row in rows if (part := METRICS_BY_KEY[metric].ratio(row)) and part.numerator)
        text = f"{system} {effect} in {len(items)} of {estimates[metric].n} items; {reason}"
        if metric == "copy_rate" and metadata.get("loss") is not None:
            text += f". Its loss of {metadata['loss']:.4f} does not show it"
        if share >= MIN_SHARE:
            yield Diagnosis(system, name if share >= MOST else f"{name}, at times", metric, text, items)


def _noise(system: str, rows: Sequence[ItemScores], estimates: Mapping[str, Estimates]) -> Iterator[Diagnosis]:
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


def _wrong_speaker(system: str, rows: Sequence[ItemScores], estimates: Mapping[str, Estimates]) -> Iterator[Diagnosis]:
    nearest, real = estimates[system]["similarity_rank1"], _real_mean(estimates, "similarity_rank1")
    # Where real recordings are not told apart either, the encoder is at fault and not the model.
    if nearest.high is None or nearest.high >= MOST or (real is not None and real < MOST):
        return
    items = tuple(row.id for row in rows if row.speaker_rank is not None and row.speaker_rank > 1)
    own, others = estimates[system]["similarity"].mean, estimates[system]["similarity_to_others"].mean
    text = (
        f"{system} is nearer to another speaker in {len(items)} of {nearest.n} items (similarity {own:.2f} to the "
        f"right one, {others:.2f} to the others on average); speakers may be swapped, or references not heeded"
    )
    yield Diagnosis(system, "another speaker's voice", "similarity_rank1", text, items)


def _unintelligible(system: str, rows: Sequence[ItemScores], estimates: Mapping[str, Estimates]) -> Iterator[Diagnosis]:
    wer, real = estimates[system]["wer"], _real_mean(estimates, "wer") or 0.0
    if wer.low is not None and wer.low > real + MAX_EXTRA_WER:
        items = tuple(row.id for row in rows if row.word_errors and row.words and row.word_errors >= row.words / 2)
        text = f"{system} cannot be understood: {wer.mean:.0%} word errors, the real recordings have {real:.0%}"
        yield Diagnosis(system, "cannot be understood", "wer", text, items)
    loops = tuple(row.id for row in rows if row.looped)
    if len(loops) / len(rows) >= MIN_SHARE:
        text = (
            f"the ASR looped in {len(loops)} of {len(rows)} items of {system}, whose words all count as errors. "
            "Listen to them: such items are often silence, noise or the same syllable over and over"
        )
        yield Diagnosis(system, "ASR loops", "loop_rate", text, loops)


def _codec(estimates: Mapping[str, Estimates]) -> Iterator[Diagnosis]:
    """A codec that damages speech: no model that uses it can be better."""
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


def _silences(system: str, rows: Sequence[ItemScores], estimates: Mapping[str, Estimates]) -> Iterator[Diagnosis]:
    for metric, side in (("leading_silence", "before"), ("trailing_silence", "after")):
        audible = [row for row in rows if row.speech_seconds]
        items = tuple(row.id for row in audible if (getattr(row, metric) or 0.0) > LONG_SILENCE_SECONDS)
        if estimates[system][metric].mean is not None and len(items) / len(rows) >= MIN_SHARE:
            seconds = f"more than {LONG_SILENCE_SECONDS:g} s"
            text = f"{system} is silent for {seconds} {side} {len(items)} of {len(rows)} items"
            yield Diagnosis(system, f"silence {side} items", metric, text, items)


def _no_gain(
    system: str, rows: Sequence[ItemScores], base: Sequence[ItemScores], differences: Estimates
) -> Iterator[Diagnosis]:
    """A model that cannot be told from its base, by its audio or by its metrics."""
    hashes = {row.id: row.audio_hash for row in base}
    equal = tuple(row.id for row in rows if hashes.get(row.id) == row.audio_hash)
    if len(equal) == len(rows):
        text = f"{system} says every item exactly as the base does: the adapter may be empty, or not the one you mean"
        yield Diagnosis(system, "equal to the base", "differences", text, equal)
    elif changed_metrics(differences, improved=True) or not any(delta.n for delta in differences.values()):
        return
    elif worse := changed_metrics(differences, improved=False):
        text = f"{system} is worse than the base in {', '.join(worse)}, and better in nothing beyond its interval"
        yield Diagnosis(system, "worse than the base", "differences", text)
    else:
        text = (
            f"no metric of {system} differs from the base beyond its interval: too few items to tell, too little "
            "training, or a learning rate that is too low"
        )
        yield Diagnosis(system, "no better than the base", "differences", text)


def changed_metrics(differences: Estimates, *, improved: bool) -> list[str]:
    """Titles of the metrics that differ from the base beyond their interval, and by enough to be heard."""
    changes = [(METRICS_BY_KEY[key], delta.mean or 0.0) for key, delta in differences.items() if delta.excludes_zero]
    return [
        metric.title
        for metric, change in changes
        if abs(change) >= metric.min_difference and metric.is_improvement(change) is improved
    ]


def _misleading_loss(system: str, differences: Estimates, metadata: Mapping[str, Any]) -> Iterator[Diagnosis]:
    loss, base = metadata.get("loss"), metadata.get("base_loss")
    worse = changed_metrics(differences, improved=False)
    if loss is not None and base is not None and loss < base and worse:
        text = (
            f"{system} has a lower loss than its base ({loss:.4f} and {base:.4f}), and yet these are worse: "
            f"{', '.join(worse)}. Judge it by these metrics"
        )
        yield Diagnosis(system, "the loss misleads", "differences", text)
