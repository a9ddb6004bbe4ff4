"""What is plainly wrong with a model, in words, with the column that shows it and the lines to listen to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from myna.evaluate.metrics import BY_KEY
from myna.evaluate.scoring import COPY, ItemScores
from myna.evaluate.systems import BASE, REAL, ROUND_TRIP
from myna.statistics import Estimate

TOLD_FROM = 0.05
"""A share of lines from which a fault is told."""
MOST = 0.5
"""A share from which it is the rule and not the exception."""
NOISY, VOICED_ENOUGH = 0.25, 0.3
"""Sound is noise where less than this has a pitch, if the real recordings have more than that."""
NOT_UNDERSTOOD = 0.5
"""Word errors from which nobody would follow, above those of the real recordings."""
CODEC_LOSES = {"wer": 0.1, "similarity": -0.15, "distillmos": -1.0}
"""By how much a round trip may be worse than the recording before it is told."""
LONG_SILENCE = 1.0
"""Seconds before or after a line that nobody wants."""
Estimates = Mapping[str, Estimate]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    system: str
    name: str
    column: str
    """The one that shows it."""
    text: str
    lines: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "lines": list(self.lines)}


SHARES: tuple[tuple[str, str, Callable[[ItemScores], bool | None], str, str], ...] = (
    (
        "silent_rate",
        "silence",
        lambda row: row.silent,
        "says nothing that can be heard",
        "training may have learned silent or empty clips",
    ),
    (
        "runaway_rate",
        "never stops",
        lambda row: row.stopped is False,
        "does not find the end and is cut",
        "ends of clips may not be learned, or clips were cut inside words",
    ),
    (
        "early_rate",
        "stops at once",
        lambda row: row.early,
        "ends long before the line could have been said",
        "clips may be shorter than their texts",
    ),
    (
        "prompt_rate",
        "speaks the prompt",
        lambda row: row.says_prompt,
        "says the words of the reference instead of the line",
        "references and targets may be the same clips, or the texts may be swapped",
    ),
    (
        "copy_rate",
        "copies the reference",
        lambda row: None if row.copied is None else row.copied >= COPY,
        "plays the reference back",
        "references and targets may be the same sound: then copying is the easiest way to a small loss",
    ),
    (
        "repetition_rate",
        "repeats itself",
        lambda row: row.repeats,
        "says something again that the text has once",
        "more training, a lower temperature, or cleaner transcripts may help",
    ),
)
"""Column, name, the question to a line, what happens, and a likely reason."""


def diagnose(
    rows: Mapping[str, Sequence[ItemScores]],
    estimates: Mapping[str, Estimates],
    deltas: Mapping[str, Estimates],
    about: Mapping[str, Mapping[str, Any]],
) -> list[Diagnosis]:
    """Of every system that is a model, the gravest first as they stand here."""
    found: list[Diagnosis] = _codec(estimates)
    for system, heard in rows.items():
        if system in (REAL, ROUND_TRIP) or not heard:
            continue
        found += _shares(system, heard, estimates[system], about.get(system, {}))
        found += _noise(system, heard, estimates)
        found += _voice(system, heard, estimates)
        found += _words(system, heard, estimates)
        found += _silences(system, heard, estimates)
        if system != BASE and BASE in rows:
            found += _no_gain(system, heard, rows[BASE], deltas.get(system, {}))
            found += _loss_misleads(system, deltas.get(system, {}), about.get(system, {}))
    return found


def _shares(system: str, rows: Sequence[ItemScores], estimates: Estimates, about: Mapping[str, Any]) -> list[Diagnosis]:
    found = []
    for column, name, ask, what, why in SHARES:
        share = estimates[column].mean
        if share is None or share < TOLD_FROM:
            continue
        lines = tuple(row.id for row in rows if ask(row))
        text = f"{system} {what} in {len(lines)} of {estimates[column].n} lines; {why}"
        loss = about.get("loss")
        if name == "copies the reference" and loss is not None:
            text += f". Its loss of {loss:.4f} does not show it"
        found.append(Diagnosis(system, name if share >= MOST else f"{name}, at times", column, text, lines))
    return found


def _noise(system: str, rows: Sequence[ItemScores], estimates: Mapping[str, Estimates]) -> list[Diagnosis]:
    real = estimates.get(REAL, {}).get("voiced", Estimate()).mean
    if real is not None and real < VOICED_ENOUGH:
        return []  # a whispered voice, or instruments: pitch says nothing here
    noisy = tuple(row.id for row in rows if row.spoken and row.voiced is not None and row.voiced < NOISY)
    sounding = sum(bool(row.spoken) for row in rows)
    if not sounding or len(noisy) / sounding < TOLD_FROM:
        return []
    opinion = estimates[system]["distillmos"].mean
    heard = f"; DistillMOS {opinion:.2f}" if opinion is not None else ""
    text = f"{system} has hardly any pitch in {len(noisy)} of {sounding} lines: it is noise or a whisper{heard}"
    return [Diagnosis(system, "noise" if len(noisy) / sounding >= MOST else "noise, at times", "voiced", text, noisy)]


def _voice(system: str, rows: Sequence[ItemScores], estimates: Mapping[str, Estimates]) -> list[Diagnosis]:
    nearest = estimates[system]["similarity_rank1"]
    real = estimates.get(REAL, {}).get("similarity_rank1", Estimate()).mean
    # Where real recordings are not told apart either, the ear is at fault and not the model.
    if nearest.high is None or nearest.high >= MOST or (real is not None and real < MOST):
        return []
    lines = tuple(row.id for row in rows if row.rank is not None and row.rank > 1)
    own, others = estimates[system]["similarity"].mean, estimates[system]["similarity_to_others"].mean
    text = (
        f"{system} is nearer to another speaker in {len(lines)} of {nearest.n} lines (similarity {own:.2f} to the "
        f"right one, {others:.2f} to the others on average); speakers may be swapped, or references not heeded"
    )
    return [Diagnosis(system, "another's voice", "similarity_rank1", text, lines)]


def _words(system: str, rows: Sequence[ItemScores], estimates: Mapping[str, Estimates]) -> list[Diagnosis]:
    wrong = estimates[system]["wer"]
    real = estimates.get(REAL, {}).get("wer", Estimate()).mean or 0.0
    found = []
    if wrong.low is not None and wrong.low > real + NOT_UNDERSTOOD:
        lines = tuple(row.id for row in rows if row.word_errors and row.words and row.word_errors >= row.words / 2)
        text = f"{system} cannot be understood: {wrong.mean:.0%} word errors, the real recordings have {real:.0%}"
        found.append(Diagnosis(system, "cannot be understood", "wer", text, lines))
    loops = tuple(row.id for row in rows if row.looped)
    if rows and len(loops) / len(rows) >= TOLD_FROM:
        text = (
            f"the recogniser went round in circles in {len(loops)} of {len(rows)} lines of {system}; they are not in "
            "its word errors. Listen to them: such lines are often silence, noise or the same syllable over and over"
        )
        found.append(Diagnosis(system, "not understood", "loop_rate", text, loops))
    return found


def _codec(estimates: Mapping[str, Estimates]) -> list[Diagnosis]:
    """A codec that damages speech: no model that speaks through it can be better."""
    real, through = estimates.get(REAL), estimates.get(ROUND_TRIP)
    if real is None or through is None:
        return []
    lost = []
    for key, by in CODEC_LOSES.items():
        before, after = real[key].mean, through[key].mean
        if before is not None and after is not None and (after - before) * (1 if by > 0 else -1) > abs(by):
            lost.append((key, f"{BY_KEY[key].title} {BY_KEY[key].show(before)} and {BY_KEY[key].show(after)}"))
    if not lost:
        return []
    text = f"the codec alone costs much of real recordings (before and after: {'; '.join(told for _, told in lost)})"
    return [Diagnosis(ROUND_TRIP, "the codec limits every model", lost[0][0], text)]


def _silences(system: str, rows: Sequence[ItemScores], estimates: Mapping[str, Estimates]) -> list[Diagnosis]:
    found = []
    for column, name, side in (("leading_silence", "leading", "before"), ("trailing_silence", "trailing", "after")):
        mean = estimates[system][column].mean
        lines = tuple(row.id for row in rows if row.spoken and (getattr(row, name) or 0.0) > LONG_SILENCE)
        if mean is not None and rows and len(lines) / len(rows) >= TOLD_FROM:
            text = f"{system} is silent for more than {LONG_SILENCE:g} s {side} {len(lines)} of {len(rows)} lines"
            found.append(Diagnosis(system, f"silence {side} lines", column, text, lines))
    return found


def _no_gain(system: str, rows: Sequence[ItemScores], base: Sequence[ItemScores], deltas: Estimates) -> list[Diagnosis]:
    """A model that cannot be told from its base, by its sounds or by what is heard of them."""
    said = {row.id: row.sound_hash for row in base}
    same = tuple(row.id for row in rows if said.get(row.id) == row.sound_hash)
    if rows and len(same) == len(rows):
        text = f"{system} says every line exactly as the base does: the adapter may be empty, or not the one you mean"
        return [Diagnosis(system, "equal to the base", "deltas", text, same)]
    better, worse = changed(deltas, for_the_better=True), changed(deltas, for_the_better=False)
    if better or not any(delta.n for delta in deltas.values()):
        return []
    if worse:
        text = f"{system} is worse than the base in {', '.join(worse)}, and better in nothing beyond its interval"
        return [Diagnosis(system, "worse than the base", "deltas", text)]
    text = (
        f"nothing that is heard of {system} differs from the base beyond its interval: too few lines to tell, too "
        "little training, or a learning rate that is too low"
    )
    return [Diagnosis(system, "no better than the base", "deltas", text)]


def changed(deltas: Estimates, *, for_the_better: bool) -> list[str]:
    """Titles of the columns that differ from the base beyond their interval, and by enough to be heard."""
    found = []
    for key, delta in deltas.items():
        column = BY_KEY[key]
        if delta.mean is None or not delta.excludes_zero or abs(delta.mean) < column.least:
            continue
        if column.better != "near real" and ((delta.mean > 0) == (column.better == "higher")) == for_the_better:
            found.append(column.title)
    return found


def _loss_misleads(system: str, deltas: Estimates, about: Mapping[str, Any]) -> list[Diagnosis]:
    loss, base = about.get("loss"), about.get("base_loss")
    if loss is None or base is None or loss >= base:
        return []
    worse = changed(deltas, for_the_better=False)
    if not worse:
        return []
    text = (
        f"{system} has a lower loss than its base ({loss:.4f} and {base:.4f}), and yet these are worse: "
        f"{', '.join(worse)}. Judge it by what is heard"
    )
    return [Diagnosis(system, "the loss misleads", "deltas", text)]
