"""Clips with a question and an answer, beside speech targets: conversations and lengths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from myna.data.conversation import AudioClip, Conversation, Turn
from myna.data.dataset import PreparedDataset
from myna.data.loader import Loader
from tests.data.corpora import prepared, said
from tests.data.letter_rows import Characters, Line, load, rows_of


class Stacking(Characters):
    """Family that takes four frames a position, and adds three tokens to every turn."""

    text_revision = "stacking"

    def positions(self, frames: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        return (frames + 3) // 4

    def length(self, conversation: Conversation) -> int:
        length = 3 * len(conversation.turns) + len(conversation.scene)
        for turn in conversation.turns:
            for part in turn.parts:
                length += (len(part.codes) + 3) // 4 if isinstance(part, AudioClip) else len(part)
        return length


def render(conversation: Conversation) -> Line:
    return Line(conversation.id, (), Stacking().length(conversation))


def both(folder: Path) -> PreparedDataset:
    """Prepare speech targets and question clips; one question equals the scene of another clip."""
    clips = [
        said(folder, f"spoken{n}", seconds=1 + n / 10, text="x" * n, scene="A room." * (n % 2)) for n in range(1, 5)
    ]
    for number, asked in enumerate(["", "How?", "How was that?", "A room.", "How?"]):
        clip = said(folder, f"heard{number}", seconds=1 + number / 7, question=asked, answer="well " * (number + 1))
        clips.append(clip)
    return prepared(folder, clips)


def loaded(corpus: PreparedDataset) -> Loader[Line, list[Line]]:
    return load(corpus, length_estimator=Stacking(), render=render)


def test_lengths_are_what_the_family_measures(tmp_path: Path) -> None:
    loader = loaded(both(tmp_path))
    targets = loader.reference_sampler.targets
    voices = {reference.id for target in targets for reference in loader.reference_sampler.references(target, 0)}
    assert voices and not any(id.startswith("heard") for id in voices)
    lengths = loader.lengths.of(targets.indices, loader.reference_sampler.sample(targets.indices, 0)).tolist()
    assert lengths == [len(loader.sequence(target, 0)) for target in targets]
    ids = {line.id for row in rows_of(loader, loader.rows_in_first_epoch()) for line in row}
    assert len(ids) == 9, "each is rendered as it was counted, or the training would stop"


def test_what_is_heard_is_asked_about_and_answered(tmp_path: Path) -> None:
    corpus = both(tmp_path)
    loader = loaded(corpus)
    [target] = corpus.utterances.with_id("heard2")
    assert loader.reference_sampler.references(target, 0) == (), "nobody's voice is needed"
    turns = loader.conversation(target, ()).turns
    [clip, asked] = turns[0].parts
    assert isinstance(clip, AudioClip) and not clip.target and asked == "How was that?"
    assert turns[1] == Turn("assistant", ("well well well ",))


def test_without_a_question_there_is_only_the_clip(tmp_path: Path) -> None:
    corpus = both(tmp_path)
    [target] = corpus.utterances.with_id("heard0")
    assert len(loaded(corpus).conversation(target, ()).turns[0].parts) == 1


def test_another_answer_is_other_data_with_the_same_codes(tmp_path: Path) -> None:
    clip = said(tmp_path, "a", answer="well")
    before = prepared(tmp_path, [clip])
    clip.extras["answer"] = "badly, alas"
    after = prepared(tmp_path, [clip])
    assert loaded(after).fingerprint != loaded(before).fingerprint
    assert after.key(clip) == before.key(clip)
    assert loaded(after).lengths.as_target[0] - loaded(before).lengths.as_target[0] == len("badly, alas") - len("well")
