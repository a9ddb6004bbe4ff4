"""Every figure of an evaluation, said once: what a line adds to it, which ear it needs, and which way is better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from myna.evaluate.hearing import COPY, Row
from myna.evaluate.statistics import Part

Better = Literal["higher", "lower", "near real"]


@dataclass(frozen=True, slots=True)
class Column:
    key: str
    title: str
    about: str
    part: Callable[[Row], Part | None]
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


def _value(name: str) -> Callable[[Row], Part | None]:
    def part(row: Row) -> Part | None:
        value = getattr(row, name)
        return None if value is None else Part(float(value))

    return part


def _share(ask: Callable[[Row], bool | None]) -> Callable[[Row], Part | None]:
    def part(row: Row) -> Part | None:
        answer = ask(row)
        return None if answer is None else Part(float(answer))

    return part


def _errors(errors: str, out_of: str) -> Callable[[Row], Part | None]:
    """Of lines that the recogniser understood: where it went round in circles its text says nothing about the sound."""

    def part(row: Row) -> Part | None:
        wrong, due = getattr(row, errors), getattr(row, out_of)
        return None if row.looped is not False or not due else Part(float(wrong), float(due))

    return part


COLUMNS = (
    Column(
        "wer",
        "word errors",
        "words changed, added or dropped",
        _errors("word_errors", "words"),
        "lower",
        "words",
        True,
        least=0.005,
    ),
    Column(
        "cer",
        "letter errors",
        "the same by letters",
        _errors("letter_errors", "letters"),
        "lower",
        "words",
        True,
        least=0.002,
    ),
    Column(
        "similarity",
        "similarity",
        "to other clips of the speaker; 1 is the same voice",
        _value("similarity"),
        "higher",
        "voice",
        least=0.005,
    ),
    Column(
        "similarity_to_others",
        "similarity to others",
        "to the other speakers, for contrast",
        _value("similarity_to_others"),
        "near real",
        "voice",
    ),
    Column(
        "similarity_rank1",
        "own voice is nearest",
        "lines nearer to their own speaker than to any other",
        _share(lambda row: None if row.rank is None else row.rank == 1),
        "higher",
        "voice",
        True,
    ),
    Column("distillmos", "DistillMOS", "quality from 1 to 5", _value("distillmos"), "higher", "distillmos", least=0.02),
    Column("dnsmos", "DNSMOS", "quality from 1 to 5, as for calls", _value("dnsmos"), "higher", "dnsmos", least=0.02),
    Column("stop_rate", "stops by itself", "lines that found their end", _value("stopped"), "higher", is_share=True),
    Column(
        "runaway_rate",
        "runs away",
        "lines cut at the longest length",
        _share(lambda row: None if row.stopped is None else not row.stopped),
        "lower",
        is_share=True,
    ),
    Column(
        "early_rate",
        "broken off",
        "lines that end long before they could be said",
        _value("early"),
        "lower",
        is_share=True,
    ),
    Column(
        "silent_rate", "silent", "lines in which there is nothing to hear", _value("silent"), "lower", is_share=True
    ),
    Column(
        "repetition_rate",
        "repeats itself",
        "lines in which words come again that the text has once",
        _share(lambda row: row.repeats),
        "lower",
        "words",
        True,
    ),
    Column(
        "prompt_rate",
        "says the prompt",
        "lines in which the reference's words are heard instead",
        _share(lambda row: row.says_prompt),
        "lower",
        "words",
        True,
    ),
    Column(
        "copy_rate",
        "copies the reference",
        "lines that are the reference's own sound",
        _share(lambda row: None if row.copied is None else row.copied >= COPY),
        "lower",
        is_share=True,
    ),
    Column(
        "loop_rate",
        "not understood",
        "lines in which the recogniser went round in circles; they have no word errors",
        _share(lambda row: row.looped),
        "lower",
        "words",
        True,
    ),
    Column("leading_silence", "silence before", "seconds", _value("leading"), "near real"),
    Column("trailing_silence", "silence after", "seconds", _value("trailing"), "near real"),
    Column("pauses", "pauses", "share of the time", _value("pauses"), "near real", is_share=True),
    Column("pace", "pace", "letters a second", _value("pace"), "near real"),
    Column("pitch", "pitch", "hertz", _value("pitch"), "near real"),
    Column("pitch_range", "pitch range", "semitones", _value("pitch_range"), "near real"),
    Column(
        "voiced",
        "voiced",
        "share of sound that has a pitch; noise has none",
        _value("voiced"),
        "near real",
        is_share=True,
    ),
)

BY_KEY = {column.key: column for column in COLUMNS}
