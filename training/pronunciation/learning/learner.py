"""A learner: habits that are theirs alone, what becomes of a sentence, and the scores that follow from it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from learning.phones import CONFUSED, VOWELS, Phone

INSERTED = ("AH", "IH", "S", "T")
MOST_WRONG, MOST_PAUSED = 0.4, 0.7
"""Shares of phones that the worst learner gets wrong, and of gaps between words in which the slowest pauses."""
LIVELY = 60
"""espeak's range of pitch that sounds neither flat nor sung."""


@dataclass(frozen=True, slots=True)
class Learner:
    name: str
    clumsiness: float
    """0 to 1: how many phones go wrong."""
    hesitation: float
    """0 to 1: how many gaps are pauses."""
    pace: float
    """Of a fluent speaker's."""
    pitch_range: int
    habits: dict[str, str]
    """Phones that always go wrong in the same way when they do."""

    @classmethod
    def draw(cls, name: str, seed: int) -> Learner:
        dice = random.Random(f"{seed}/learner/{name}")
        habits = {phone: dice.choice(others.split()) for phone, others in CONFUSED.items()}
        return cls(name, dice.random(), dice.random() ** 1.5, dice.uniform(0.55, 1.1), dice.randint(5, 70), habits)


@dataclass(frozen=True, slots=True)
class Word:
    text: str
    meant: list[Phone]
    said: list[Phone]
    wrong: frozenset[int]
    """Places among `meant` that were said otherwise or not at all."""
    inserted: int
    pause: float
    """Seconds of silence after it."""


def read_aloud(words: Sequence[tuple[str, list[Phone]]], learner: Learner, dice: random.Random) -> list[Word]:
    """A sentence as this learner says it this time."""
    # A good day and a bad one, so that one speaker's utterances differ.
    rate = min(1.0, max(0.0, learner.clumsiness + dice.uniform(-0.2, 0.2))) * MOST_WRONG
    pausing = min(1.0, max(0.0, learner.hesitation + dice.uniform(-0.2, 0.2))) * MOST_PAUSED
    read = []
    for number, (text, meant) in enumerate(words, start=1):
        said: list[Phone] = []
        wrong: set[int] = set()
        inserted = 0
        for place, phone in enumerate(meant):
            fate = dice.random() / rate if rate else 1.0
            if fate >= 1:
                said.append(phone)
            elif fate < 0.65:
                said.append(Phone(learner.habits[phone.name], phone.stressed and learner.habits[phone.name] in VOWELS))
                wrong.add(place)
            elif fate < 0.85 and len(meant) > 2 and (said or place < len(meant) - 1):
                wrong.add(place)
            else:
                said += [phone, Phone(dice.choice(INSERTED))]
                inserted += 1
        pause = dice.uniform(0.25, 0.9) if number < len(words) and dice.random() < pausing else 0.0
        read.append(Word(text, meant, said, frozenset(wrong), inserted, pause))
    return read


def line(audio: str, learner: Learner, words: Sequence[Word]) -> dict[str, Any]:
    """A line of scores, as `myna prepare` reads it."""
    meant = sum(len(word.meant) for word in words)
    errors = sum(_errors(word) for word in words)
    pauses = sum(word.pause for word in words) / max(1, len(words) - 1)
    accuracy = _score(10 - 25 * errors / meant)
    fluency = _score(10 - 14 * pauses - 10 * max(0.0, 1 - learner.pace))
    prosodic = _score(10 * min(1.0, learner.pitch_range / LIVELY) - 3 * pauses)
    scores = {"accuracy": accuracy, "fluency": fluency, "prosodic": prosodic}
    scores["total"] = _score(accuracy / 2 + fluency / 4 + prosodic / 4)
    text = " ".join(word.text for word in words)
    return {
        **{"id": audio.removesuffix(".wav"), "audio": audio, "text": text, "speaker": learner.name, "language": "en"},
        **{"scores": scores, "words": [_told(word) for word in words]},
    }


def _told(word: Word) -> dict[str, Any]:
    names, said = ([phone.name for phone in phones] for phones in (word.meant, word.said))
    return {
        **{"text": word.text, "accuracy": _score(10 - 10 * _errors(word) / len(names)), "phones": names, "heard": said},
        "phone_scores": [0 if place in word.wrong else 2 for place in range(len(names))],
    }


def _errors(word: Word) -> int:
    """Changed and dropped ones, and those that are too many."""
    return len(word.wrong) + word.inserted


def _score(value: float) -> int:
    return round(min(10.0, max(0.0, value)))
