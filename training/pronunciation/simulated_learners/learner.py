"""A simulated learner: random mispronunciations of a sentence, and the scores that follow from them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from simulated_learners.phones import CONFUSIONS, VOWELS, Phone

INSERTED_PHONES = ("AH", "IH", "S", "T")
MAX_PHONE_ERROR_RATE, MAX_PAUSE_RATE = 0.4, 0.7
"""Shares of phones that the worst learner gets wrong, and of gaps between words in which the slowest pauses."""
NATURAL_PITCH_RANGE = 60
"""espeak's range of pitch that sounds neither flat nor sung."""


@dataclass(frozen=True, slots=True)
class Learner:
    """Error rates and habitual phone confusions of a speaker."""

    name: str
    clumsiness: float
    """0 to 1: how many phones go wrong."""
    hesitation: float
    """0 to 1: how many gaps are pauses."""
    pace: float
    """Pace as a share of a fluent speaker's."""
    pitch_range: int
    habits: dict[str, str]
    """Phones that always go wrong in the same way when they do."""

    @classmethod
    def draw(cls, name: str, seed: int) -> Learner:
        rng = random.Random(f"{seed}/learner/{name}")
        habits = {phone: rng.choice(others.split()) for phone, others in CONFUSIONS.items()}
        return cls(name, rng.random(), rng.random() ** 1.5, rng.uniform(0.55, 1.1), rng.randint(5, 70), habits)


@dataclass(frozen=True, slots=True)
class SpokenWord:
    """A word with its canonical and its spoken phones."""

    text: str
    canonical: list[Phone]
    spoken: list[Phone]
    wrong: frozenset[int]
    """Indices in `canonical` that were substituted or deleted."""
    inserted: int
    pause: float
    """Seconds of silence after it."""


def mispronounce(words: Sequence[tuple[str, list[Phone]]], learner: Learner, rng: random.Random) -> list[SpokenWord]:
    """A sentence as this learner says it."""
    # A good day and a bad one, so that one speaker's utterances differ.
    rate = min(1.0, max(0.0, learner.clumsiness + rng.uniform(-0.2, 0.2))) * MAX_PHONE_ERROR_RATE
    pausing = min(1.0, max(0.0, learner.hesitation + rng.uniform(-0.2, 0.2))) * MAX_PAUSE_RATE
    read = []
    for number, (text, canonical) in enumerate(words, start=1):
        spoken: list[Phone] = []
        wrong: set[int] = set()
        inserted = 0
        for place, phone in enumerate(canonical):
            draw = rng.random() / rate if rate else 1.0
            if draw >= 1:
                spoken.append(phone)
            elif draw < 0.65:
                spoken.append(
                    Phone(learner.habits[phone.name], phone.stressed and learner.habits[phone.name] in VOWELS)
                )
                wrong.add(place)
            elif draw < 0.85 and len(canonical) > 2 and (spoken or place < len(canonical) - 1):
                wrong.add(place)
            else:
                spoken += [phone, Phone(rng.choice(INSERTED_PHONES))]
                inserted += 1
        pause = rng.uniform(0.25, 0.9) if number < len(words) and rng.random() < pausing else 0.0
        read.append(SpokenWord(text, canonical, spoken, frozenset(wrong), inserted, pause))
    return read


def score_record(audio: str, learner: Learner, words: Sequence[SpokenWord]) -> dict[str, Any]:
    """A record of scores.jsonl, as `myna prepare` reads it."""
    phones = sum(len(word.canonical) for word in words)
    errors = sum(_errors(word) for word in words)
    pauses = sum(word.pause for word in words) / max(1, len(words) - 1)
    accuracy = _score(10 - 25 * errors / phones)
    fluency = _score(10 - 14 * pauses - 10 * max(0.0, 1 - learner.pace))
    prosodic = _score(10 * min(1.0, learner.pitch_range / NATURAL_PITCH_RANGE) - 3 * pauses)
    scores = {"accuracy": accuracy, "fluency": fluency, "prosodic": prosodic}
    scores["total"] = _score(accuracy / 2 + fluency / 4 + prosodic / 4)
    text = " ".join(word.text for word in words)
    return {
        **{"id": audio.removesuffix(".wav"), "audio": audio, "text": text, "speaker": learner.name, "language": "en"},
        **{"scores": scores, "words": [_word_record(word) for word in words]},
    }


def _word_record(word: SpokenWord) -> dict[str, Any]:
    names, spoken = ([phone.name for phone in phones] for phones in (word.canonical, word.spoken))
    return {
        **{
            "text": word.text,
            "accuracy": _score(10 - 10 * _errors(word) / len(names)),
            "phones": names,
            "pronounced": spoken,
        },
        "phone_scores": [0 if place in word.wrong else 2 for place in range(len(names))],
    }


def _errors(word: SpokenWord) -> int:
    """Substituted, deleted and inserted phones."""
    return len(word.wrong) + word.inserted


def _score(value: float) -> int:
    return round(min(10.0, max(0.0, value)))
