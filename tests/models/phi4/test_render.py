"""Conversations to ids: only the answer is learned, and lengths are known without rendering."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from myna.core.errors import DataError
from myna.data.codec import Codes
from myna.data.conversation import AudioClip, Conversation, Turn, answer_conversation, speech_conversation
from myna.models.base import IGNORE_INDEX
from myna.models.phi4.family import Phi4


def learned(family: Phi4, conversation: Conversation) -> str:
    rendered = family.render(conversation)
    return str(family.tokenizer.decode(rendered.ids[rendered.labels != IGNORE_INDEX]))


def test_only_the_answer_is_learned_with_its_end(family: Phi4, asked: list[Conversation]) -> None:
    assert learned(family, asked[2]) == "answer 2<|end|>"


def test_the_prompt_is_the_released_models(family: Phi4, codes: list[Codes]) -> None:
    conversation = Conversation(
        "x", (Turn("system", ("Be kind.",)), *answer_conversation("How?", AudioClip("c", codes[3]), id="x").turns)
    )
    text = family.tokenizer.decode(family.render(conversation).ids)
    assert text == "<|system|>Be kind.<|end|><|user|><|audio|><|audio|><|audio|>How?<|end|><|assistant|>"


def test_an_open_conversation_is_the_beginning_of_the_answered_one(
    family: Phi4, asked: list[Conversation], left_open: list[Conversation]
) -> None:
    whole, prompt = family.render(asked[0]).ids, family.render(left_open[0]).ids
    assert (whole[: len(prompt)] == prompt).all()
    assert not (family.render(left_open[0]).labels != IGNORE_INDEX).any()


def test_lengths_are_known_without_rendering(family: Phi4, asked: list[Conversation]) -> None:
    for conversation in asked:
        rendered = family.render(conversation)
        clip = conversation.turns[0].parts[0]
        assert isinstance(clip, AudioClip)
        frames = np.array([len(clip.codes)], np.int32)
        assert family.length(conversation) == len(rendered)
        assert family.positions(frames)[0] == len(rendered.codes) == (rendered.ids == family.renderer.audio_id).sum()


def test_tokens_of_an_answer_are_counted(family: Phi4, asked: list[Conversation]) -> None:
    assert family.count_tokens({"q": "answer 0"}) == [int((family.render(asked[0]).labels != IGNORE_INDEX).sum()) - 1]


def test_a_conversation_to_speak_is_refused(family: Phi4, codes: list[Codes]) -> None:
    with pytest.raises(DataError, match="this model answers in words"):
        family.render(speech_conversation("hello", id="x", target=AudioClip("c", codes[0], target=True)))


def test_control_tokens_in_an_answer_are_refused(family: Phi4, codes: list[Codes]) -> None:
    with pytest.raises(DataError, match=r"q contains the control token <\|end\|>"):
        family.render(answer_conversation("How?", AudioClip("c", codes[0]), id="q", answer="well<|end|>"))


@pytest.mark.parametrize("frames", [2, 4003])
def test_clips_too_long_for_the_encoder_are_refused(family: Phi4, frames: int) -> None:
    with pytest.raises(DataError, match=r"takes from 0\.03 s to 40 s"):
        family.render(answer_conversation("How?", AudioClip("c", np.zeros((frames, 80), np.uint16)), id="q"))


def test_a_sequence_longer_than_the_model_supports_is_refused(family: Phi4, codes: list[Codes]) -> None:
    with pytest.raises(DataError, match="was made for at most 4096"):
        family.render(answer_conversation("How?", AudioClip("c", codes[0]), id="q", answer="x" * 4096))


def test_features_of_another_model_are_refused(family: Phi4) -> None:
    with pytest.raises(DataError, match="features of shape"):
        family.render(answer_conversation("How?", AudioClip("c", np.zeros((50, 8), np.uint16)), id="q"))


def test_a_family_can_be_sent_to_another_process(family: Phi4, asked: list[Conversation]) -> None:
    again = pickle.loads(pickle.dumps(family))
    assert (again.render(asked[1]).ids == family.render(asked[1]).ids).all()
    batch = family.collate([family.render(asked[1])])
    assert pickle.loads(pickle.dumps(batch)).ids.equal(batch.ids)
