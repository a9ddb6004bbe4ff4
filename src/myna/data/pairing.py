"""Which clip sets the voice of which target."""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from myna.config import DataSettings
from myna.data.corpus import Corpus
from myna.data.utterance import Span, Utterance
from myna.errors import DataError


@dataclass(frozen=True, slots=True)
class Unpaired:
    """What the pairing left out or left alone, for the person who watches."""

    without_reference: tuple[str, ...]
    outside_seconds: tuple[str, ...]


class Pairing:
    """Targets with their references; a reference is never the target's own sound, nor part of it.

    A choice of ours depends on seed, epoch and target alone, so that it is the same on every rank and after a resume.
    """

    def __init__(self, corpus: Corpus, settings: DataSettings, seed: int) -> None:
        self.corpus, self.settings, self.seed = corpus, settings, seed
        self._by_speaker: dict[str, list[Utterance]] = defaultdict(list)
        shortest, longest = settings.reference_seconds
        for utterance in corpus.utterances:
            # Clips without a speaker's name may be anyone's.
            if utterance.speaker and shortest <= corpus.seconds(utterance) <= longest:
                self._by_speaker[utterance.speaker].append(utterance)
        shortest, longest = settings.seconds
        every = [utterance for utterance in corpus.utterances if utterance.is_target]
        self.targets = [target for target in every if shortest <= corpus.seconds(target) <= longest]
        kept = {target.id for target in self.targets}
        self.unpaired = Unpaired(
            without_reference=tuple(target.id for target in self.targets if not self.references(target, epoch=0)),
            outside_seconds=tuple(target.id for target in every if target.id not in kept),
        )
        if not self.targets:
            raise DataError(
                f"{corpus.folder} has no target between {shortest} and {longest} seconds",
                hint="check `data.seconds` and the folder's manifest.jsonl",
            )
        if settings.require_reference and self.unpaired.without_reference:
            names = self.unpaired.without_reference
            remedy = "give those speakers a name and a second clip" if self._we_choose else "name their `references`"
            raise DataError(
                f"{len(names)} targets find no reference, {names[0]} first",
                hint=f"{remedy}, or set data.require_reference=false",
            )

    def references(self, target: Utterance, epoch: int) -> tuple[Utterance, ...]:
        """Those the data names, or one that we draw."""
        if target.references is not None or not self._we_choose:
            return self._given(target)
        clips = self._by_speaker.get(target.speaker, [])
        if all(self._share_sound(target, clip) for clip in clips):
            return ()
        dice = random.Random(f"{self.seed}/{epoch}/{target.id}")
        while self._share_sound(target, drawn := dice.choice(clips)):
            pass
        return (drawn,)

    def longest(self, length: Callable[[Utterance], int]) -> Callable[[Utterance], tuple[Utterance, ...]]:
        """From a target to the references that make its longest sequence, each clip being as long as `length` says."""

        @functools.cache
        def ranked(speaker: str) -> list[Utterance]:
            return sorted(self._by_speaker.get(speaker, []), key=length, reverse=True)

        def references(target: Utterance) -> tuple[Utterance, ...]:
            if target.references is not None or not self._we_choose:
                return self._given(target)
            return next(((clip,) for clip in ranked(target.speaker) if not self._share_sound(target, clip)), ())

        return references

    @property
    def _we_choose(self) -> bool:
        return self.settings.reference == "same_speaker"

    def _given(self, target: Utterance) -> tuple[Utterance, ...]:
        if self.settings.reference == "none":
            return ()
        given = tuple(self.corpus.by_id(id, wanted_by=target.id) for id in target.references or ())
        if any(self._share_sound(target, reference) for reference in given):
            raise DataError(
                f"{target.id} has itself for a reference: it would learn to copy",
                hint="name another clip of the speaker in the manifest's `references`",
            )
        return given

    def _share_sound(self, one: Utterance, other: Utterance) -> bool:
        if one.audio == other.audio and _overlap(one.span, other.span):
            return True
        return self.corpus.key(one) == self.corpus.key(other)


def _overlap(one: Span | None, other: Span | None) -> bool:
    if one is None or other is None:
        return True
    first, second = sorted((one, other), key=lambda span: span.start)
    return first.end is None or second.start < first.end
