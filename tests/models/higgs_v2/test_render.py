from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from myna.core.errors import DataError
from myna.data.codec import Codes
from myna.data.conversation import AudioClip, Conversation, Reference, Turn, speech_conversation
from myna.models.base import IGNORE_INDEX, RenderedSequence
from myna.models.higgs_v2.family import HiggsV2
from myna.models.higgs_v2.render import DelayPattern

from .conftest import cloning, random_codes

DELAY = DelayPattern(codebooks=8, begin=64, end=65)


def shown(rendered: RenderedSequence) -> str:
    """Return the prompt as one string, with clips in angle brackets."""
    return "".join(f"<{p.shown.split(':')[0]}>" if p.kind == "audio" else p.shown for p in rendered.spans)


@given(hnp.arrays(np.uint16, st.tuples(st.integers(1, 40), st.just(8)), elements=st.integers(0, 63)))
@settings(max_examples=50, deadline=None)
def test_delay_round_trips_and_masks_all_but_codes_and_one_end(codes: Codes) -> None:
    delayed, labels = DELAY.apply(codes), DELAY.labels(codes)
    assert len(delayed) == len(codes) + 9
    for book in range(8):
        assert np.array_equal(delayed[book + 1 : book + 1 + len(codes), book], codes[:, book])
    supervised = labels != IGNORE_INDEX
    assert np.array_equal(labels[supervised], delayed[supervised])
    assert (supervised.sum(axis=0) == len(codes) + 1).all(), "the codes and one end per codebook"
    assert ((labels == DELAY.end).sum(axis=0) == 1).all()
    assert not (labels == DELAY.begin).any()


def test_delay_shifts_codebook_k_by_k() -> None:
    codes = np.arange(3 * 8, dtype=np.uint16).reshape(3, 8)
    delayed = DELAY.apply(codes)
    for k in range(8):
        assert (delayed[: k + 1, k] == 64).all()
        assert delayed[k + 1 : k + 4, k].tolist() == codes[:, k].tolist()
        assert (delayed[k + 4 :, k] == 65).all()


def test_the_cloning_prompt_is_the_released_models(family: HiggsV2) -> None:
    rendered = family.render(cloning("hi", scene="Audio is recorded from a quiet room."))
    assert shown(rendered) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nGenerate audio following instruction.\n\n"
        "<|scene_desc_start|>\nAudio is recorded from a quiet room.\n<|scene_desc_end|><|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nas I said<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|><reference><|audio_eos|><|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|><target><|audio_eos|><|eot_id|>"
    )


def test_reference_in_the_system_message(family: HiggsV2) -> None:
    text = shown(family.render(cloning("hi", reference_placement="system", scene="A room.")))
    assert (
        "<|scene_desc_start|>\nA room.\n\nSPEAKER0: <|audio_bos|><reference><|audio_eos|>\n<|scene_desc_end|>" in text
    )


def test_several_speakers_have_tags_and_their_own_system_prompt(family: HiggsV2) -> None:
    references = tuple(Reference(f"voice {n}", AudioClip(f"r{n}", random_codes(4, n))) for n in range(2))
    text = shown(family.render(speech_conversation("[SPEAKER0] hi [SPEAKER1] ho", id="two", references=references)))
    assert "[SPEAKER0] voice 0<|eot_id|>" in text and "[SPEAKER1] voice 1<|eot_id|>" in text
    assert "do not read out the tag" in text


def test_only_the_target_is_supervised(family: HiggsV2) -> None:
    rendered = family.render(cloning(reference=5, target=7))
    assert (rendered.labels == IGNORE_INDEX).all(), "no text by default"
    assert (rendered.code_labels[: 5 + 9] == IGNORE_INDEX).all(), "the reference is context"
    assert (rendered.code_labels[5 + 9 :] != IGNORE_INDEX).sum() == 8 * (7 + 1)
    assert rendered.target_seconds == pytest.approx(7 / 25)


def test_switches_supervise_text_and_all_audio(family: HiggsV2) -> None:
    rendered = family.render(cloning(reference=5, target=7), supervise_text=True, supervise_references=True)
    assert (rendered.code_labels != IGNORE_INDEX).sum() == 8 * (5 + 1) + 8 * (7 + 1)
    supervised = [piece.shown for piece in rendered.spans if piece.supervised and piece.kind == "special"]
    assert supervised == ["<|audio_out_bos|>", "<|audio_eos|>", "<|eot_id|>"], "of the target's turn alone"


def test_the_open_prompt_is_the_beginning_of_the_trained_one(family: HiggsV2) -> None:
    trained, spoken = family.render(cloning(target=7)), family.render(cloning(target=None))
    assert trained.ids[: len(spoken)].tolist() == spoken.ids.tolist()
    assert spoken.ids[-1] == family.tokenizer.convert_tokens_to_ids("<|audio_out_bos|>")
    assert trained.ids[len(spoken)] == family.config.audio_token_id


def test_following_assistant_turns_end_with_eom(family: HiggsV2) -> None:
    turns = (Turn("user", ("hi",)), Turn("assistant", ("well",)), Turn("assistant", (AudioClip("t", random_codes(3)),)))
    assert "well<|eom_id|>" in shown(family.render(Conversation("c", turns)))


@pytest.mark.parametrize("text", ["Xin chào thế giới, đường phố Hà Nội", "السَّلامُ عَلَيْكُم", "👋🏽 naïve"])
def test_any_script_survives_the_tokens(family: HiggsV2, text: str) -> None:
    rendered = family.render(cloning(text))
    piece = next(piece for piece in rendered.spans if piece.shown == text)
    assert family.tokenizer.decode(rendered.ids[piece.start : piece.stop]) == text


def test_control_tokens_in_a_text_are_refused(family: HiggsV2) -> None:
    for token in ("<|eot_id|>", "<|start_header_id|>", "<|audio_out_bos|>", "<|AUDIO_OUT|>"):
        with pytest.raises(DataError, match=f"control token {re.escape(token)}"):
            family.render(cloning(f"hello {token} there"))


@pytest.mark.parametrize(
    "codes", [np.zeros((3, 7), np.uint16), np.full((3, 8), 64, np.uint16), np.zeros((0, 8), np.uint16)]
)
def test_codes_of_another_codec_are_refused(family: HiggsV2, codes: Codes) -> None:
    with pytest.raises(DataError, match="clip t has code"):
        family.render(speech_conversation("hi", id="x", target=AudioClip("t", codes, target=True)))


def test_prompt_revision_follows_the_prompt(family: HiggsV2, monkeypatch: pytest.MonkeyPatch) -> None:
    before = family.renderer.revision
    monkeypatch.setattr("myna.models.higgs_v2.render.SYSTEM_PROMPT", "Speak.")
    assert family.renderer.revision != before
