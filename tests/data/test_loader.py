"""Loader rows: the same for the same seed, however they are shared among ranks or resumed."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from myna.core.errors import DataError
from myna.data.conversation import AudioClip, Conversation
from myna.data.dataset import PreparedDataset
from myna.data.loader import Loader, Shard, first_fit_decreasing
from myna.data.manifest import Utterance
from tests.data.corpora import prepared, said
from tests.data.letter_rows import ROW, Characters, Line, first, load, render, rows_of


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """Fifty clips of two speakers, between half a second and three."""
    folder, dice = tmp_path_factory.mktemp("corpus"), random.Random(0)
    clips = [said(folder, f"{n}", "anna" if n % 3 else "bert", seconds=dice.uniform(0.5, 3)) for n in range(50)]
    return prepared(folder, clips)


@pytest.mark.parametrize(
    "settings", [{}, {"pack": False}, {"packing_window": 7}, {"packing_window": 500}, {"row_tokens": 700}]
)
def test_every_target_comes_once_an_epoch(corpus: PreparedDataset, settings: dict[str, Any]) -> None:
    loader = load(corpus, **settings)
    rows = loader.rows_in_first_epoch()
    ids = sorted(line.id for row in rows_of(loader, rows) for line in row)
    assert ids == sorted(u.id for u in corpus.utterances)


def test_rows_hold_several_and_never_too_much(corpus: PreparedDataset) -> None:
    rows = rows_of(load(corpus), 60)
    assert max(sum(map(len, row)) for row in rows) <= ROW
    assert max(len(row) for row in rows) > 1
    assert all(rows)


def test_without_packing_every_utterance_has_a_row_of_its_own(corpus: PreparedDataset) -> None:
    loader = load(corpus, pack=False, row_tokens=1)
    loader.check_lengths()
    assert loader.rows_in_first_epoch() == 50
    assert all(len(row) == 1 for row in rows_of(loader, 60))


def test_epochs_and_seeds_differ_in_order_company_and_reference(corpus: PreparedDataset) -> None:
    loader = load(corpus, pack=False)
    rows = [row[0] for row in rows_of(loader, 100)]
    one, two = rows[:50], rows[50:]
    assert {line.id for line in one} == {line.id for line in two}, "everything again"
    assert [line.id for line in one] != [line.id for line in two]
    assert {(line.id, line.references) for line in one} != {(line.id, line.references) for line in two}
    assert rows_of(loader, 50) == rows_of(load(corpus, pack=False), 50)
    assert rows_of(loader, 50) != rows_of(load(corpus, pack=False, seed=1), 50)


@pytest.mark.parametrize("world", [1, 2, 3, 6])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_a_step_is_the_same_rows_for_any_number_of_processes(
    corpus: PreparedDataset, world: int, micro_batch_size: int
) -> None:
    loader = load(corpus)
    stream = rows_of(loader, 24)
    ranks = [first(loader.steps(6, micro_batch_size, Shard(rank, world)), 4) for rank in range(world)]
    for step in range(4):
        rows = stream[6 * step : 6 * step + 6]
        shares = [ranks[rank][step] for rank in range(world)]
        assert len({len(passes) for passes in shares}) == 1, "as many passes on every rank, or one would wait for ever"
        batches = [batch for passes in shares for batch in passes]
        lines = [line for batch in batches for line in batch]
        assert len(lines) == len(set(lines)) and set(lines) == {line for row in rows for line in row}, (
            "each on one rank"
        )
        for batch in batches:
            whole = [row for row in rows if set(row) <= set(batch)]
            assert len(whole) <= micro_batch_size and sum(map(len, whole)) == len(batch), "rows stay whole"


def test_shares_that_do_not_come_out_even_are_refused(corpus: PreparedDataset) -> None:
    with pytest.raises(AssertionError, match="wait for ever"):
        next(load(corpus).steps(3, 1, Shard(0, 2)))


@pytest.mark.parametrize("start", [1, 4, 23])
def test_starting_at_a_step_is_skipping_those_before(corpus: PreparedDataset, start: int) -> None:
    share = Shard(1, 2)
    whole = first(load(corpus).steps(4, 1, share), start + 3)
    assert first(load(corpus).steps(4, 1, share, start=start), 3) == whole[start:]


# Ahead of time


@pytest.mark.parametrize("workers", [1, 4])
def test_threads_change_nothing(corpus: PreparedDataset, workers: int) -> None:
    inline, threaded = load(corpus, workers=0), load(corpus, workers=workers)
    assert first(threaded.steps(2, 1, Shard(), start=3), 20) == first(inline.steps(2, 1, Shard(), start=3), 20)
    assert list(threaded.evaluation_batches(2, Shard())) == list(inline.evaluation_batches(2, Shard()))
    assert threaded.rows_in_first_epoch() == inline.rows_in_first_epoch()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("myna-")]


def test_closing_the_stream_ends_its_threads(corpus: PreparedDataset) -> None:
    steps = load(corpus, workers=2).steps(2, 1, Shard())
    next(steps)
    assert threads()
    steps.close()
    assert threads() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_comes_with_the_step_it_belongs_to(corpus: PreparedDataset, workers: int) -> None:
    settings: dict[str, Any] = {"pack": False, "packing_window": 5, "workers": workers}
    rows = rows_of(load(corpus, **settings), 20)
    bad = rows[12][0].id

    def refuse(conversation: Conversation) -> Line:
        if conversation.id == bad:
            raise DataError(f"{bad} is bad", hint="mend it")
        return render(conversation)

    steps = load(corpus, render=refuse, **settings).steps(1, 1, Shard())
    assert [passes[0] for passes in first(steps, 12)] == rows[:12], "everything before the bad one"
    with pytest.raises(DataError, match=f"{bad} is bad"):
        next(steps)
    assert threads() == []


def test_nothing_is_rendered_to_be_counted_or_skipped(corpus: PreparedDataset) -> None:
    whole = first(load(corpus).steps(2, 1, Shard()), 25)
    seen: list[str] = []

    def note(conversation: Conversation) -> Line:
        seen.append(conversation.id)
        return render(conversation)

    loader = load(corpus, render=note, workers=0)
    loader.check_lengths()
    assert loader.rows_in_first_epoch() and seen == []
    assert first(loader.steps(2, 1, Shard(), start=20), 5) == whole[20:]
    assert len(seen) == sum(len(batch) for step in whole[20:] for batch in step)
    seen.clear()
    [step] = first(loader.steps(2, 1, Shard(1, 2), start=20), 1)
    assert seen == [line.id for batch in step for line in batch], "nor the rows of other ranks"


def test_what_was_counted_once_is_not_packed_to_be_skipped(
    corpus: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load(corpus)
    whole = first(before.steps(2, 1, Shard()), 25)
    windows = 0

    def note(lengths: Sequence[int], budget: int) -> list[list[int]]:
        nonlocal windows
        windows += 1
        return first_fit_decreasing(lengths, budget)

    def packed(counted: dict[tuple[int, int], int]) -> int:
        nonlocal windows
        windows = 0
        loader = load(corpus, workers=0)
        loader.restore_row_counts(counted)
        assert first(loader.steps(2, 1, Shard(), start=20), 5) == whole[20:]
        return windows

    monkeypatch.setattr("myna.data.loader.first_fit_decreasing", note)
    assert packed(before.row_counts) < packed({}) / 2


def test_a_length_that_was_miscounted_stops_the_training(corpus: PreparedDataset) -> None:
    """A folder may hold counts of another tokenizer, for example."""

    class Wrong(Characters):
        text_revision = "wrong"

        def count_tokens(self, texts: Mapping[str, str]) -> list[int]:
            return [len(text) + (id == "7") for id, text in texts.items()]

    loader = load(corpus, length_estimator=Wrong(), reference="none")
    with pytest.raises(DataError, match=r"7 was counted as (\d+) tokens and takes (\d+)") as caught:
        rows_of(loader, loader.rows_in_first_epoch())
    assert "tokens-*.arrow" in caught.value.hint


def test_its_identity_is_what_it_is_made_of(tmp_path: Path) -> None:
    def identity(folder: Path, **change: Any) -> str:
        return load(prepared(folder, [said(folder, "a", **change), said(folder, "b")])).fingerprint

    same = identity(tmp_path / "here")
    assert identity(tmp_path / "there") == same, "wherever it lies"
    changes: list[dict[str, Any]] = [
        {"text": "other words"},
        {"speaker": "bert"},
        {"sound": "another"},
        {"scene": "A cave."},
    ]
    others = {identity(tmp_path / str(number), **change) for number, change in enumerate(changes)}
    assert len(others | {same}) == 5


# Evaluation


@pytest.mark.parametrize("settings", [{}, {"pack": False}, {"packing_window": 7}])
@pytest.mark.parametrize("world", [1, 3])
def test_an_evaluation_hears_everything_once(corpus: PreparedDataset, settings: dict[str, Any], world: int) -> None:
    loader = load(corpus, **settings)
    batches = [batch for rank in range(world) for batch in loader.evaluation_batches(2, Shard(rank, world))]
    assert sorted(line.id for batch in batches for line in batch) == sorted(u.id for u in corpus.utterances)
    assert max(sum(map(len, batch)) for batch in batches) <= 2 * ROW
    again = [
        batch for rank in range(world) for batch in load(corpus, **settings).evaluation_batches(2, Shard(rank, world))
    ]
    assert again == batches


def test_an_evaluation_has_the_same_references_for_any_number_of_processes(corpus: PreparedDataset) -> None:
    loader = load(corpus)
    heard = [
        {line for rank in range(n) for batch in loader.evaluation_batches(1, Shard(rank, n)) for line in batch}
        for n in (1, 2, 7)
    ]
    assert heard[0] == heard[1] == heard[2]


def test_more_processes_than_targets_leave_some_with_nothing(tmp_path: Path) -> None:
    loader = load(prepared(tmp_path, [said(tmp_path, "a"), said(tmp_path, "b")]))
    assert [len(list(loader.evaluation_batches(1, Shard(rank, 3)))) for rank in range(3)] == [1, 1, 0]


# What a conversation holds


def test_a_conversation_holds_the_corpus_own_codes_texts_and_scene(tmp_path: Path) -> None:
    clips = [said(tmp_path, "a", text="hello", scene="A cave."), said(tmp_path, "b", text="as I said")]
    corpus = prepared(tmp_path, clips)
    loader = load(corpus, scene="A room.")
    a, b = corpus.utterances
    made = loader.conversation(a, (b,))
    assert (made.id, made.scene) == ("a", "A cave.")
    assert [
        (turn.role, [part.id if isinstance(part, AudioClip) else part for part in turn.parts]) for turn in made.turns
    ] == [
        ("user", ["as I said"]),
        ("assistant", ["b"]),
        ("user", ["hello"]),
        ("assistant", ["a"]),
    ]
    clips_of = [part for turn in made.turns for part in turn.parts if isinstance(part, AudioClip)]
    assert [clip.target for clip in clips_of] == [False, True]
    assert all((clip.codes == corpus.codes(u)).all() for clip, u in zip(clips_of, (b, a), strict=True))
    assert loader.conversation(b, ()).scene == "A room."
    in_system = load(corpus, reference_placement="system").conversation(a, (b,))
    assert [turn.role for turn in in_system.turns] == ["system", "user", "assistant"]


@pytest.mark.parametrize("scene", [None, ""])
def test_a_scene_the_data_leaves_empty_is_the_recipes(tmp_path: Path, scene: str | None) -> None:
    corpus = prepared(tmp_path, [said(tmp_path, "a", scene=scene)])
    assert load(corpus, scene="A room.").conversation(corpus.utterances[0], ()).scene == "A room."
    assert load(corpus).conversation(corpus.utterances[0], ()).scene == ""


# Nothing is ever cut


def longest_of(loader: Loader[Line, list[Line]], pairs: Sequence[tuple[Utterance, tuple[Utterance, ...]]]) -> int:
    return max(len(render(loader.conversation(target, references))) for target, references in pairs)


def test_a_sequence_longer_than_a_row_is_refused_with_its_name(corpus: PreparedDataset) -> None:
    by_id = {u.id: u for u in corpus.utterances}
    pairs = [
        (target, (other,)) for target in by_id.values() for other in by_id.values()
        if target.speaker == other.speaker and target.id != other.id
        and 1 <= len(corpus.codes(other)) / corpus.info.frame_rate <= 15
    ]  # fmt: skip
    longest = longest_of(load(corpus), pairs)
    load(corpus, row_tokens=longest).check_lengths()
    with pytest.raises(DataError, match=rf"takes {longest} tokens .* a row holds {longest - 1}") as caught:
        load(corpus, row_tokens=longest - 1).check_lengths()
    assert f"data.row_tokens={longest}" in caught.value.hint
    worst = caught.value.what.split()[0]
    assert longest_of(load(corpus), [(t, r) for t, r in pairs if t.id == worst]) == longest


def test_a_reference_short_of_sound_but_long_of_text_counts(tmp_path: Path) -> None:
    """The longest reference is the one with most tokens, not the one that lasts longest."""
    clips = [
        said(tmp_path, "target", text="x"),
        said(tmp_path, "lasts", seconds=2, text="x", reference_only=True),
        said(tmp_path, "talks", seconds=1, text="x" * 500, reference_only=True),
    ]
    loader = load(prepared(tmp_path, clips), row_tokens=400)
    with pytest.raises(DataError, match="target takes 701 tokens with its longest reference"):
        loader.check_lengths()


def test_a_clip_that_is_a_reference_alone_is_known_as_one(tmp_path: Path) -> None:
    clips = [said(tmp_path, "target"), said(tmp_path, "other"), said(tmp_path, "poor", reference_only=True)]
    builder = load(prepared(tmp_path, clips), row_tokens=4000).builder
    parts = [part for turn in builder.conversation(0, [1, 2]).turns for part in turn.parts]
    found = [(part.id, part.target, part.reference_only) for part in parts if not isinstance(part, str)]
    assert found == [("other", False, False), ("poor", False, True), ("target", True, False)]


def test_a_reference_of_many_bytes_and_few_tokens_hides_no_other(tmp_path: Path) -> None:
    """Bytes only bound tokens: here the clip with the most bytes is not the one with the most tokens."""
    clips = [
        said(tmp_path, "target", text="x"),
        said(tmp_path, "bytes", text="ệ" * 200, reference_only=True),
        said(tmp_path, "tokens", text="x" * 300, reference_only=True),
    ]
    loader = load(prepared(tmp_path, clips), row_tokens=500)
    with pytest.raises(DataError, match="target takes 501 tokens"):
        loader.check_lengths()


def test_a_long_scene_and_many_references_count(tmp_path: Path) -> None:
    clips = [said(tmp_path, f"{n}", text="x") for n in range(4)]
    many = said(tmp_path, "many", text="x", references=[f"{n}" for n in range(4)])
    loader = load(prepared(tmp_path, [*clips, many]), row_tokens=504)
    with pytest.raises(DataError, match="many takes 505 tokens"):
        loader.check_lengths()
    scenic = load(prepared(tmp_path, [*clips, said(tmp_path, "scenic", text="x", scene="s" * 4000)]), row_tokens=4000)
    with pytest.raises(DataError, match="scenic takes 4202 tokens"):
        scenic.check_lengths()
