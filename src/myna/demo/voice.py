"""The voice of a demo: whose recordings, which of them are learned from, and which are kept to judge by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from myna.audio.files import Samples, probe, read
from myna.data.hash_rng import hash_of
from myna.data.utterance import Utterance
from myna.errors import DataError

BUNDLED = Path(__file__).parent / "recordings"
"""Three minutes of a voice that fledgling has never heard, with some clips marked as held out."""
FEWEST = 8
"""Clips, with less than which nothing could be learned and judged."""
KEPT_SHARE, KEPT_LEAST, KEPT_MOST = 0.1, 3, 8
"""Clips that are kept to judge by: a share, and at least and at most so many."""
SECONDS = (1.0, 15.0)
"""Shortest and longest clip of a demo."""
ENOUGH = 900.0
"""Seconds to learn from. More would not be seen in the few minutes that a demo trains."""
REFERENCE = 6.0
"""Seconds that a reference should have: long enough to tell a voice, short enough to be read quickly."""


@dataclass(frozen=True, slots=True)
class Voice:
    speaker: str
    train: tuple[Utterance, ...]
    held_out: tuple[Utterance, ...]
    reference: Utterance
    """One of those that are learned from. It sets the voice of all lines, before and after."""
    seconds: float
    """Of what is learned from."""
    notes: tuple[str, ...]
    """What was left out, and why."""

    @property
    def language(self) -> str:
        return self.reference.language


def choose(utterances: Sequence[Utterance], source: str, seed: int) -> Voice:
    """One speaker's clips, split by their words: no line is both learned and judged."""
    voices = Counter(utterance.speaker for utterance in utterances if utterance.is_target)
    if not voices:
        raise DataError(f"{source} holds nothing to learn from", hint="give recordings with what is said in them")
    speaker, notes = voices.most_common(1)[0][0], []
    if len(voices) > 1:
        notes.append(f"{source} holds {len(voices)} speakers; this is `{speaker}`, who has most clips")
    theirs = [_alone(utterance) for utterance in utterances if utterance.is_target and utterance.speaker == speaker]
    seconds = {utterance.id: _seconds(utterance) for utterance in theirs}
    usable = [utterance for utterance in theirs if SECONDS[0] <= seconds[utterance.id] <= SECONDS[1]]
    if len(usable) < len(theirs):
        notes.append(f"{len(theirs) - len(usable)} clips are not between {SECONDS[0]:g} and {SECONDS[1]:g} s long")
    kept = {_words(utterance) for utterance in usable if utterance.extras.get("held_out")}
    kept = kept or _keep(usable, source, seed)
    train = [utterance for utterance in usable if _words(utterance) not in kept]
    held_out = list(
        {_words(utterance): utterance for utterance in reversed(usable) if _words(utterance) in kept}.values()
    )
    learned, total = [], 0.0
    for utterance in _shuffled(train, f"{seed}/enough"):
        if total + seconds[utterance.id] <= ENOUGH:
            learned.append(utterance)
            total += seconds[utterance.id]
    if len(learned) < len(train):
        notes.append(f"{len(train) - len(learned)} clips are left out: {ENOUGH / 60:g} minutes are enough for a demo")
    reference = min(learned, key=lambda utterance: (abs(seconds[utterance.id] - REFERENCE), utterance.id))
    in_order = {utterance.id: place for place, utterance in enumerate(usable)}
    return Voice(
        speaker=speaker,
        train=tuple(sorted(learned, key=lambda utterance: in_order[utterance.id])),
        held_out=tuple(sorted(held_out, key=lambda utterance: in_order[utterance.id])),
        reference=reference,
        seconds=total,
        notes=tuple(notes),
    )


def samples_of(utterance: Utterance, sample_rate: int) -> Samples:
    span = utterance.span
    return read(utterance.audio, sample_rate=sample_rate, span=(span.start, span.end) if span else None)


def _keep(usable: list[Utterance], source: str, seed: int) -> set[str]:
    """The words of the clips to judge by."""
    texts = {_words(utterance): utterance for utterance in usable}
    if len(texts) < FEWEST:
        raise DataError(
            f"{source} holds {len(texts)} clips of {SECONDS[0]:g} to {SECONDS[1]:g} s with words of their own; a demo "
            f"wants {FEWEST} of one speaker",
            hint="record some more, or see the demo with its own voice: myna demo",
        )
    count = min(KEPT_MOST, max(KEPT_LEAST, round(KEPT_SHARE * len(texts))))
    return {_words(utterance) for utterance in _shuffled(list(texts.values()), f"{seed}/held out")[:count]}


def _alone(utterance: Utterance) -> Utterance:
    """Without the references its source names, which may stand on the other side of the split."""
    return replace(utterance, extras={key: value for key, value in utterance.extras.items() if key != "references"})


def _shuffled(utterances: list[Utterance], occasion: str) -> list[Utterance]:
    """By dice that follow from names, so that neither their order nor their number matters."""
    return sorted(utterances, key=lambda utterance: hash_of(f"{occasion}/{utterance.id}"))


def _seconds(utterance: Utterance) -> float:
    span, whole = utterance.span, probe(utterance.audio).seconds
    return whole if span is None else (whole if span.end is None else span.end) - span.start


def _words(utterance: Utterance) -> str:
    """What is said, however it is written."""
    return "".join(letter for letter in utterance.text.casefold() if letter.isalnum())
