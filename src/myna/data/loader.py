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

PROMPT_ROOM, CLIP_ROOM = 512, 64
"""More tokens than any family's system prompt takes, and than it puts around a clip."""


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
        """Each optimizer step's batches for one rank, from step `start` on, for ever. Ranks get equally many rows."""
        assert rows_per_step % share.world == 0, "one rank would wait for ever for passes that another does not have"
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

    def once(self, rows_per_pass: int, share: Share) -> Iterator[Batch]:
        """One rank's part of all targets, each once: for evaluation."""
        targets = self.pairing.targets[share.rank :: share.world]
        for at in range(0, len(targets), self.settings.window):
            rows = self._pack([self.sequence(target, 0) for target in targets[at : at + self.settings.window]])
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
            scene=self._scene(target),
            place=self.settings.reference_place,
        )

    def check_lengths(self) -> None:
        """Every sequence there can be must fit a row, since nothing is ever cut."""
        if not self.settings.pack:
            return
        budget = self.settings.row_tokens
        bulkiest = self.pairing.longest(self._bulk)

        def bound(target: Utterance) -> int:
            clips = sum(self._bulk(clip) for clip in (target, *bulkiest(target)))
            return PROMPT_ROOM + len(self._scene(target).encode()) + clips

        # Where even the bound fits, nothing need be rendered.
        risky = [target for target in self.pairing.targets if bound(target) > budget]
        if not risky:
            return
        # What a reference adds to a sequence, it adds to every target's.
        longest = self.pairing.longest(lambda clip: len(self._render(self.conversation(risky[0], (clip,)))))
        lengths = {target.id: len(self._render(self.conversation(target, longest(target)))) for target in risky}
        worst = max(lengths, key=lengths.__getitem__)
        if lengths[worst] > budget:
            raise DataError(
                f"{worst} takes {lengths[worst]} tokens with its longest reference, a row holds {budget}; cutting it "
                "would lose its end-of-stream",
                hint=f"--set data.row_tokens={lengths[worst]}, or lower data.seconds or data.reference_seconds",
            )

    def _bulk(self, clip: Utterance) -> int:
        """More tokens than a clip and its text can take: bytes bound tokens from above."""
        return len(self.corpus.codes(clip)) + len(clip.text.encode()) + CLIP_ROOM

    def _scene(self, target: Utterance) -> str:
        return str(target.extras.get("scene") or self.settings.scene)

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
