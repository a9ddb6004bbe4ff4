"""From a corpus to the batches of every optimizer step, the same on every machine that has the same seed.

The stream of rows is endless and knows nothing of processes: step n is always the same rows, which the ranks share out
and cut into passes. Splitting the work otherwise, or resuming at a step, changes nothing that is learned.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import count, islice
from typing import Generic, TypeVar

from myna.config import DataSettings
from myna.data.conversation import Clip, Conversation, Reference, script
from myna.data.corpus import Corpus
from myna.data.pack import first_fit_decreasing
from myna.data.pairing import Pairing
from myna.data.utterance import Utterance
from myna.errors import DataError

Sequence_ = TypeVar("Sequence_", bound=Sized)
Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True)
class Share:
    """One process among several."""

    rank: int = 0
    world: int = 1


class Loader(Generic[Sequence_, Batch]):
    """`render` and `collate` are the family's; the loader only decides what travels together."""

    def __init__(
        self,
        corpus: Corpus,
        settings: DataSettings,
        *,
        render: Callable[[Conversation], Sequence_],
        collate: Callable[[Sequence[Sequence_]], Batch],
        seed: int,
    ) -> None:
        self.corpus, self.settings, self.seed = corpus, settings, seed
        self.pairing = Pairing(corpus, settings, seed)
        self._render, self._collate = render, collate

    def steps(self, rows_per_step: int, rows_per_pass: int, share: Share, start: int = 0) -> Iterator[list[Batch]]:
        """Each optimizer step's batches for one rank, from step `start` on, for ever.

        Every rank gets as many passes as the fullest one; a pass may be empty of rows only where rows run out.
        """
        rows = self._endless_rows()
        for _ in range(start):
            next(islice(rows, rows_per_step - 1, None))
        while True:
            step = list(islice(rows, rows_per_step))
            mine = step[share.rank :: share.world]
            yield [
                self._collate([sequence for row in mine[at : at + rows_per_pass] for sequence in row])
                for at in range(0, len(mine), rows_per_pass)
            ]

    def once(self, rows_per_pass: int) -> Iterator[Batch]:
        """All targets, once, in order: for evaluation."""
        window = self.settings.window
        for at in range(0, len(self.pairing.targets), window):
            rows = self._pack([self.sequence(t, 0) for t in self.pairing.targets[at : at + window]])
            for first in range(0, len(rows), rows_per_pass):
                yield self._collate([sequence for row in rows[first : first + rows_per_pass] for sequence in row])

    def rows_in_first_epoch(self) -> int:
        return sum(1 for _ in self._epoch_rows(0))

    def conversation(self, target: Utterance, references: tuple[Utterance, ...]) -> Conversation:
        corpus = self.corpus
        return script(
            target.text,
            id=target.id,
            references=tuple(Reference(r.text, Clip(r.id, corpus.codes(r))) for r in references),
            target=Clip(target.id, corpus.codes(target), target=True),
            scene=target.extras.get("scene", self.settings.scene),
            place=self.settings.reference_place,
        )

    def check_lengths(self) -> int:
        """The longest sequence there can be; it must fit a row, since nothing is ever cut."""
        corpus, targets = self.corpus, self.pairing.targets
        longest = 0
        # Bytes bound tokens from above, so only the few that might be longest are really rendered.
        bounds = {}
        for target in targets:
            references = self.pairing.longest_references(target)
            frames = sum(len(corpus.codes(u)) for u in (target, *references))
            bounds[target.id] = frames + sum(len(u.text.encode()) for u in (target, *references)) + 400
        for target in sorted(targets, key=lambda target: -bounds[target.id]):
            if bounds[target.id] <= longest:
                break
            length = len(self._render(self.conversation(target, self.pairing.longest_references(target))))
            longest = max(longest, length)
            if self.settings.pack and length > self.settings.row_tokens:
                raise DataError(
                    f"{target.id} takes {length} tokens with its longest reference, a row holds "
                    f"{self.settings.row_tokens}; cutting it would lose its end-of-stream",
                    hint=f"--set data.row_tokens={length}, or lower data.seconds or data.reference_seconds",
                )
        return longest

    def sequence(self, target: Utterance, epoch: int) -> Sequence_:
        return self._render(self.conversation(target, self.pairing.references(target, epoch)))

    def _endless_rows(self) -> Iterator[list[Sequence_]]:
        for epoch in count():
            yield from self._epoch_rows(epoch)

    def _epoch_rows(self, epoch: int) -> Iterator[list[Sequence_]]:
        dice = random.Random(f"{self.seed}/{epoch}")
        targets = list(self.pairing.targets)
        dice.shuffle(targets)
        for at in range(0, len(targets), self.settings.window):
            rows = self._pack([self.sequence(t, epoch) for t in targets[at : at + self.settings.window]])
            dice.shuffle(rows)
            yield from rows

    def _pack(self, sequences: list[Sequence_]) -> list[list[Sequence_]]:
        if not self.settings.pack:
            return [[sequence] for sequence in sequences]
        rows = first_fit_decreasing([len(s) for s in sequences], self.settings.row_tokens)
        return [[sequences[i] for i in row] for row in rows]
