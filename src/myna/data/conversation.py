"""A conversation, before any family has turned it into tokens: who says what, with which clips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from myna.data.codec import Codes

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True, eq=False)
class AudioClip:
    """Codes of one utterance inside a conversation. Only a clip marked `target` is learned."""

    id: str
    codes: Codes
    target: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    role: Role
    parts: tuple[str | AudioClip, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """A voice to speak in: what was said, and how it sounded."""

    text: str
    clip: AudioClip


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order, with an optional scene. A family supplies its own system prompt where there is no system turn.

    A conversation whose last turn is the user's is one to be answered: the family leaves the assistant's turn open.
    """

    id: str
    turns: tuple[Turn, ...]
    scene: str = ""

    @property
    def is_open(self) -> bool:
        return self.turns[-1].role != "assistant"


ReferencePlacement = Literal["turn", "system"]


def script(
    text: str,
    *,
    id: str,
    references: tuple[Reference, ...] = (),
    target: AudioClip | None = None,
    scene: str = "",
    place: ReferencePlacement = "turn",
) -> Conversation:
    """The conversation that has `text` spoken, by the voices of `references` where given.

    Where `text` has tags for several speakers, `[SPEAKER0] ... [SPEAKER1] ...`, their references carry them too.
    Without a `target` the conversation stays open, ready to be spoken.
    """
    turns: list[Turn] = []
    if place == "system" and references:
        turns.append(Turn("system", tuple(reference.clip for reference in references)))
    else:
        for number, reference in enumerate(references):
            tag = f"[SPEAKER{number}]"
            tagged = tag in text and not reference.text.startswith(tag)
            said = f"{tag} {reference.text}" if tagged and len(references) > 1 else reference.text
            turns += [Turn("user", (said,)), Turn("assistant", (reference.clip,))]
    turns.append(Turn("user", (text,)))
    if target is not None:
        turns.append(Turn("assistant", (target,)))
    return Conversation(id, tuple(turns), scene)


def question(asked: str, clip: AudioClip, *, id: str, answer: str | None = None) -> Conversation:
    """The conversation in which a clip is heard, something is asked about it, and `answer` is said: only that is
    learned. Without one the conversation stays open, ready to be answered."""
    turns = [Turn("user", (clip, asked) if asked else (clip,))]
    if answer is not None:
        turns.append(Turn("assistant", (answer,)))
    return Conversation(id, tuple(turns))
