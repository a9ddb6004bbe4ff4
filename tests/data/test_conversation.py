"""Conversations for training and for speaking are the same but for the last turn."""

from __future__ import annotations

import numpy as np
import pytest

from myna.data.conversation import AudioClip, Conversation, Reference, ReferencePlacement, Turn, speech_conversation

VOICES = tuple(Reference(f"voice {n}", AudioClip(f"r{n}", np.full((3, 8), n, np.uint16))) for n in range(2))
TARGET = AudioClip("t", np.zeros((4, 8), np.uint16), target=True)


def shape(conversation: Conversation) -> list[tuple[str, ...]]:
    """Roles with texts, and clips in angle brackets."""
    return [
        (turn.role, *(f"<{part.id}>" if isinstance(part, AudioClip) else part for part in turn.parts))
        for turn in conversation.turns
    ]


def test_a_line_alone_is_a_turn_to_be_answered() -> None:
    conversation = speech_conversation("hi", id="x", scene="A room.")
    assert shape(conversation) == [("user", "hi")]
    assert (conversation.id, conversation.scene, conversation.is_open) == ("x", "A room.", True)


def test_a_reference_is_said_before_the_text() -> None:
    conversation = speech_conversation("hi", id="x", references=VOICES[:1], target=TARGET)
    assert shape(conversation) == [("user", "voice 0"), ("assistant", "<r0>"), ("user", "hi"), ("assistant", "<t>")]
    assert not conversation.is_open


def test_several_voices_carry_the_tags_of_the_text() -> None:
    turns = shape(speech_conversation("[SPEAKER0] hi [SPEAKER1] ho", id="x", references=VOICES))
    assert [turn[1] for turn in turns] == [
        "[SPEAKER0] voice 0", "<r0>", "[SPEAKER1] voice 1", "<r1>", "[SPEAKER0] hi [SPEAKER1] ho",
    ]  # fmt: skip


def test_tags_that_a_reference_has_already_are_not_doubled() -> None:
    tagged = tuple(Reference(f"[SPEAKER{n}] voice {n}", voice.clip) for n, voice in enumerate(VOICES))
    text = "[SPEAKER0] hi [SPEAKER1] ho"
    assert shape(speech_conversation(text, id="x", references=tagged)) == shape(
        speech_conversation(text, id="x", references=VOICES)
    )


@pytest.mark.parametrize("text", ["hi", "[SPEAKER10] hi"])
def test_voices_that_the_text_does_not_name_get_no_tag(text: str) -> None:
    assert [turn[1] for turn in shape(speech_conversation(text, id="x", references=VOICES))][:4:2] == [
        "voice 0",
        "voice 1",
    ]


def test_in_the_system_message_there_are_clips_alone() -> None:
    conversation = speech_conversation(
        "[SPEAKER0] hi [SPEAKER1] ho", id="x", references=VOICES, target=TARGET, reference_placement="system"
    )
    assert shape(conversation) == [
        ("system", "<r0>", "<r1>"),
        ("user", "[SPEAKER0] hi [SPEAKER1] ho"),
        ("assistant", "<t>"),
    ]
    assert shape(speech_conversation("hi", id="x", reference_placement="system")) == [("user", "hi")], (
        "no voice, no system message of ours"
    )


@pytest.mark.parametrize("place", ["turn", "system"])
@pytest.mark.parametrize("references", [(), VOICES[:1], VOICES])
def test_training_sees_what_speaking_sees_and_then_the_target(
    references: tuple[Reference, ...], place: ReferencePlacement
) -> None:
    trained = speech_conversation(
        "hi", id="x", references=references, target=TARGET, scene="A room.", reference_placement=place
    )
    spoken = speech_conversation("hi", id="x", references=references, scene="A room.", reference_placement=place)
    assert shape(trained) == [*shape(spoken), ("assistant", "<t>")]
    assert spoken.is_open and not trained.is_open
    clips = [part for turn in trained.turns for part in turn.parts if isinstance(part, AudioClip)]
    assert [clip.id for clip in clips if clip.target] == ["t"], "nothing else is learned"


def test_a_conversation_is_open_until_the_assistant_has_spoken() -> None:
    assert Conversation("x", (Turn("system", ("Sing.",)),)).is_open
    assert not Conversation("x", (Turn("user", ("hi",)), Turn("assistant", ("ho",)))).is_open
