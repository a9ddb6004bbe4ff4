"""Batch builder: renders and collates planned sequences into a batch. It plans nothing.

Pickled, it is small: a worker process maps the files of the dataset itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from myna.core.config import DataSettings
from myna.core.errors import DataError
from myna.data.conversation import AudioClip, Conversation, Reference, answer_conversation, speech_conversation
from myna.data.dataset import PreparedDataset

SequenceT = TypeVar("SequenceT", bound=Sized)
BatchT = TypeVar("BatchT")


class PlannedSequence(NamedTuple):
    """A sequence to be rendered: its utterances as indices into the manifest table."""

    target: int
    references: tuple[int, ...]
    length: int | None
    """In tokens; None where nothing is packed."""


@dataclass(frozen=True, eq=False)
class BatchBuilder(Generic[SequenceT, BatchT]):
    """Renders planned sequences and collates them, with the family's `render` and `collate`."""

    dataset: PreparedDataset
    settings: DataSettings
    render: Callable[[Conversation], SequenceT]
    collate: Callable[[list[SequenceT]], BatchT]

    def __call__(self, planned: Sequence[PlannedSequence]) -> BatchT:
        return self.collate([self._sequence(sequence) for sequence in planned])

    def _sequence(self, planned: PlannedSequence) -> SequenceT:
        sequence = self.render(self.conversation(planned.target, planned.references))
        if planned.length not in (None, len(sequence)):
            id = self.dataset.table.id[planned.target]
            raise DataError(
                f"{id} was counted as {planned.length} tokens and takes {len(sequence)}",
                hint=f"rm {self.dataset.store.codes_folder}/tokens-*.arrow, and begin again: they are counted anew",
            )
        return sequence

    def conversation(self, target: int, references: Sequence[int]) -> Conversation:
        """The training conversation of a target and its references, all given by index."""
        table = self.dataset.table

        def clip(index: int, *, is_target: bool = False) -> AudioClip:
            codes, reference_only = self.dataset.codes_at(index), not table.is_target[index]
            return AudioClip(table.id[index].as_py(), codes, is_target, bool(reference_only))

        id: str = table.id[target].as_py()
        if answer := table.answer[target].as_py():
            return answer_conversation(table.question.value_at(target), clip(target), id=id, answer=answer)
        return speech_conversation(
            table.text[target].as_py(),
            id=id,
            references=tuple(Reference(table.text[index].as_py(), clip(index)) for index in references),
            target=clip(target, is_target=True),
            scene=table.scene.value_at(target) or self.settings.scene,
            reference_placement=self.settings.reference_placement,
        )
