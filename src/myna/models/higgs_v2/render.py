"""Conversation to ids, delayed codes and labels: the one renderer, for training and for speaking.

An audio turn of T frames takes T + 9 positions (eight codebooks): a begin-of-stream frame, the codes with codebook k
shifted by k frames, and one end-of-stream per codebook. Begin, fill and reference are never supervised; each
codebook's first end-of-stream is, or speech would not learn to stop.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from myna.data.codec import Codes
from myna.data.conversation import Clip, Conversation, Turn
from myna.errors import DataError
from myna.models.base import IGNORED, Piece, Rendered

FRAME_RATE = 25.0

SYSTEM = "Generate audio following instruction."
SYSTEM_MANY_SPEAKERS = (
    "You are an AI assistant designed to convert text into speech.\n"
    "If the user's message includes a [SPEAKER*] tag, do not read out the tag and generate speech for the following "
    "text, using the specified voice.\n"
    "If no speaker tag is present, select a suitable voice on your own."
)
SPEAKER_TAG = re.compile(r"\[SPEAKER(\d+)\]")


@dataclass(frozen=True, slots=True)
class DelayPattern:
    """How a clip's codes lie in the sequence. All numbers come from the model's configuration."""

    codebooks: int
    begin: int
    end: int

    def positions(self, frames: int) -> int:
        return frames + self.codebooks + 1

    def apply(self, codes: Codes) -> npt.NDArray[np.int64]:
        """(frames, codebooks) -> (frames + codebooks + 1, codebooks)."""
        out = np.full((self.positions(len(codes)), self.codebooks), self.end, dtype=np.int64)
        for k in range(self.codebooks):
            out[: k + 1, k] = self.begin
            out[k + 1 : k + 1 + len(codes), k] = codes[:, k]
        return out

    def labels(self, codes: Codes) -> npt.NDArray[np.int64]:
        """The same with everything masked but the codes and one end per codebook."""
        out = self.apply(codes)
        for k in range(self.codebooks):
            out[: k + 1, k] = IGNORED
            out[k + 2 + len(codes) :, k] = IGNORED
        return out

    def undo(self, delayed: npt.NDArray[np.int64]) -> Codes:
        """The inverse of `apply`."""
        frames = len(delayed) - self.codebooks - 1
        columns = [delayed[k + 1 : k + 1 + frames, k] for k in range(self.codebooks)]
        return np.stack(columns, axis=1).astype(np.uint16)


@dataclass(frozen=True, slots=True)
class Renderer:
    """Built once per checkpoint from its tokenizer and configuration."""

    tokenizer: Any
    delay: DelayPattern
    codes_per_book: int
    audio_id: int
    delay_id: int
    control_tokens: tuple[str, ...]

    @property
    def revision(self) -> str:
        """A hash over the ids of a conversation that uses every rule of the prompt."""
        clip = Clip("probe", np.zeros((2, self.delay.codebooks), np.uint16), target=True)
        turns = (
            Turn("system", (clip, clip)),
            Turn("user", ("[SPEAKER0] one [SPEAKER1] two",)),
            Turn("assistant", ("three", clip)),
            Turn("assistant", (clip,)),
        )
        ids = [self.render(Conversation("probe", turns, scene), supervise_text=True).ids for scene in ("", "A room.")]
        ids.append(self.render(Conversation("probe", (Turn("user", ("one",)),))).ids)
        return hashlib.blake2b(np.concatenate(ids).tobytes(), digest_size=8).hexdigest()

    def render(
        self, conversation: Conversation, *, supervise_text: bool = False, supervise_all_audio: bool = False
    ) -> Rendered:
        draft = _Draft(self, conversation.id)
        turns = conversation.turns
        draft.special("<|begin_of_text|>")
        if turns[0].role != "system":
            turns = (Turn("system", ()), *turns)
        many_speakers = any(_speakers(part) > 1 for turn in turns for part in turn.parts if isinstance(part, str))
        for turn, following in zip_longest(turns, turns[1:]):
            draft.header(turn.role)
            if turn.role == "system":
                self._system(draft, turn, conversation.scene, many_speakers)
                draft.special("<|eot_id|>")
                continue
            learned = any(isinstance(part, Clip) and part.target for part in turn.parts)
            text_label = supervise_text and turn.role == "assistant" and (learned or _is_text(turn))
            for part in turn.parts:
                if isinstance(part, Clip):
                    draft.clip(part, turn.role, part.target or supervise_all_audio, text_label)
                else:
                    draft.text(self._plain(part, conversation.id), text_label)
            goes_on = turn.role == "assistant" and following is not None and following.role == "assistant"
            draft.special("<|eom_id|>" if goes_on else "<|eot_id|>", text_label)
        if conversation.is_open:
            draft.header("assistant")
            draft.special("<|audio_out_bos|>")
        return draft.finish()

    def _system(self, draft: _Draft, turn: Turn, scene: str, many_speakers: bool) -> None:
        texts = [part for part in turn.parts if isinstance(part, str)]
        clips = [part for part in turn.parts if isinstance(part, Clip)]
        system = texts[0] if texts else SYSTEM_MANY_SPEAKERS if many_speakers else SYSTEM
        opening = self._plain(system, draft.id)
        if scene or clips:
            opening += "\n\n<|scene_desc_start|>\n"
        if scene:
            opening += self._plain(scene, draft.id) + ("\n\n" if clips else "")
        for number, clip in enumerate(clips):
            draft.text(f"{opening}SPEAKER{number}: ")
            draft.clip(clip, "system", False, False)
            opening = "\n"
        draft.text(opening + ("\n" if scene and not clips else "") + ("<|scene_desc_end|>" if scene or clips else ""))

    def _plain(self, text: str, id: str) -> str:
        """Text of the user's, which must not smuggle control tokens into the prompt."""
        for token in self.control_tokens:
            if token in text:
                raise DataError(f"the text of {id} contains the control token {token}", hint="remove it from the text")
        return text


def _speakers(text: str) -> int:
    return len(set(SPEAKER_TAG.findall(text)))


def _is_text(turn: Turn) -> bool:
    return not any(isinstance(part, Clip) for part in turn.parts)


@dataclass(slots=True)
class _Draft:
    """A sequence while it is being written."""

    rules: Renderer
    id: str
    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    codes: list[npt.NDArray[np.int64]] = field(default_factory=list)
    code_labels: list[npt.NDArray[np.int64]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    target_frames: int = 0

    def header(self, role: str) -> None:
        self.special("<|start_header_id|>")
        self.text(role)
        self.special("<|end_header_id|>")
        self.text("\n\n")

    def special(self, token: str, supervised: bool = False) -> None:
        self._add([self.rules.tokenizer.convert_tokens_to_ids(token)], "special", token, supervised)

    def text(self, text: str, supervised: bool = False) -> None:
        self._add(self.rules.tokenizer.encode(text, add_special_tokens=False), "text", text, supervised)

    def clip(self, clip: Clip, role: str, supervised: bool, text_label: bool) -> None:
        rules, codes = self.rules, clip.codes
        if codes.ndim != 2 or codes.shape[1] != rules.delay.codebooks or len(codes) == 0:
            raise DataError(
                f"clip {clip.id} has codes of shape {codes.shape}, the model wants (frames, {rules.delay.codebooks})",
                hint="run `myna prepare` again with this model",
            )
        if codes.max() >= rules.codes_per_book:
            raise DataError(
                f"clip {clip.id} has code {codes.max()}, the model's codebooks end at {rules.codes_per_book - 1}",
                hint="run `myna prepare` again with this model's codec",
            )
        self.special("<|audio_out_bos|>" if role == "assistant" else "<|audio_bos|>", text_label)
        delayed = rules.delay.apply(codes)
        self.codes.append(delayed)
        self.code_labels.append(rules.delay.labels(codes) if supervised else np.full_like(delayed, IGNORED))
        tail = rules.delay.codebooks - 1
        placeholders = [rules.audio_id] * (len(delayed) - tail) + [rules.delay_id] * tail
        shown = f"{clip.id}: {len(codes)} frames, {len(codes) / FRAME_RATE:.2f} s"
        self._add(placeholders, "audio", shown, supervised, label=False)
        self.target_frames += len(codes) if supervised else 0
        self.special("<|audio_eos|>", text_label)

    def _add(self, ids: list[int], kind: Any, shown: str, supervised: bool, *, label: bool = True) -> None:
        start = len(self.ids)
        self.ids += ids
        self.labels += ids if supervised and label else [IGNORED] * len(ids)
        self.pieces.append(Piece(kind, start, len(self.ids), shown, supervised))

    def finish(self) -> Rendered:
        nothing = np.empty((0, self.rules.delay.codebooks), np.int64)
        return Rendered(
            id=self.id,
            ids=np.array(self.ids, np.int64),
            codes=np.concatenate(self.codes) if self.codes else nothing,
            labels=np.array(self.labels, np.int64),
            code_labels=np.concatenate(self.code_labels) if self.code_labels else nothing,
            pieces=tuple(self.pieces),
            target_seconds=self.target_frames / FRAME_RATE,
        )
