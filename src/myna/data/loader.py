"""From a corpus to the batches of every optimizer step, the same on every machine that has the same seed.

The stream of rows is endless and knows nothing of processes: step n is always the same rows, which the ranks share out
and cut into passes. Splitting the work otherwise, or resuming at a step, changes nothing that is learned. Rows are
planned from lengths alone; only what a rank will learn from is rendered. Nor do the threads change anything: one plans
ahead, and `data.workers` others have what it has planned rendered and collated, by themselves or by a process each.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, islice
from typing import Any, Generic, NamedTuple, TypeAlias

import numpy as np

from myna.config import DataSettings
from myna.data.batch_builder import Batch, BatchBuilder, PlannedSequence, Sequence_
from myna.data.conversation import Conversation
from myna.data.dataset import PreparedDataset
from myna.data.hash_rng import shuffled
from myna.data.lengths import LengthEstimator, Lengths
from myna.data.manifest_table import Rows
from myna.data.packing import first_fit_decreasing
from myna.data.pairing import Pairing, References
from myna.data.utterance import Utterance
from myna.data.workers import Workers
from myna.errors import DataError
from myna.io import bytes_hash

STEPS_AHEAD = 2
"""Steps that are ready before they are asked for, if those are enough to keep all workers busy."""
STREAM = 2
"""Another number whenever the same data, settings and seed come to other rows: no run goes on with another stream than
it began with."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One process among several."""

    rank: int = 0
    world: int = 1


_Pass: TypeAlias = list[PlannedSequence]


class _Packed(NamedTuple):
    """A window of targets in rows."""

    targets: Rows
    references: References
    lengths: list[int] | None
    rows: list[list[int]]
    """Places in the window."""

    def planned(self) -> Iterator[list[PlannedSequence]]:
        lengths: Sequence[int | None] = self.lengths or [None] * len(self.targets)
        every = list(map(PlannedSequence, self.targets.tolist(), self.references.each(), lengths))
        for row in self.rows:
            yield [every[place] for place in row]


class Loader(Generic[Sequence_, Batch]):
    """`render`, `collate` and `ruler` are the family's; the loader only decides what travels together."""

    def __init__(
        self,
        corpus: PreparedDataset,
        settings: DataSettings,
        *,
        render: Callable[[Conversation], Sequence_],
        collate: Callable[[Sequence[Sequence_]], Batch],
        ruler: LengthEstimator,
        seed: int,
        finish: Callable[[Batch], Batch] | None = None,
    ) -> None:
        """`finish` is done to every batch in this process, whoever has made it."""
        self.corpus, self.settings, self.seed = corpus, settings, seed
        self.pairing = Pairing(corpus, settings, seed)
        self.maker = BatchBuilder(corpus, settings, render, collate)
        self._make: Callable[[_Pass], Batch] = self.maker
        self._finish, self._ruler = finish, ruler
        self._counted: dict[tuple[int, int], int] = {}

    def steps(
        self, batch_size: int, micro_batch_size: int, share: Shard, start: int = 0
    ) -> Generator[list[Batch], None, None]:
        """Each optimizer step's batches for one rank, from step `start` on, for ever. Ranks get equally many rows.

        An error comes with the step it belongs to. Closing the iterator ends its threads.
        """
        assert batch_size % share.world == 0, "one rank would wait for ever for passes that another does not have"
        passes = -(-batch_size // (share.world * micro_batch_size))
        return self._made(self._plan_steps(batch_size, micro_batch_size, share, start), passes)

    def once(self, micro_batch_size: int, share: Shard) -> Generator[Batch, None, None]:
        """One rank's part of all targets, each once: for evaluation."""
        plans = ([each] for each in self._plan_once(micro_batch_size, share))
        with closing(self._made(plans, passes=1)) as passes:
            for [batch] in passes:
                yield batch

    def rows_in_first_epoch(self) -> int:
        assert not list(self._rows(skip=sys.maxsize, epochs=[0]))
        return sum(rows for (epoch, _), rows in self.counted.items() if epoch == 0)

    @property
    def counted(self) -> dict[tuple[int, int], int]:
        """The rows of every (epoch, window) that was packed so far. What is counted need not be packed to skip it."""
        return dict(self._counted)

    def recall(self, counted: Mapping[tuple[int, int], int]) -> None:
        """Counts of an earlier loader with the same data, settings and seed."""
        self._counted |= counted

    @property
    def identity(self) -> str:
        """Changes with anything but the settings that rows are made of; where files lie does not count."""
        made_of = bytes_hash(f"{self.corpus.table.identity} in stream {STREAM}".encode())
        return f"{len(self.corpus.table)} utterances {made_of[:16]}"

    def conversation(self, target: Utterance, references: Sequence[Utterance]) -> Conversation:
        return self.maker.conversation(self.corpus.row_of(target), [self.corpus.row_of(each) for each in references])

    def sequence(self, target: Utterance, epoch: int) -> Sequence_:
        return self.maker.render(self.conversation(target, self.pairing.references(target, epoch)))

    @cached_property
    def lengths(self) -> Lengths:
        return Lengths(self.corpus, self.settings, self._ruler, self.maker.conversation)

    def check_lengths(self) -> None:
        """Every sequence there can be must fit a row, since nothing is ever cut."""
        if not self.settings.pack:
            return
        budget, targets, kinds = self.settings.row_tokens, self.pairing.targets, self.lengths.kinds
        longest = np.zeros(len(targets), np.int64)
        for kind in np.unique(kinds):
            clips = np.where(kinds == kind, self.lengths.as_reference, -1)
            longest = np.maximum(longest, self.lengths.of(targets.rows, self.pairing.longest(clips)))
        worst = int(longest.argmax())
        if longest[worst] > budget:
            raise DataError(
                f"{targets[worst].id} takes {longest[worst]} tokens with its longest reference, a row holds {budget}; "
                "cutting it would lose its end-of-stream",
                hint=f"--set data.row_tokens={longest[worst]}, or lower data.seconds or data.reference_seconds",
            )

    # What will travel together

    def _plan_steps(
        self, batch_size: int, micro_batch_size: int, share: Shard, start: int
    ) -> Generator[list[_Pass], None, None]:
        rows = self._rows(skip=start * batch_size)
        while True:
            step = list(islice(rows, batch_size))
            yield list(_passes(step[share.rank :: share.world], micro_batch_size))

    def _plan_once(self, micro_batch_size: int, share: Shard) -> Generator[_Pass, None, None]:
        targets, window = self.pairing.targets.rows[share.rank :: share.world], self.settings.packing_window
        for at in range(0, len(targets), window):
            yield from _passes(list(self._pack(targets[at : at + window], epoch=0).planned()), micro_batch_size)

    def _rows(self, skip: int, epochs: Iterable[int] | None = None) -> Iterator[list[PlannedSequence]]:
        """The stream without its first `skip` rows, endless unless `epochs` are given."""
        window, names = self.settings.packing_window, self.corpus.table.name
        for epoch in count() if epochs is None else epochs:
            targets = self.pairing.targets.rows
            targets = targets[shuffled(names[targets], f"{self.seed}/{epoch}/order")]
            for at in range(0, len(targets), window):
                part, place = targets[at : at + window], (epoch, at // window)
                if not self.settings.pack:
                    self._counted[place] = len(part)
                if place in self._counted and self._counted[place] <= skip:
                    skip -= self._counted[place]
                    continue
                packed = self._pack(part, epoch)
                self._counted[place] = len(packed.rows)
                if len(packed.rows) > skip:
                    rows = list(packed.planned())
                    random.Random(f"{self.seed}/{epoch}/{at}").shuffle(rows)
                    yield from rows[skip:]
                skip = max(0, skip - len(packed.rows))

    def _pack(self, targets: Rows, epoch: int) -> _Packed:
        references = self.pairing.draw(targets, epoch)
        if not self.settings.pack:
            return _Packed(targets, references, None, [[place] for place in range(len(targets))])
        lengths: list[int] = self.lengths.of(targets, references).tolist()
        return _Packed(targets, references, lengths, first_fit_decreasing(lengths, self.settings.row_tokens))

    # What has been planned is made

    def _finished(self, planned: _Pass) -> Batch:
        batch = self._make(planned)
        return batch if self._finish is None else self._finish(batch)

    def _made(self, plans: Generator[list[_Pass], None, None], passes: int) -> Generator[list[Batch], None, None]:
        """The batches of every plan, in order, some of them made while the last ones are learned from. There are
        `passes` to a plan."""
        number = self.settings.workers
        if not number:
            for plan in plans:
                yield [self._finished(each) for each in plan]
            return
        with (
            ThreadPoolExecutor(number, "myna-render") as workers,
            ThreadPoolExecutor(1, "myna-ahead") as planner,
        ):

            def begin() -> list[Future[Batch]] | None:
                plan = next(plans, None)
                return None if plan is None else [workers.submit(self._finished, each) for each in plan]

            waiting = deque(planner.submit(begin) for _ in range(max(STEPS_AHEAD, -(-number // passes))))
            try:
                while (begun := waiting.popleft().result()) is not None:
                    waiting.append(planner.submit(begin))
                    yield [batch.result() for batch in begun]
            finally:
                planner.shutdown(cancel_futures=True)
                workers.shutdown(cancel_futures=True)
                plans.close()


def start_workers(loaders: Sequence[Loader[Any, Any]], number: int) -> Workers:
    """Processes that make the batches of these loaders from now on. Whoever hires them closes them at the end."""
    workers = Workers(number, [loader.maker for loader in loaders])
    for which, loader in enumerate(loaders):
        loader._make = partial(workers.make, which)
    return workers


def _passes(rows: Sequence[list[PlannedSequence]], micro_batch_size: int) -> Iterator[_Pass]:
    for at in range(0, len(rows), micro_batch_size):
        yield [planned for row in rows[at : at + micro_batch_size] for planned in row]
