"""Preferences of listeners: their answers on disk, their sum, and its exact binomial statistics.

FOLDER/preferences/LISTENER.json   a file for each listener, so that nobody's answers overwrite another's
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from myna.core.errors import DataError
from myna.core.io import atomic_write
from myna.core.optional import import_optional
from myna.core.statistics import CONFIDENCE_LEVEL

FORMAT = "myna-preferences-1"
TIE = "tie"
MAX_TEXT_LENGTH = 200
"""Characters of a listener's name; ids are shorter still."""
INSTALL = 'pip install "myna[evaluate]"'


@dataclass(frozen=True, slots=True)
class ListeningTrial:
    """Two sounds of one item. Ids of sounds reveal nothing; `systems` says which system made which."""

    id: str
    item: str
    text: str
    sounds: tuple[str, str]
    """In the order in which they are offered."""
    systems: tuple[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> ListeningTrial:
        (first, second), systems = row["sounds"], row["systems"]
        return cls(row["id"], row["item"], row["text"], (first, second), (systems[0], systems[1]))


@dataclass(frozen=True, slots=True)
class ListenerAnswers:
    """The answers of one listener."""

    id: str
    name: str
    answers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """By trial: the id of the preferred sound, or `tie`, and the time of the answer."""

    def to_json(self) -> dict[str, Any]:
        answers = {trial: {"choice": choice, "at": at} for trial, (choice, at) in sorted(self.answers.items())}
        return {"format": FORMAT, "listener": {"id": self.id, "name": self.name}, "answers": answers}

    def merged_with(self, other: ListenerAnswers) -> ListenerAnswers:
        """Both together; of two answers to one trial the later counts."""
        answers = dict(self.answers)
        for trial, (choice, at) in other.answers.items():
            if trial not in answers or at >= answers[trial][1]:
                answers[trial] = (choice, at)
        return ListenerAnswers(self.id, other.name or self.name, answers)


def parse_listener_answers(content: str | bytes, source: str) -> ListenerAnswers:
    """One listener's answers as the page saves them; `source` is for error messages."""
    hint = "give the file that the page of `myna compare` saved"
    try:
        row = json.loads(content)
        if row["format"] != FORMAT:
            raise DataError(f"{source} has the format {row['format']}, not {FORMAT}", hint=hint)
        id, name = row["listener"]["id"], row["listener"]["name"]
        answers = {trial: (answer["choice"], answer["at"]) for trial, answer in row["answers"].items()}
        texts = [id, name, *answers, *(text for answer in answers.values() for text in answer)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{source} holds no preferences: {type(error).__name__} {error}", hint=hint) from None
    if not all(isinstance(text, str) and len(text) <= MAX_TEXT_LENGTH for text in texts):
        raise DataError(f"{source} holds answers that are no short texts", hint=hint)
    if not re.fullmatch(r"[0-9a-z]{8,64}", id):
        raise DataError(f"{source} names a listener {id!r}, which is no id", hint=hint)
    return ListenerAnswers(id, name, answers)


def save_listener_answers(folder: Path, listener: ListenerAnswers) -> ListenerAnswers:
    """Merge answers into the folder of a comparison; earlier answers of the same listener are kept."""
    file = folder / "preferences" / f"{listener.id}.json"
    if file.is_file():
        listener = parse_listener_answers(file.read_bytes(), str(file)).merged_with(listener)
    with atomic_write(file) as temporary:
        temporary.write_text(json.dumps(listener.to_json(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return listener


def load_listener_answers(folder: Path) -> list[ListenerAnswers]:
    return [
        parse_listener_answers(file.read_bytes(), str(file)) for file in sorted((folder / "preferences").glob("*.json"))
    ]


@dataclass(frozen=True, slots=True)
class PreferenceCount:
    """How often each of two systems was preferred, and how often neither."""

    systems: tuple[str, str]
    wins: tuple[int, int]
    ties: int

    @property
    def decided(self) -> int:
        return sum(self.wins)

    @property
    def share(self) -> float | None:
        """Of the first system, among answers that prefer one."""
        return self.wins[0] / self.decided if self.decided else None

    @property
    def interval(self) -> tuple[float, float]:
        return binomial_interval(self.wins[0], self.decided)

    @property
    def p_value(self) -> float:
        """Two-sided sign test, without the ties."""
        if not self.decided:
            return 1.0
        stats = import_optional("scipy.stats", INSTALL)
        return float(stats.binomtest(min(self.wins), self.decided).pvalue)

    @property
    def preferred(self) -> str | None:
        """The system that the interval favors; None where it holds one half."""
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
            "p": self.p_value,
            "preferred": self.preferred,
        }


@dataclass(frozen=True, slots=True)
class Preferences:
    """The sum of all listeners' answers."""

    pairs: list[PreferenceCount]
    items: list[tuple[str, PreferenceCount]]
    """By item and pair, those that were answered."""
    listeners: list[tuple[str, int]]
    """Names, and how many of their answers count here."""
    not_counted: int = 0
    """Answers about sounds that this comparison does not have."""

    def to_json(self) -> dict[str, Any]:
        return {
            "listeners": [{"name": name, "answers": count} for name, count in self.listeners],
            "pairs": [pair.to_json() for pair in self.pairs],
            "items": [{"item": item, **count.to_json()} for item, count in self.items],
            "answers_not_counted": self.not_counted,
        }


def aggregate_preferences(
    trials: Sequence[ListeningTrial], listeners: Iterable[ListenerAnswers], order: Sequence[str]
) -> Preferences:
    """Count all answers. `order` says which of two systems comes first, however they were offered."""
    by_id = {trial.id: trial for trial in trials}
    pair_of = {trial.id: _ordered_pair(trial, order) for trial in trials}
    by_pair: dict[tuple[str, str], list[int]] = {pair: [0, 0, 0] for pair in pair_of.values()}
    by_item: dict[tuple[str, tuple[str, str]], list[int]] = {}
    counted, not_counted = [], 0
    for listener in listeners:
        valid = 0
        for id, (choice, _) in listener.answers.items():
            if id not in by_id or choice not in (*by_id[id].sounds, TIE):
                not_counted += 1
                continue
            valid += 1
            trial, pair = by_id[id], pair_of[id]
            outcome = 2 if choice == TIE else pair.index(trial.systems[trial.sounds.index(choice)])
            by_pair[pair][outcome] += 1
            by_item.setdefault((trial.item, pair), [0, 0, 0])[outcome] += 1
        counted.append((listener.name or listener.id, valid))
    return Preferences(
        [_preference_count(pair, counts) for pair, counts in by_pair.items()],
        [(item, _preference_count(pair, counts)) for (item, pair), counts in sorted(by_item.items())],
        counted,
        not_counted,
    )


def _ordered_pair(trial: ListeningTrial, order: Sequence[str]) -> tuple[str, str]:
    first, second = sorted(trial.systems, key=order.index)
    return first, second


def _preference_count(pair: tuple[str, str], counts: Sequence[int]) -> PreferenceCount:
    return PreferenceCount(pair, (counts[0], counts[1]), counts[2])


def binomial_interval(wins: int, n: int) -> tuple[float, float]:
    """Exact two-sided confidence interval (Clopper and Pearson) of a share of `wins` in `n`."""
    low, low_of_losses = binomial_lower_bounds(n, [wins, n - wins])
    return float(low), float(1 - low_of_losses)


def binomial_lower_bounds(n: int, wins: Sequence[int]) -> npt.NDArray[np.float64]:
    """Lower ends of the intervals for these numbers of wins; upper ends follow from the losses."""
    stats = import_optional("scipy.stats", INSTALL)
    successes = np.asarray(wins)
    bounds = stats.beta.ppf((1 - CONFIDENCE_LEVEL) / 2, np.maximum(successes, 1), n - successes + 1)
    return np.where(successes == 0, 0.0, bounds)
