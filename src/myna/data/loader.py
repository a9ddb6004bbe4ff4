"""From a corpus to the batches of every optimizer step, the same on every machine that has the same seed.

The stream of rows is endless and knows nothing of processes: step n is always the same rows, which the ranks share out
and cut into passes. Splitting the work otherwise, or resuming at a step, changes nothing that is learned. Nor do the
threads: one works steps out in advance, and asks `data.workers` others to render what it needs.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Generic, TypeAlias, TypeVar

from myna.config import DataSettings
from myna.data.conversation import Clip, Conversation, Reference, script
from myna.data.corpus import Corpus
from myna.data.pack import first_fit_decreasing
from myna.data.pairing import Pairing
from myna.data.utterance import Utterance
from myna.errors import DataError

Sequence_ = TypeVar("Sequence_", bound=Sized)
Batch = TypeVar("Batch")
Item = TypeVar("Item")

STEPS_AHEAD = 2
"""Steps that are ready before they are asked for."""
PROMPT_ROOM, CLIP_ROOM = 512, 64
"""More tokens than any family's system prompt takes, and than it puts around a clip."""


@dataclass(frozen=True, slots=True)
class Share:
    """One process among several."""

    rank: int = 0
    world: int = 1


_RenderAll: TypeAlias = Callable[[Sequence[Utterance], int], list[Sequence_]]
"""(targets, epoch) -> their sequences."""


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
        self._counted: dict[tuple[int, int], int] = {}

    def steps(
        self, rows_per_step: int, rows_per_pass: int, share: Share, start: int = 0
    ) -> Generator[list[Batch], None, None]:
        """Each optimizer step's batches for one rank, from step `start` on, for ever. Ranks get equally many rows.

        An error comes with the step it belongs to. Closing the iterator ends its threads.
        """
        assert rows_per_step % share.world == 0, "one rank would wait for ever for passes that another does not have"
        return self._ahead(self._steps(rows_per_step, rows_per_pass, share, start))

    def once(self, rows_per_pass: int, share: Share) -> Generator[Batch, None, None]:
        """One rank's part of all targets, each once: for evaluation."""
        return self._ahead(self._once(rows_per_pass, share))

    def rows_in_first_epoch(self) -> int:
        with self._renderers() as render_all:
            assert not list(self._rows(render_all, skip=sys.maxsize, epochs=[0]))
        return sum(rows for (epoch, _), rows in self.counted.items() if epoch == 0)

    @property
    def counted(self) -> dict[tuple[int, int], int]:
        """The rows of every (epoch, window) that was packed so far. What is counted need not be rendered to skip it."""
        return dict(self._counted)

    def recall(self, counted: Mapping[tuple[int, int], int]) -> None:
        """Counts of an earlier loader with the same data, settings and seed."""
        self._counted |= counted

    @property
    def identity(self) -> str:
        """Changes with anything but the settings that conversations are made of; where files lie does not count."""
        whole = hashlib.blake2b(digest_size=8)
        for utterance in self.corpus.utterances:
            told = (utterance.id, utterance.text, utterance.speaker, utterance.extras, self.corpus.key(utterance))
            whole.update(json.dumps(told, sort_keys=True, default=str).encode() + b"\n")
        return f"{len(self.corpus.utterances)} utterances {whole.hexdigest()}"

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

    def _steps(
        self, rows_per_step: int, rows_per_pass: int, share: Share, start: int
    ) -> Generator[list[Batch], None, None]:
        with self._renderers() as render_all:
            rows = self._rows(render_all, skip=start * rows_per_step)
            while True:
                step = list(islice(rows, rows_per_step))
                yield list(self._passes(step[share.rank :: share.world], rows_per_pass))

    def _once(self, rows_per_pass: int, share: Share) -> Generator[Batch, None, None]:
        targets, window = self.pairing.targets[share.rank :: share.world], self.settings.window
        with self._renderers() as render_all:
            for at in range(0, len(targets), window):
                yield from self._passes(self._pack(render_all(targets[at : at + window], 0)), rows_per_pass)

    def _passes(self, rows: Sequence[Sequence[Sequence_]], rows_per_pass: int) -> Iterator[Batch]:
        for at in range(0, len(rows), rows_per_pass):
            yield self._collate([sequence for row in rows[at : at + rows_per_pass] for sequence in row])

    def _rows(
        self, render_all: _RenderAll[Sequence_], skip: int, epochs: Iterable[int] | None = None
    ) -> Iterator[list[Sequence_]]:
        """The stream without its first `skip` rows, endless unless `epochs` are given."""
        window = self.settings.window
        for epoch in count() if epochs is None else epochs:
            targets = list(self.pairing.targets)
            random.Random(f"{self.seed}/{epoch}").shuffle(targets)
            for at in range(0, len(targets), window):
                part, place = targets[at : at + window], (epoch, at // window)
                if not self.settings.pack:
                    self._counted[place] = len(part)
                if place in self._counted and self._counted[place] <= skip:
                    skip -= self._counted[place]
                    continue
                rows = self._pack(render_all(part, epoch))
                self._counted[place] = len(rows)
                random.Random(f"{self.seed}/{epoch}/{at}").shuffle(rows)
                yield from rows[skip:]
                skip = max(0, skip - len(rows))

    def _pack(self, sequences: list[Sequence_]) -> list[list[Sequence_]]:
        if not self.settings.pack:
            return [[sequence] for sequence in sequences]
        rows = first_fit_decreasing([len(s) for s in sequences], self.settings.row_tokens)
        return [[sequences[i] for i in row] for row in rows]

    @contextmanager
    def _renderers(self) -> Iterator[_RenderAll[Sequence_]]:
        """Renders many targets at once, in their order, with as many threads as the settings say."""
        if not self.settings.workers:
            yield lambda targets, epoch: [self.sequence(target, epoch) for target in targets]
            return
        with ThreadPoolExecutor(self.settings.workers, "myna-render") as pool:
            yield lambda targets, epoch: list(pool.map(partial(self.sequence, epoch=epoch), targets))

    def _ahead(self, items: Generator[Item, None, None]) -> Generator[Item, None, None]:
        """The same items, worked out in a thread while the last ones are learned from; inline without workers."""
        if not self.settings.workers:
            yield from items
            return
        end = object()
        with ThreadPoolExecutor(1, "myna-ahead") as pool:
            waiting: deque[Future[Item | object]] = deque(pool.submit(next, items, end) for _ in range(STEPS_AHEAD))
            try:
                while (item := waiting.popleft().result()) is not end:
                    waiting.append(pool.submit(next, items, end))
                    yield item  # type: ignore[misc]
            finally:
                pool.shutdown(cancel_futures=True)
                items.close()
