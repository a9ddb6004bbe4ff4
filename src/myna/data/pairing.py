"""Which clip sets the voice of which target."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass

from myna.config import DataSettings
from myna.data.corpus import Corpus
from myna.data.utterance import Utterance
from myna.errors import DataError


@dataclass(frozen=True, slots=True)
class Unpaired:
    """What the pairing left out or left alone, for the person who watches."""

    without_reference: tuple[str, ...]
    outside_seconds: tuple[str, ...]


class Pairing:
    """Targets with their references; a reference is never the target's own sound.

    A choice of ours depends on seed, epoch and target alone, so that it is the same on every rank and after a resume.
    """

    def __init__(self, corpus: Corpus, settings: DataSettings, seed: int) -> None:
        self.corpus, self.settings, self.seed = corpus, settings, seed
        self._by_speaker: dict[str, list[Utterance]] = defaultdict(list)
        shortest, longest = settings.reference_seconds
        for utterance in corpus.utterances:
            if shortest <= corpus.seconds(utterance) <= longest:
                self._by_speaker[utterance.speaker].append(utterance)
        shortest, longest = settings.seconds
        every = [utterance for utterance in corpus.utterances if utterance.is_target]
        self.targets = [target for target in every if shortest <= corpus.seconds(target) <= longest]
        kept = {target.id for target in self.targets}
        self.unpaired = Unpaired(
            without_reference=tuple(target.id for target in self.targets if not self._choices(target)),
            outside_seconds=tuple(target.id for target in every if target.id not in kept),
        )
        if not self.targets:
            raise DataError(
                f"{corpus.folder} has no target between {shortest} and {longest} seconds",
                hint="check `data.seconds` and the folder's manifest.jsonl",
            )
        if settings.require_reference and settings.reference != "none" and self.unpaired.without_reference:
            names = self.unpaired.without_reference
            raise DataError(
                f"{len(names)} targets find no reference, {names[0]} first",
                hint="give those speakers a second clip, or set data.require_reference=false",
            )

    def references(self, target: Utterance, epoch: int) -> tuple[Utterance, ...]:
        choices = self._choices(target)
        if not choices:
            return ()
        if target.references:
            return tuple(choices)
        return (random.Random(f"{self.seed}/{epoch}/{target.id}").choice(choices),)

    def longest_references(self, target: Utterance) -> tuple[Utterance, ...]:
        """The references that would make the longest sequence."""
        choices = self._choices(target)
        return tuple(choices) if target.references else tuple(sorted(choices, key=self.corpus.seconds)[-1:])

    def _choices(self, target: Utterance) -> list[Utterance]:
        """All given references, or those to choose one from."""
        if self.settings.reference == "none":
            return []
        own = self.corpus.key(target)
        if target.references is not None:
            given = [self.corpus.by_id(id, wanted_by=target.id) for id in target.references]
            if any(self.corpus.key(reference) == own for reference in given):
                raise DataError(
                    f"{target.id} has itself for a reference: it would learn to copy",
                    hint="name another clip of the speaker in the manifest's `references`",
                )
            return given
        if self.settings.reference == "given":
            return []
        return [other for other in self._by_speaker[target.speaker] if self.corpus.key(other) != own]
