"""From what was planned to what is learned from: all that it takes to make a batch, and nothing that plans one.

A `Maker` is small when it is sent to another process, which maps the files of the corpus itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from myna.config import DataSettings
from myna.data.conversation import AudioClip, Conversation, Reference, question, script
from myna.data.dataset import PreparedDataset
from myna.errors import DataError

Sequence_ = TypeVar("Sequence_", bound=Sized)
Batch = TypeVar("Batch")


class PlannedSequence(NamedTuple):
    """A sequence that is still to be rendered, its utterances as rows of the table."""

    target: int
    references: tuple[int, ...]
    length: int | None
    """None where nothing is packed, and so nothing need be known."""


@dataclass(frozen=True, eq=False)
class BatchBuilder(Generic[Sequence_, Batch]):
    """`render` and `collate` are the family's."""

    corpus: PreparedDataset
    settings: DataSettings
    render: Callable[[Conversation], Sequence_]
    collate: Callable[[Sequence[Sequence_]], Batch]

    def __call__(self, planned: Sequence[PlannedSequence]) -> Batch:
        return self.collate([self._sequence(one) for one in planned])

    def _sequence(self, planned: PlannedSequence) -> Sequence_:
        sequence = self.render(self.conversation(planned.target, planned.references))
        if planned.length not in (None, len(sequence)):
            id = self.corpus.table.id[planned.target]
            raise DataError(
                f"{id} was counted as {planned.length} tokens and takes {len(sequence)}",
                hint=f"rm {self.corpus.store.home}/tokens-*.arrow, and begin again: they are counted anew",
            )
        return sequence

    def conversation(self, target: int, references: Sequence[int]) -> Conversation:
        table, codes = self.corpus.table, self.corpus.codes_at

        def id(row: int) -> str:
            return str(table.id[row].as_py())

        if answer := table.answer[target].as_py():
            heard = AudioClip(id(target), codes(target))
            return question(table.scene.at(target), heard, id=id(target), answer=answer)
        return script(
            table.text[target].as_py(),
            id=id(target),
            references=tuple(Reference(table.text[row].as_py(), AudioClip(id(row), codes(row))) for row in references),
            target=AudioClip(id(target), codes(target), target=True),
            scene=table.scene.at(target) or self.settings.scene,
            place=self.settings.reference_placement,
        )
