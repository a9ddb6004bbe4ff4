"""Every figure of an evaluation, said once: what a line adds to it, which ear it needs, and which way is better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from myna.evaluate.scoring import COPY, ItemScores
from myna.statistics import RatioPart

Better = Literal["higher", "lower", "near real"]


@dataclass(frozen=True, slots=True)
class Metric:
    key: str
    title: str
    about: str
    part: Callable[[ItemScores], RatioPart | None]
    """None for a line that says nothing about this figure."""
    better: Better
    ear: Literal["", "words", "voice", "distillmos", "dnsmos"] = ""
    is_share: bool = False
    least: float = 0.0
    """A difference smaller than this is nothing that anyone hears, however sure it is."""

    def show(self, value: float | None, *, signed: bool = False) -> str:
        if value is None:
            return "not measured"
        if self.is_share:
            return f"{100 * value:+.1f}" if signed else f"{100 * value:.1f} %"
        return f"{value:+.3f}" if signed else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _value(name: str) -> Callable[[ItemScores], RatioPart | None]:
    def part(row: ItemScores) -> RatioPart | None:
        value = getattr(row, name)
        return None if value is None else RatioPart(float(value))

    return part


def _share(ask: Callable[[ItemScores], bool | None]) -> Callable[[ItemScores], RatioPart | None]:
    def part(row: ItemScores) -> RatioPart | None:
        answer = ask(row)
        return None if answer is None else RatioPart(float(answer))

    return part


def _errors(errors: str, out_of: str) -> Callable[[ItemScores], RatioPart | None]:
    """Of lines that the recogniser understood: where it went round in circles its text says nothing about the sound."""

    def part(row: ItemScores) -> RatioPart | None:
        wrong, due = getattr(row, errors), getattr(row, out_of)
        return None if row.looped is not False or not due else RatioPart(float(wrong), float(due))

    return part


METRICS = (
    Metric(
        "wer",
        "word errors",
        "words changed, added or dropped",
        _errors("word_errors", "words"),
        "lower",
        "words",
        True,
        least=0.005,
    ),
    Metric(
        "cer",
        "letter errors",
        "the same by letters",
        _errors("letter_errors", "letters"),
        "lower",
        "words",
        True,
        least=0.002,
    ),
    Metric(
        "similarity",
        "similarity",
        "to other clips of the speaker; 1 is the same voice",
        _value("similarity"),
        "higher",
        "voice",
        least=0.005,
    ),
    Metric(
        "similarity_to_others",
        "similarity to others",
        "to the other speakers, for contrast",
        _value("similarity_to_others"),
        "near real",
        "voice",
    ),
    Metric(
        "similarity_rank1",
        "own voice is nearest",
        "lines nearer to their own speaker than to any other",
        _share(lambda row: None if row.rank is None else row.rank == 1),
        "higher",
        "voice",
        True,
    ),
    Metric("distillmos", "DistillMOS", "quality from 1 to 5", _value("distillmos"), "higher", "distillmos", least=0.02),
    Metric("dnsmos", "DNSMOS", "quality from 1 to 5, as for calls", _value("dnsmos"), "higher", "dnsmos", least=0.02),
    Metric("stop_rate", "stops by itself", "lines that found their end", _value("stopped"), "higher", is_share=True),
    Metric(
        "runaway_rate",
        "runs away",
        "lines cut at the longest length",
        _share(lambda row: None if row.stopped is None else not row.stopped),
        "lower",
        is_share=True,
    ),
    Metric(
        "early_rate",
        "broken off",
        "lines that end long before they could be said",
        _value("early"),
        "lower",
        is_share=True,
    ),
    Metric(
        "silent_rate", "silent", "lines in which there is nothing to hear", _value("silent"), "lower", is_share=True
    ),
    Metric(
        "repetition_rate",
        "repeats itself",
        "lines in which words come again that the text has once",
        _share(lambda row: row.repeats),
        "lower",
        "words",
        True,
    ),
    Metric(
        "prompt_rate",
        "says the prompt",
        "lines in which the reference's words are heard instead",
        _share(lambda row: row.says_prompt),
        "lower",
        "words",
        True,
    ),
    Metric(
        "copy_rate",
        "copies the reference",
        "lines that are the reference's own sound",
        _share(lambda row: None if row.copied is None else row.copied >= COPY),
        "lower",
        is_share=True,
    ),
    Metric(
        "loop_rate",
        "not understood",
        "lines in which the recogniser went round in circles; they have no word errors",
        _share(lambda row: row.looped),
        "lower",
        "words",
        True,
    ),
    Metric("leading_silence", "silence before", "seconds", _value("leading"), "near real"),
    Metric("trailing_silence", "silence after", "seconds", _value("trailing"), "near real"),
    Metric("pauses", "pauses", "share of the time", _value("pauses"), "near real", is_share=True),
    Metric("pace", "pace", "letters a second", _value("pace"), "near real"),
    Metric("pitch", "pitch", "hertz", _value("pitch"), "near real"),
    Metric("pitch_range", "pitch range", "semitones", _value("pitch_range"), "near real"),
    Metric(
        "voiced",
        "voiced",
        "share of sound that has a pitch; noise has none",
        _value("voiced"),
        "near real",
        is_share=True,
    ),
)

BY_KEY = {column.key: column for column in METRICS}
