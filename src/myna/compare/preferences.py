"""What listeners prefer: their answers on the disk, and what can be concluded from them.

FOLDER/preferences/LISTENER.json   one file each, so that nobody's answers can be overwritten by another's
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from myna.errors import DataError
from myna.io import replacing
from myna.statistics import LEVEL

FORMAT = "myna-preferences-1"
TIE = "tie"
LONGEST = 200
"""Letters of a name; ids are shorter still."""
STEPS = 60
"""Halvings of an interval until it is known to the last digit."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Two sounds of one line. Names of sounds tell nothing; who made them is known here alone."""

    id: str
    line: str
    text: str
    sounds: tuple[str, str]
    """In the order in which they are offered."""
    systems: tuple[str, str]

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "line": self.line,
            "text": self.text,
            "sounds": list(self.sounds),
            "systems": list(self.systems),
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Trial:
        (one, other), (first, second) = told["sounds"], told["systems"]
        return cls(told["id"], told["line"], told["text"], (one, other), (first, second))


@dataclass(frozen=True, slots=True)
class ListenerAnswers:
    id: str
    name: str
    answers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """By trial: the sound that was preferred, or `tie`, and when."""

    def to_json(self) -> dict[str, Any]:
        answers = {trial: {"choice": choice, "at": at} for trial, (choice, at) in sorted(self.answers.items())}
        return {"format": FORMAT, "listener": {"id": self.id, "name": self.name}, "answers": answers}

    def with_answers_of(self, other: ListenerAnswers) -> ListenerAnswers:
        """Both together; where both have answered, the later answer counts."""
        answers = dict(self.answers)
        for trial, (choice, at) in other.answers.items():
            if trial not in answers or at >= answers[trial][1]:
                answers[trial] = (choice, at)
        return ListenerAnswers(self.id, other.name or self.name, answers)


def read_listener(content: str | bytes, where: str) -> ListenerAnswers:
    """One listener's answers as the page gives them."""
    hint = "give the file that the page of `myna compare` saved"
    try:
        told = json.loads(content)
        if told["format"] != FORMAT:
            raise DataError(f"{where} has the format {told['format']}, not {FORMAT}", hint=hint)
        id, name = told["listener"]["id"], told["listener"]["name"]
        answers = {trial: (answer["choice"], answer["at"]) for trial, answer in told["answers"].items()}
        texts = [id, name, *answers, *(text for answer in answers.values() for text in answer)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{where} holds no preferences: {type(error).__name__} {error}", hint=hint) from None
    if not all(isinstance(text, str) and len(text) <= LONGEST for text in texts):
        raise DataError(f"{where} holds answers that are no short texts", hint=hint)
    if not re.fullmatch(r"[0-9a-z]{8,64}", id):
        raise DataError(f"{where} names a listener {id!r}, which is no id", hint=hint)
    return ListenerAnswers(id, name, answers)


def add_listener(folder: Path, listener: ListenerAnswers) -> ListenerAnswers:
    """Into the folder of a comparison, whole or not at all. What the same listener answered before is kept."""
    file = folder / "preferences" / f"{listener.id}.json"
    if file.is_file():
        listener = read_listener(file.read_bytes(), str(file)).with_answers_of(listener)
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(listener.to_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return listener


def listeners_of(folder: Path) -> list[ListenerAnswers]:
    return [read_listener(file.read_bytes(), str(file)) for file in sorted((folder / "preferences").glob("*.json"))]


@dataclass(frozen=True, slots=True)
class PreferenceCount:
    """How often each of two was preferred, and how often neither."""

    systems: tuple[str, str]
    wins: tuple[int, int]
    ties: int

    @property
    def decided(self) -> int:
        return sum(self.wins)

    @property
    def share(self) -> float | None:
        """Of the first, among answers that prefer one."""
        return self.wins[0] / self.decided if self.decided else None

    @property
    def interval(self) -> tuple[float, float]:
        return interval(self.wins[0], self.decided)

    @property
    def p(self) -> float:
        """How likely a split at least as uneven is where nobody can tell: the sign test, without the ties."""
        fewer = sum(math.comb(self.decided, wins) for wins in range(min(self.wins) + 1))
        return min(1.0, float(2 * fewer / 2**self.decided))

    @property
    def preferred(self) -> str | None:
        """Whom the interval is for; None where it holds a half."""
        low, high = self.interval
        return self.systems[0] if low > 0.5 else self.systems[1] if high < 0.5 else None

    def to_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {
            "systems": list(self.systems),
            "wins": list(self.wins),
            "ties": self.ties,
            "share": self.share,
            "low": low,
            "high": high,
            "p": self.p,
            "preferred": self.preferred,
        }


@dataclass(frozen=True, slots=True)
class Preferences:
    """The sum of all listeners' answers."""

    pairs: list[PreferenceCount]
    lines: list[tuple[str, PreferenceCount]]
    """By line and pair, those that were answered."""
    listeners: list[tuple[str, int]]
    """Names, and how many answers each has given that count here."""
    strange: int = 0
    """Answers about sounds that this comparison does not have."""

    def to_json(self) -> dict[str, Any]:
        return {
            "listeners": [{"name": name, "answers": count} for name, count in self.listeners],
            "pairs": [pair.to_json() for pair in self.pairs],
            "lines": [{"line": line, **count.to_json()} for line, count in self.lines],
            "answers_not_counted": self.strange,
        }


def add_up(trials: Sequence[Trial], listeners: Iterable[ListenerAnswers], order: Sequence[str]) -> Preferences:
    """`order` says which of two systems comes first, however they were offered."""
    known = {trial.id: trial for trial in trials}
    place = {name: number for number, name in enumerate(order)}
    of_pair: dict[tuple[str, str], list[int]] = {}
    of_line: dict[tuple[str, tuple[str, str]], list[int]] = {}
    for trial in trials:
        of_pair.setdefault(_ordered(trial, place), [0, 0, 0])
    counted, strange = [], 0
    for listener in listeners:
        mine = 0
        for id, (choice, _) in listener.answers.items():
            if id not in known or choice not in (*known[id].sounds, TIE):
                strange += 1
                continue
            mine += 1
            asked = known[id]
            pair = _ordered(asked, place)
            which = 2 if choice == TIE else pair.index(asked.systems[asked.sounds.index(choice)])
            of_pair[pair][which] += 1
            of_line.setdefault((asked.line, pair), [0, 0, 0])[which] += 1
        counted.append((listener.name or listener.id, mine))
    return Preferences(
        [_count(pair, counts) for pair, counts in of_pair.items()],
        [(line, _count(pair, counts)) for (line, pair), counts in sorted(of_line.items())],
        counted,
        strange,
    )


def _ordered(trial: Trial, place: Mapping[str, int]) -> tuple[str, str]:
    one, other = trial.systems
    return (one, other) if place[one] < place[other] else (other, one)


def _count(pair: tuple[str, str], counts: Sequence[int]) -> PreferenceCount:
    return PreferenceCount(pair, (counts[0], counts[1]), counts[2])


def interval(wins: int, of: int) -> tuple[float, float]:
    """Two-sided and exact (Clopper and Pearson): all shares at which so many wins would be no surprise."""
    low, low_of_the_other = lowest_shares(of, [wins, of - wins])
    return float(low), float(1 - low_of_the_other)


def lowest_shares(of: int, wins: Sequence[int]) -> npt.NDArray[np.float64]:
    """The lower ends of the intervals for these numbers of wins; upper ends are the same from the other side."""
    every = np.arange(of + 1)
    ways = np.array([math.lgamma(of + 1) - math.lgamma(k + 1) - math.lgamma(of - k + 1) for k in every])
    won = np.array(wins)
    at_least = every >= won[:, None]
    low, high = np.zeros(len(won)), np.ones(len(won))
    for _ in range(STEPS):
        middle = (low + high) / 2
        chances = np.exp(ways + every * np.log(middle)[:, None] + (of - every) * np.log1p(-middle)[:, None])
        too_low = (chances * at_least).sum(axis=1) < (1 - LEVEL) / 2
        low, high = np.where(too_low, middle, low), np.where(too_low, high, middle)
    return np.where(won == 0, 0.0, low)
