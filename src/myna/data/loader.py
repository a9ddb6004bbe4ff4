"""Packed-row data loader: the batches of every optimizer step, the same on every machine with the same seed.

The stream of packed rows is endless and does not depend on the number of processes: step n is always the same rows,
which the ranks share out and divide into micro-batches. Another division, or resuming at a step, changes nothing that
is learned. Rows are planned from lengths alone; only a rank's own rows are rendered. One thread plans ahead, and
`data.workers` threads render and collate, by themselves or by a worker process each; neither changes the batches.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, islice
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from myna.core.config import DataSettings
from myna.core.errors import DataError
from myna.core.io import bytes_hash
from myna.data.conversation import AudioClip, Conversation, Reference, answer_conversation, speech_conversation
from myna.data.dataset import Indices, PreparedDataset
from myna.data.lengths import LengthEstimator, SequenceLengths
from myna.data.manifest import Utterance
from myna.data.references import ReferenceLists, ReferenceSampler, permutation
from myna.data.workers import WorkerPool


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit-decreasing bin packing: rows of indices into `lengths`, each row at most `budget` long."""
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    if longest_first and lengths[longest_first[0]] > budget:
        raise ValueError(f"a sequence of {lengths[longest_first[0]]} does not fit a row of {budget}")
    # A segment tree: leaves are rows, a node holds the largest free space below it, so the first row with enough space
    # is found on the way down. Empty rows count as free. No two rows can be half empty, so these leaves are enough.
    leaves = 1
    while leaves < 2 * sum(lengths) // budget + 1:
        leaves *= 2
    free = [budget] * (2 * leaves)
    rows: list[list[int]] = []
    for index in longest_first:
        length, node = lengths[index], 1
        while node < leaves:
            node *= 2
            if free[node] < length:
                node += 1
        if node - leaves == len(rows):
            rows.append([])
        rows[node - leaves].append(index)
        free[node] -= length
        while node > 1:
            left, right = free[node], free[node ^ 1]
            largest = left if left > right else right
            node //= 2
            if free[node] == largest:
                break
            free[node] = largest
    return rows


SequenceT = TypeVar("SequenceT", bound=Sized)
BatchT = TypeVar("BatchT")


class PlannedSequence(NamedTuple):
    """Sequence to be rendered, with its utterances as indices into the manifest table."""

    target: int
    references: tuple[int, ...]
    length: int | None
    """Length in tokens; None if nothing is packed."""


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


PREFETCH_STEPS = 2
"""Steps that are built ahead, unless more are needed to keep all workers busy."""
STREAM_VERSION = 2
"""Version of the row order, so that no run continues with other rows than it began with."""


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int = 0
    world_size: int = 1


_Row: TypeAlias = list[PlannedSequence]  # also the joined rows of a micro-batch
_StepPlans: TypeAlias = Generator[list[_Row], None, None]


class _PackedWindow(NamedTuple):
    targets: Indices
    references: ReferenceLists
    lengths: list[int] | None
    rows: list[list[int]]
    """Positions in the window."""

    def planned_rows(self) -> list[_Row]:
        lengths: Sequence[int | None] = self.lengths or [None] * len(self.targets)
        sequences = list(map(PlannedSequence, self.targets.tolist(), self.references.as_tuples(), lengths))
        return [[sequences[position] for position in row] for row in self.rows]


class Loader(Generic[SequenceT, BatchT]):
    """Packed-row data loader over a prepared dataset, with the family's `render`, `collate` and `length_estimator`."""

    def __init__(
        self,
        dataset: PreparedDataset,
        settings: DataSettings,
        *,
        render: Callable[[Conversation], SequenceT],
        collate: Callable[[list[SequenceT]], BatchT],
        length_estimator: LengthEstimator,
        seed: int,
        finish: Callable[[BatchT], BatchT] | None = None,
    ) -> None:
        """Make a loader; `finish` is applied to every batch in this process, wherever it was built."""
        self.dataset, self.settings, self.seed = dataset, settings, seed
        self.reference_sampler = ReferenceSampler(dataset, settings, seed)
        self.builder = BatchBuilder(dataset, settings, render, collate)
        self._build: Callable[[_Row], BatchT] = self.builder
        self._finish, self._length_estimator = finish, length_estimator
        self._row_counts: dict[tuple[int, int], int] = {}

    def steps(
        self, batch_size: int, micro_batch_size: int, shard: Shard, start: int = 0
    ) -> Generator[list[BatchT], None, None]:
        """Yield the micro-batches of each optimizer step for one rank, without end, from step `start`. Sizes are in
        rows.

        An error is raised at the step it belongs to. Closing the iterator ends its threads.
        """
        assert batch_size % shard.world_size == 0, "a rank would wait for ever for micro-batches another does not have"
        per_step = -(-batch_size // (shard.world_size * micro_batch_size))
        return self._prefetch(self._plan_steps(batch_size, micro_batch_size, shard, start), per_step)

    def evaluation_batches(self, micro_batch_size: int, shard: Shard) -> Generator[BatchT, None, None]:
        """Yield one rank's share of all targets, each once."""
        targets = self.reference_sampler.targets.indices[shard.rank :: shard.world_size]
        size = self.settings.packing_window
        windows = (self._pack(targets[start : start + size], epoch=0) for start in range(0, len(targets), size))
        plans = ([batch] for window in windows for batch in _micro_batches(window.planned_rows(), micro_batch_size))
        with closing(self._prefetch(plans, per_step=1)) as steps:
            for [batch] in steps:
                yield batch

    def rows_in_first_epoch(self) -> int:
        assert not list(self._rows(skip=sys.maxsize, epochs=[0]))
        return sum(rows for (epoch, _), rows in self._row_counts.items() if epoch == 0)

    @property
    def row_counts(self) -> dict[tuple[int, int], int]:
        """Number of rows of every (epoch, window) packed so far; such a window can be skipped without packing it."""
        return dict(self._row_counts)

    def restore_row_counts(self, row_counts: Mapping[tuple[int, int], int]) -> None:
        """Take over the row counts of an earlier loader with the same data, settings and seed."""
        self._row_counts |= row_counts

    @property
    def fingerprint(self) -> str:
        """Hash of everything that rows are built from, except the settings and the places of files."""
        content = bytes_hash(f"{self.dataset.table.fingerprint} in stream {STREAM_VERSION}".encode())
        return f"{len(self.dataset.table)} utterances {content[:16]}"

    def conversation(self, target: Utterance, references: Sequence[Utterance]) -> Conversation:
        index_of = self.dataset.index_of
        return self.builder.conversation(index_of(target), [index_of(reference) for reference in references])

    def sequence(self, target: Utterance, epoch: int) -> SequenceT:
        return self.builder.render(self.conversation(target, self.reference_sampler.references(target, epoch)))

    @cached_property
    def lengths(self) -> SequenceLengths:
        return SequenceLengths(self.dataset, self.settings, self._length_estimator, self.builder.conversation)

    def check_lengths(self) -> None:
        """Raise an error if a sequence that can be sampled does not fit a row, since nothing is ever truncated."""
        if not self.settings.pack:
            return
        budget, targets, kinds = self.settings.row_tokens, self.reference_sampler.targets, self.lengths.kinds
        longest = np.zeros(len(targets), np.int64)
        for kind in np.unique(kinds):
            sizes = np.where(kinds == kind, self.lengths.as_reference, -1)
            references = self.reference_sampler.longest_references(sizes)
            longest = np.maximum(longest, self.lengths.of(targets.indices, references))
        worst = int(longest.argmax())
        if longest[worst] > budget:
            raise DataError(
                f"{targets[worst].id} takes {longest[worst]} tokens with its longest reference, a row holds {budget}; "
                "cutting it would lose its end-of-stream",
                hint=f"--set data.row_tokens={longest[worst]}, or lower data.seconds or data.reference_seconds",
            )

    # Planning

    def _plan_steps(self, batch_size: int, micro_batch_size: int, shard: Shard, start: int) -> _StepPlans:
        rows = self._rows(skip=start * batch_size)
        while True:
            step = list(islice(rows, batch_size))
            yield list(_micro_batches(step[shard.rank :: shard.world_size], micro_batch_size))

    def _rows(self, skip: int, epochs: Iterable[int] | None = None) -> Iterator[_Row]:
        """Yield rows without the first `skip`; without end unless `epochs` are given."""
        window, id_hash = self.settings.packing_window, self.dataset.table.id_hash
        targets = self.reference_sampler.targets.indices
        for epoch in count() if epochs is None else epochs:
            order = targets[permutation(id_hash[targets], f"{self.seed}/{epoch}/order")]
            for start in range(0, len(order), window):
                part, key = order[start : start + window], (epoch, start // window)
                if not self.settings.pack:
                    self._row_counts[key] = len(part)
                if key in self._row_counts and self._row_counts[key] <= skip:
                    skip -= self._row_counts[key]
                    continue
                packed = self._pack(part, epoch)
                self._row_counts[key] = len(packed.rows)
                if len(packed.rows) > skip:
                    rows = packed.planned_rows()
                    random.Random(f"{self.seed}/{epoch}/{start}").shuffle(rows)
                    yield from rows[skip:]
                skip = max(0, skip - len(packed.rows))

    def _pack(self, targets: Indices, epoch: int) -> _PackedWindow:
        references = self.reference_sampler.sample(targets, epoch)
        if not self.settings.pack:
            return _PackedWindow(targets, references, None, [[position] for position in range(len(targets))])
        lengths: list[int] = self.lengths.of(targets, references).tolist()
        return _PackedWindow(targets, references, lengths, first_fit_decreasing(lengths, self.settings.row_tokens))

    # Building

    def _finished(self, planned: _Row) -> BatchT:
        batch = self._build(planned)
        return batch if self._finish is None else self._finish(batch)

    def _prefetch(self, plans: _StepPlans, per_step: int) -> Generator[list[BatchT], None, None]:
        """Yield the batches of every planned step in order, built ahead. A step has `per_step` micro-batches."""
        workers = self.settings.workers
        if not workers:
            for plan in plans:
                yield [self._finished(micro_batch) for micro_batch in plan]
            return
        with ThreadPoolExecutor(workers, "myna-render") as builders, ThreadPoolExecutor(1, "myna-plan") as planner:

            def submit_step() -> list[Future[BatchT]] | None:
                plan = next(plans, None)
                return None if plan is None else [builders.submit(self._finished, each) for each in plan]

            pending = deque(planner.submit(submit_step) for _ in range(max(PREFETCH_STEPS, -(-workers // per_step))))
            try:
                while (step := pending.popleft().result()) is not None:
                    pending.append(planner.submit(submit_step))
                    yield [batch.result() for batch in step]
            finally:
                planner.shutdown(cancel_futures=True)
                builders.shutdown(cancel_futures=True)
                plans.close()


def start_workers(loaders: Sequence[Loader[Any, Any]], number: int) -> WorkerPool:
    """Start worker processes that build the batches of these loaders from now on. The caller closes them."""
    workers = WorkerPool(number, [loader.builder for loader in loaders])
    for position, loader in enumerate(loaders):
        loader._build = partial(workers.build, position)
    return workers


def _micro_batches(rows: Sequence[_Row], micro_batch_size: int) -> Iterator[_Row]:
    for start in range(0, len(rows), micro_batch_size):
        yield [sequence for row in rows[start : start + micro_batch_size] for sequence in row]
