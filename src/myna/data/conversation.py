"""Conversations of text and audio turns, the input of every family's renderer."""

from dataclasses import dataclass
from typing import Literal

from myna.data.codec import Codes

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True, eq=False)
class AudioClip:
    """Codes of one utterance in a conversation. Only a clip marked `target` has labels."""

    id: str
    codes: Codes
    target: bool = False
    reference_only: bool = False
    """Whether the clip is never supervised, even if the recipe supervises references."""


@dataclass(frozen=True, slots=True)
class Turn:
    role: Role
    parts: tuple[str | AudioClip, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """Voice reference: a clip and its transcript."""

    text: str
    clip: AudioClip


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order, with an optional scene. A family adds its own system prompt if there is no system turn.

    If the last turn is the user's, the family renders an open assistant turn for generation.
    """

    id: str
    turns: tuple[Turn, ...]
    scene: str = ""

    @property
    def is_open(self) -> bool:
        return self.turns[-1].role != "assistant"


ReferencePlacement = Literal["turn", "system"]


def speech_conversation(
    text: str,
    *,
    id: str,
    references: tuple[Reference, ...] = (),
    target: AudioClip | None = None,
    scene: str = "",
    reference_placement: ReferencePlacement = "turn",
) -> Conversation:
    """Text-to-speech conversation: `text` spoken in the voices of `references`, if there are any.

    A `text` with tags for several speakers, `[SPEAKER0] ... [SPEAKER1] ...`, has references with the same tags. Without
    a `target` the conversation is open: a prompt for generation.
    """
    turns: list[Turn] = []
    if reference_placement == "system" and references:
        turns.append(Turn("system", tuple(reference.clip for reference in references)))
    else:
        for number, reference in enumerate(references):
            tag = f"[SPEAKER{number}]"
            needs_tag = len(references) > 1 and tag in text and not reference.text.startswith(tag)
            turns.append(Turn("user", (f"{tag} {reference.text}" if needs_tag else reference.text,)))
            turns.append(Turn("assistant", (reference.clip,)))
    turns.append(Turn("user", (text,)))
    if target is not None:
        turns.append(Turn("assistant", (target,)))
    return Conversation(id, tuple(turns), scene)


def answer_conversation(question: str, clip: AudioClip, *, id: str, answer: str | None = None) -> Conversation:
    """Audio-understanding conversation: a clip and a question about it, answered in text; only `answer` is learned.

    Without an answer the conversation is open, a prompt for generation.
    """
    turns = [Turn("user", (clip, question) if question else (clip,))]
    if answer is not None:
        turns.append(Turn("assistant", (answer,)))
    return Conversation(id, tuple(turns))
