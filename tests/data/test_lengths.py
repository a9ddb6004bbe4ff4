"""Summed lengths equal rendered lengths, and each text is counted once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from myna.core.errors import DataError
from myna.data.conversation import AudioClip, Conversation
from myna.data.dataset import PreparedDataset
from myna.data.lengths import count_text_tokens
from myna.data.manifest import Utterance, write_manifest
from tests.data.corpora import prepared, said
from tests.data.letter_rows import Characters, load

SCENES = ("", "A cave.", "Two people on a train, one of whom whispers.")
TEXTS = (
    "",
    "Plain.",
    "Chào buổi sáng, cả nhà!",
    "صباح الخير",
    "[SPEAKER0] One. [SPEAKER1] Two. [SPEAKER0] Three.",
    "[SPEAKER1] Alone.",
    "[SPEAKER0] said one",
    "said by [SPEAKER0]",
)


class Prompted(Characters):
    """Family whose prompt depends on every part of a form."""

    text_revision = "prompted"

    def length(self, conversation: Conversation) -> int:
        parts = [part for turn in conversation.turns for part in turn.parts]
        texts = [part for part in parts if isinstance(part, str)]
        speakers = {tag for tag in ("[SPEAKER0]", "[SPEAKER1]") if any(tag in text for text in texts)}
        length = 11 + 5 * len(conversation.turns) + 3 * len(speakers) + (2 + len(conversation.scene) // 2)
        for part in parts:
            length += len(part.codes) + 9 if isinstance(part, AudioClip) else len(part)
        return length


def spoken(folder: Path) -> PreparedDataset:
    """Utterances with every kind of text and scene, and drawn, given, many or no references."""
    clips = [
        said(folder, f"{scene}-{text}", f"speaker{text % 3}", text=TEXTS[text], scene=SCENES[scene])
        for scene in range(len(SCENES))
        for text in range(len(TEXTS))
    ]
    asks = {"one": ["0-1"], "none": [], "two": ["0-1", "0-3"], "tagged": ["1-5", "0-2"], "three": ["0-1", "0-4", "0-6"]}
    asks |= {"has its tag": ["0-6", "0-2"], "gets its tag": ["0-7", "0-2"]}
    clips += [
        said(folder, f"{name}{text}", "asks", text=TEXTS[text], references=references)
        for name, references in asks.items()
        for text in (1, 4, 5)
    ]
    return prepared(folder, clips)


@pytest.mark.parametrize("place", ["turn", "system"])
@pytest.mark.parametrize("scene", ["", "A room."])
def test_sums_are_what_the_family_measures(tmp_path: Path, place: str, scene: str) -> None:
    ruler = Prompted()
    loader = load(spoken(tmp_path), length_estimator=ruler, reference_placement=place, scene=scene)
    targets = loader.reference_sampler.targets
    for epoch in range(3):
        references = loader.reference_sampler.sample(targets.indices, epoch)
        measured = [
            ruler.length(loader.conversation(target, loader.reference_sampler.references(target, epoch)))
            for target in targets
        ]
        assert loader.lengths.of(targets.indices, references).tolist() == measured
        assert set(references.counts.tolist()) == {0, 1, 2, 3}


def test_few_conversations_are_measured(tmp_path: Path) -> None:
    """One conversation of each form is measured, however many there are."""
    clips = [said(tmp_path, f"{n}", text="x" * n, scene="A cave." if n % 2 else "") for n in range(60)]
    measured: list[str] = []

    class Counting(Characters):
        def length(self, conversation: Conversation) -> int:
            measured.append(conversation.id)
            return super().length(conversation)

    loader = load(prepared(tmp_path, clips), length_estimator=Counting())
    for epoch in range(5):
        loader.lengths.of(
            loader.reference_sampler.targets.indices,
            loader.reference_sampler.sample(loader.reference_sampler.targets.indices, epoch),
        )
    assert len(measured) == 2, "with the scene and without"


# What is kept


class Counting(Characters):
    def __init__(self, revision: str = "characters") -> None:
        self.text_revision = revision
        self.counted: list[str] = []

    def count_tokens(self, texts: Mapping[str, str]) -> list[int]:
        self.counted += texts
        return super().count_tokens(texts)


def utterances(folder: Path) -> list[Utterance]:
    return [said(folder, f"{n}", text="x" * n) for n in range(5)]


def test_texts_are_counted_once_for_each_tokenizer(tmp_path: Path) -> None:
    corpus, first, again, other = prepared(tmp_path, utterances(tmp_path)), Counting(), Counting(), Counting("other")
    assert count_text_tokens(corpus, first).tolist() == [0, 1, 2, 3, 4] and len(first.counted) == 5
    assert count_text_tokens(PreparedDataset.open(tmp_path), again).tolist() == [0, 1, 2, 3, 4] and again.counted == []
    assert count_text_tokens(corpus, other).tolist() == [0, 1, 2, 3, 4] and len(other.counted) == 5
    assert count_text_tokens(corpus, again).tolist() == [0, 1, 2, 3, 4] and again.counted == []


def test_two_tokenizers_of_nearly_one_name_are_told_apart(tmp_path: Path) -> None:
    corpus, twin = prepared(tmp_path, utterances(tmp_path)), Counting("characters, others")
    count_text_tokens(corpus, Counting("characters, some"))
    count_text_tokens(corpus, twin)
    assert len(twin.counted) == 5


def test_a_changed_text_is_counted_anew(tmp_path: Path) -> None:
    corpus, later = prepared(tmp_path, utterances(tmp_path)), Counting()
    count_text_tokens(corpus, Counting())
    lines = utterances(tmp_path)
    lines[0] = said(tmp_path, "0", text="a longer text")
    write_manifest(tmp_path / "manifest.jsonl", lines)
    assert count_text_tokens(PreparedDataset.open(tmp_path), later).tolist() == [13, 1, 2, 3, 4]


@pytest.mark.parametrize("damage", [b"", b"ARROW1", None])
def test_damaged_counts_are_made_anew(tmp_path: Path, damage: bytes | None) -> None:
    corpus, later = prepared(tmp_path, utterances(tmp_path)), Counting()
    count_text_tokens(corpus, Counting())
    [path] = tmp_path.rglob("tokens-*.arrow")
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:-50] if damage is None else damage)
    assert count_text_tokens(corpus, later).tolist() == [0, 1, 2, 3, 4] and len(later.counted) == 5
    assert path.read_bytes() == whole


def test_where_nothing_can_be_kept_it_is_counted_every_time_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise DataError("cannot write codes into there: read-only", hint="make room")

    corpus = prepared(tmp_path, utterances(tmp_path))
    monkeypatch.setattr("myna.data.lengths.write_arrow", refuse)
    assert count_text_tokens(corpus, Counting()).tolist() == [0, 1, 2, 3, 4]
    [note] = corpus.notes
    assert "counted every time" in note and "read-only" in note


def test_many_texts_are_counted_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("myna.data.lengths.TEXTS_PER_BATCH", 2)
    ruler = Counting()
    assert count_text_tokens(prepared(tmp_path, utterances(tmp_path)), ruler).tolist() == [0, 1, 2, 3, 4]
    assert ruler.counted == ["0", "1", "2", "3", "4"]


def test_nothing_is_counted_where_nothing_is_packed(tmp_path: Path) -> None:
    class Refusing(Characters):
        def count_tokens(self, texts: Mapping[str, str]) -> list[int]:
            raise AssertionError(texts)

    loader = load(prepared(tmp_path, utterances(tmp_path)), length_estimator=Refusing(), pack=False)
    loader.check_lengths()
    assert loader.rows_in_first_epoch() == 5
