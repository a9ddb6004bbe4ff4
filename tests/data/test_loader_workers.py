"""Threads and processes that render ahead: the same batches, and a clean end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from myna.core.config import DataSettings
from myna.core.errors import DataError
from myna.data.conversation import Conversation
from myna.data.dataset import PreparedDataset
from myna.data.loader import PREFETCH_STEPS, Loader, Shard, start_workers
from tests.data.corpora import prepared, said
from tests.data.letter_rows import Characters, Line, load, render

Lines = list[Line]


class RecordingFamily:
    """Family that records its calls, and fails or idles when told to."""

    def __init__(self) -> None:
        self.rendered: list[str] = []
        self.collated = 0
        self.bad: set[str] = set()
        self.threads: set[str] = set()
        self.idle = 0.0

    def render(self, conversation: Conversation) -> Line:
        if conversation.id in self.bad:
            raise DataError(f"{conversation.id} is bad", hint="remove it")
        if self.idle:
            time.sleep(random.random() * self.idle)
        self.rendered.append(conversation.id)
        self.threads.add(threading.current_thread().name.split("_")[0])
        return render(conversation)

    def collate(self, sequences: Sequence[Line]) -> Lines:
        self.collated += 1
        return list(sequences)

    def loader(self, corpus: PreparedDataset, **settings: Any) -> Loader[Line, Lines]:
        chosen = DataSettings(train=corpus.folder, **({"row_tokens": 1000, "packing_window": 16} | settings))
        return Loader(corpus, chosen, render=self.render, collate=self.collate, length_estimator=Characters(), seed=0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    folder, dice = tmp_path_factory.mktemp("corpus"), random.Random(0)
    return prepared(folder, [said(folder, f"{n}", seconds=dice.uniform(0.5, 3)) for n in range(50)])


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("myna-")]


@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("start", [0, 9])
def test_any_number_of_workers_gives_the_same_batches(corpus: PreparedDataset, workers: int, start: int) -> None:
    inline, family = RecordingFamily(), RecordingFamily()
    family.idle = 0.002  # so that threads overtake one another
    expected = list(islice(inline.loader(corpus, workers=0).steps(4, 2, Shard(), start=start), 12))
    loader = family.loader(corpus, workers=workers)
    assert list(islice(loader.steps(4, 2, Shard(), start=start), 12)) == expected
    assert list(loader.evaluation_batches(3, Shard())) == list(
        inline.loader(corpus, workers=0).evaluation_batches(3, Shard())
    )
    assert inline.threads == {"MainThread"} and family.threads == {"myna-render"}


def test_steps_are_ready_before_they_are_asked_for(corpus: PreparedDataset) -> None:
    family = RecordingFamily()
    steps = family.loader(corpus).steps(2, 1, Shard())
    next(steps)
    deadline = time.monotonic() + 10
    while family.collated < 2 * (1 + PREFETCH_STEPS) and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert family.collated == 2 * (1 + PREFETCH_STEPS), "and no more than that"
    steps.close()


@pytest.mark.parametrize(("workers", "passes", "ahead"), [(5, 2, 3), (4, 1, 4), (1, 1, PREFETCH_STEPS)])
def test_all_workers_have_something_to_do(corpus: PreparedDataset, workers: int, passes: int, ahead: int) -> None:
    """A micro-batch is built by one worker, so that few micro-batches a step need more steps ahead."""
    family = RecordingFamily()
    steps = family.loader(corpus, workers=workers).steps(passes, 1, Shard())
    next(steps)
    deadline = time.monotonic() + 10
    while family.collated < passes * (1 + ahead) and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert family.collated == passes * (1 + ahead)
    steps.close()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_comes_with_the_step_it_belongs_to(corpus: PreparedDataset, workers: int) -> None:
    family = RecordingFamily()
    order = [batch[0].id for [batch] in islice(family.loader(corpus, workers=0, pack=False).steps(1, 1, Shard()), 50)]
    family.bad = {order[20], order[22]}
    steps, seen = family.loader(corpus, workers=workers, pack=False).steps(1, 1, Shard()), []
    with pytest.raises(DataError, match=r"^\d+ is bad"):
        for [batch] in steps:
            seen.append(batch[0].id)
    assert seen == order[:20]
    assert ours() == []
    with pytest.raises(StopIteration):
        next(steps)


@pytest.mark.parametrize("end", ["close", "forget", "exhaust"])
def test_no_thread_is_left(corpus: PreparedDataset, end: str) -> None:
    loader = RecordingFamily().loader(corpus, workers=3)
    iterator = loader.evaluation_batches(1, Shard()) if end == "exhaust" else loader.steps(1, 1, Shard())
    assert ours() == [], "none before the first batch"
    next(iterator)
    assert len(ours()) > 1
    if end == "close":
        iterator.close()
    elif end == "forget":
        del iterator
    else:
        list(iterator)
    assert ours() == []


# In processes


def refuse_number_7(conversation: Conversation) -> Line:
    if conversation.id == "7":
        raise DataError("7 is bad", hint="remove it")
    return render(conversation)


def render_otherwise(conversation: Conversation) -> Line:
    return replace(render(conversation), id=f"other {conversation.id}")


@pytest.mark.parametrize("workers", [1, 3])
def test_processes_make_the_same_batches(corpus: PreparedDataset, workers: int) -> None:
    inline, loader = (load(corpus, workers=number) for number in (0, workers))
    other, evaluation = (load(corpus, render=render_otherwise, workers=number) for number in (0, workers))
    with closing(start_workers([loader, evaluation], workers)):
        steps = loader.steps(4, 2, Shard(), start=9)
        expected = inline.steps(4, 2, Shard(), start=9)
        assert list(islice(steps, 6)) == list(islice(expected, 6))
        assert list(evaluation.evaluation_batches(3, Shard())) == list(other.evaluation_batches(3, Shard())), (
            "while the others wait"
        )
        assert list(islice(steps, 6)) == list(islice(expected, 6))
        steps.close()
    assert ours() == []


def test_an_error_in_a_process_comes_with_the_step_it_belongs_to(corpus: PreparedDataset) -> None:
    order = [batch[0].id for [batch] in islice(load(corpus, workers=0, pack=False).steps(1, 1, Shard()), 50)]
    loader, seen = load(corpus, render=refuse_number_7, workers=2, pack=False), []
    with closing(start_workers([loader], 2)), pytest.raises(DataError, match=r"^7 is bad") as caught:
        for [batch] in loader.steps(1, 1, Shard()):
            seen.append(batch[0].id)
    assert seen == order[: order.index("7")] and caught.value.hint == "remove it"
    assert ours() == []


@pytest.mark.parametrize("workers", [0, 1, "hired"])
def test_batches_are_finished_here_whoever_makes_them(corpus: PreparedDataset, workers: int | str) -> None:
    finished: list[Lines] = []

    def finish(batch: Lines) -> Lines:
        finished.append(batch)
        return batch[::-1]

    settings = DataSettings(train=corpus.folder, row_tokens=1000, packing_window=16, workers=1 if workers else 0)
    loader: Loader[Line, Lines] = Loader(
        corpus, settings, render=render, collate=list, length_estimator=Characters(), seed=0, finish=finish
    )
    if workers == "hired":
        with closing(start_workers([loader], 1)):
            batches = list(loader.evaluation_batches(2, Shard()))
    else:
        batches = list(loader.evaluation_batches(2, Shard()))
    assert (
        batches
        == [batch[::-1] for batch in finished]
        == [batch[::-1] for batch in load(corpus).evaluation_batches(2, Shard())]
    )


def test_rows_are_counted_without_rendering(corpus: PreparedDataset) -> None:
    family = RecordingFamily()
    loader = family.loader(corpus, workers=0)
    rows = loader.rows_in_first_epoch()
    assert family.rendered == [] and len(loader.row_counts) == 4, "windows of the first epoch"
    list(islice(loader.steps(1, 1, Shard()), rows))
    assert sorted(family.rendered) == sorted(u.id for u in corpus.utterances), "and all of it is in those rows"


def test_what_is_skipped_is_not_rendered(corpus: PreparedDataset) -> None:
    """Three epochs later, only the requested rows are rendered, whether the rows before them were counted or not."""
    family = RecordingFamily()
    whole = family.loader(corpus, workers=0)
    rows = sum(rows for (epoch, _), rows in _counted(whole, epochs=3).items() if epoch < 3)
    expected = list(islice(whole.steps(2, 1, Shard()), rows // 2 + 3))

    fresh = RecordingFamily()
    resumed = fresh.loader(corpus, workers=0)
    resumed.restore_row_counts(whole.row_counts)
    assert list(islice(resumed.steps(2, 1, Shard(), start=rows // 2), 3)) == expected[-3:]
    assert fresh.rendered == [line.id for step in expected[-3:] for batch in step for line in batch]
    assert fresh.collated == 3 * 2

    slow = RecordingFamily()
    assert list(islice(slow.loader(corpus, workers=0).steps(2, 1, Shard(), start=rows // 2), 3)) == expected[-3:]
    assert slow.rendered == fresh.rendered and slow.collated == 3 * 2


def _counted(loader: Loader[Line, Lines], epochs: int) -> dict[tuple[int, int], int]:
    steps = loader.steps(1, 1, Shard())
    while max((epoch for epoch, _ in loader.row_counts), default=0) < epochs:
        next(steps)
    return loader.row_counts


def test_rows_of_their_own_are_skipped_without_counts(corpus: PreparedDataset) -> None:
    family = RecordingFamily()
    expected = list(islice(family.loader(corpus, workers=0, pack=False).steps(5, 1, Shard()), 33))
    fresh = RecordingFamily()
    assert list(islice(fresh.loader(corpus, workers=0, pack=False).steps(5, 1, Shard(), start=30), 3)) == expected[-3:]
    assert len(fresh.rendered) <= 2 * 16


# Whether it is the same data


def test_the_identity_follows_what_is_learned_and_not_where_it_lies(tmp_path: Path) -> None:
    def identity(folder: Path, **changes: Any) -> str:
        clips = [said(folder, f"{n}", **(changes if n == 1 else {})) for n in range(3)]
        return RecordingFamily().loader(prepared(folder, clips)).fingerprint

    first = identity(tmp_path / "a")
    assert first.startswith("3 utterances ")
    assert identity(tmp_path / "elsewhere") == first
    changes: list[dict[str, Any]] = [
        {"text": "other"},
        {"sound": "other"},
        {"speaker": "bert"},
        {"scene": "A cave."},
        {"references": ["0"]},
        {"reference_only": True},
    ]
    for number, change in enumerate(changes):
        assert identity(tmp_path / f"{number}", **change) != first, change
