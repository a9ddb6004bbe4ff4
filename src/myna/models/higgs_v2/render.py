"""Conversation to ids, delayed codes and labels: the one renderer, for training and for speaking.

An audio turn of T frames takes T + 9 positions (eight codebooks): a begin-of-stream frame, the codes with codebook k
shifted by k frames, and one end-of-stream per codebook. Begin, fill and reference are never supervised; each
codebook's first end-of-stream is, or speech would not learn to stop.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property, lru_cache
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from myna.data.codec import Codes
from myna.data.conversation import AudioClip, Conversation, Turn
from myna.errors import DataError
from myna.models.base import IGNORED, RenderedSequence, TokenSpan

FRAME_RATE = 25.0

SYSTEM = "Generate audio following instruction."
SYSTEM_MANY_SPEAKERS = (
    "You are an AI assistant designed to convert text into speech.\n"
    "If the user's message includes a [SPEAKER*] tag, do not read out the tag and generate speech for the following "
    "text, using the specified voice.\n"
    "If no speaker tag is present, select a suitable voice on your own."
)
RECURRING = 4096
"""Texts that are kept with their tokens."""
SPEAKER_TAG = re.compile(r"\[SPEAKER(\d+)\]")

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DelayPattern:
    """How a clip's codes lie in the sequence. All numbers come from the model's configuration."""

    codebooks: int
    begin: int
    end: int

    def positions(self, frames: int) -> int:
        return frames + self.codebooks + 1

    def apply(self, codes: Codes) -> Ids:
        """(frames, codebooks) -> (frames + codebooks + 1, codebooks)."""
        books = self.codebooks
        out = np.full((self.positions(len(codes)), books), self.end, dtype=np.int64)
        out[:books][_triangle(books, books).T] = self.begin
        # Codebook k of a frame stands k positions further on: in memory that is one view, on a slant.
        down, right = out.strides
        as_strided(out[1:], codes.shape, (down, down + right))[:] = codes
        return out

    def labels(self, codes: Codes) -> Ids:
        """The same with everything masked but the codes and one end per codebook."""
        books = self.codebooks
        out = self.apply(codes)
        out[:books][_triangle(books, books).T] = IGNORED
        out[len(out) - books + 1 :][_triangle(books - 1, books)] = IGNORED
        return out

    def undo(self, delayed: Ids) -> Codes:
        """The inverse of `apply`."""
        frames = len(delayed) - self.codebooks - 1
        columns = [delayed[k + 1 : k + 1 + frames, k] for k in range(self.codebooks)]
        return np.stack(columns, axis=1).astype(np.uint16)


@cache
def _triangle(rows: int, columns: int) -> npt.NDArray[np.bool_]:
    """True on the diagonal and below it."""
    return np.tri(rows, columns, dtype=bool)


@dataclass(frozen=True, eq=False)
class Renderer:
    """Built once per checkpoint from its tokenizer and configuration."""

    tokenizer: Any
    delay: DelayPattern
    codes_per_book: int
    audio_id: int
    delay_id: int
    control_tokens: tuple[str, ...]

    def __getstate__(self) -> dict[str, Any]:
        # Without what it remembers of texts, which every process finds out by itself.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def revision(self) -> str:
        """A hash over the ids of a conversation that uses every rule of the prompt."""
        clip = AudioClip("probe", np.zeros((2, self.delay.codebooks), np.uint16), target=True)
        turns = (
            Turn("system", (clip, clip)),
            Turn("user", ("[SPEAKER0] one [SPEAKER1] two",)),
            Turn("assistant", ("three", clip)),
            Turn("assistant", (clip,)),
        )
        ids = [self.render(Conversation("probe", turns, scene), supervise_text=True).ids for scene in ("", "A room.")]
        ids.append(self.render(Conversation("probe", (Turn("user", ("one",)),))).ids)
        return hashlib.blake2b(np.concatenate(ids).tobytes(), digest_size=8).hexdigest()

    @property
    def text_revision(self) -> str:
        """A hash over the whole tokenizer."""
        return hashlib.blake2b(self._words.to_str().encode(), digest_size=16).hexdigest()

    def render(
        self, conversation: Conversation, *, supervise_text: bool = False, supervise_references: bool = False
    ) -> RenderedSequence:
        draft = _Draft(self, conversation.id)
        self._walk(conversation, draft, supervise_text, supervise_references)
        return draft.finish()

    def length(self, conversation: Conversation) -> int:
        measure = _Measure(self, conversation.id)
        self._walk(conversation, measure)
        return measure.positions

    def count_tokens(self, texts: Mapping[str, str]) -> list[int]:
        plain = [self._plain(text, id) for id, text in texts.items()]
        return [len(words) for words in self._words.encode_batch_fast(plain, add_special_tokens=False)]

    def encode(self, text: str) -> Ids:
        return np.array(self._words.encode(text, add_special_tokens=False).ids, np.int64)

    @cached_property
    def recurring(self) -> Callable[[str], Ids]:
        """`encode` for what comes in every sequence: headers, and system prompts with their few scenes."""
        return lru_cache(RECURRING)(self.encode)

    @cached_property
    def special(self) -> Callable[[str], Ids]:
        return lru_cache(None)(lambda token: np.array([self.tokenizer.convert_tokens_to_ids(token)], np.int64))

    @cached_property
    def _words(self) -> Any:
        """The tokenizer without transformers around it, which takes ten times as long for a sentence."""
        words = self.tokenizer.backend_tokenizer
        words.no_truncation()
        words.no_padding()
        return words

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(token) for token in self.control_tokens) or r"(?!)")

    def _walk(
        self,
        conversation: Conversation,
        draft: _Sheet,
        supervise_text: bool = False,
        supervise_references: bool = False,
    ) -> None:
        """Everything a conversation comes to, in order, to be written down or to be measured."""
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
            learned = any(isinstance(part, AudioClip) and part.target for part in turn.parts)
            text_label = supervise_text and turn.role == "assistant" and (learned or _is_text(turn))
            for part in turn.parts:
                if isinstance(part, AudioClip):
                    draft.clip(part, turn.role, part.target or supervise_references, text_label)
                else:
                    draft.text(self._plain(part, conversation.id), text_label)
            goes_on = turn.role == "assistant" and following is not None and following.role == "assistant"
            draft.special("<|eom_id|>" if goes_on else "<|eot_id|>", text_label)
        if conversation.is_open:
            draft.header("assistant")
            draft.special("<|audio_out_bos|>")

    def _system(self, draft: _Sheet, turn: Turn, scene: str, many_speakers: bool) -> None:
        texts = [part for part in turn.parts if isinstance(part, str)]
        clips = [part for part in turn.parts if isinstance(part, AudioClip)]
        system = texts[0] if texts else SYSTEM_MANY_SPEAKERS if many_speakers else SYSTEM
        opening = self._plain(system, draft.id)
        if scene or clips:
            opening += "\n\n<|scene_desc_start|>\n"
        if scene:
            opening += self._plain(scene, draft.id) + ("\n\n" if clips else "")
        for number, clip in enumerate(clips):
            draft.recurring(f"{opening}SPEAKER{number}: ")
            draft.clip(clip, "system", False, False)
            opening = "\n"
        closing = ("\n" if scene and not clips else "") + ("<|scene_desc_end|>" if scene or clips else "")
        draft.recurring(opening + closing)

    def _plain(self, text: str, id: str) -> str:
        """Text of the user's, which must not smuggle control tokens into the prompt."""
        found = self._control.search(text)
        if found:
            raise DataError(f"the text of {id} contains the control token {found[0]}", hint="remove it from the text")
        return text


def _speakers(text: str) -> int:
    return len(set(SPEAKER_TAG.findall(text)))


def _is_text(turn: Turn) -> bool:
    return not any(isinstance(part, AudioClip) for part in turn.parts)


class _Sheet(ABC):
    """What a conversation is written on."""

    def __init__(self, rules: Renderer, id: str) -> None:
        self.rules, self.id = rules, id
        self.positions = 0

    def header(self, role: str) -> None:
        self.special("<|start_header_id|>")
        self.recurring(role)
        self.special("<|end_header_id|>")
        self.recurring("\n\n")

    @abstractmethod
    def special(self, token: str, supervised: bool = False) -> None: ...

    @abstractmethod
    def text(self, text: str, supervised: bool = False) -> None: ...

    @abstractmethod
    def recurring(self, text: str) -> None:
        """Text of ours that many conversations share."""

    @abstractmethod
    def clip(self, clip: AudioClip, role: str, supervised: bool, text_label: bool) -> None: ...


class _Measure(_Sheet):
    """Only counts."""

    def special(self, token: str, supervised: bool = False) -> None:  # noqa: ARG002 - counts like any other
        self.positions += 1

    def text(self, text: str, supervised: bool = False) -> None:  # noqa: ARG002
        self.positions += len(self.rules.encode(text))

    def recurring(self, text: str) -> None:
        self.positions += len(self.rules.recurring(text))

    def clip(self, clip: AudioClip, role: str, supervised: bool, text_label: bool) -> None:  # noqa: ARG002
        self.positions += self.rules.delay.positions(len(clip.codes)) + 2


class _Draft(_Sheet):
    """A sequence while it is being written."""

    def __init__(self, rules: Renderer, id: str) -> None:
        super().__init__(rules, id)
        self.ids: list[Ids] = []
        self.learned: list[slice] = []
        self.codes: list[Ids] = []
        self.code_labels: list[Ids] = []
        self.pieces: list[TokenSpan] = []
        self.target_frames = 0

    def special(self, token: str, supervised: bool = False) -> None:
        self._add(self.rules.special(token), "special", token, supervised)

    def text(self, text: str, supervised: bool = False) -> None:
        self._add(self.rules.encode(text), "text", text, supervised)

    def recurring(self, text: str) -> None:
        self._add(self.rules.recurring(text), "text", text, False)

    def clip(self, clip: AudioClip, role: str, supervised: bool, text_label: bool) -> None:
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
        placeholders = np.full(len(delayed), rules.audio_id, np.int64)
        placeholders[len(delayed) - rules.delay.codebooks + 1 :] = rules.delay_id
        shown = f"{clip.id}: {len(codes)} frames, {len(codes) / FRAME_RATE:.2f} s"
        self._add(placeholders, "audio", shown, supervised)
        self.target_frames += len(codes) if supervised else 0
        self.special("<|audio_eos|>", text_label)

    def _add(self, ids: Ids, kind: Literal["text", "special", "audio"], shown: str, supervised: bool) -> None:
        start, self.positions = self.positions, self.positions + len(ids)
        self.ids.append(ids)
        if supervised and kind != "audio":
            self.learned.append(slice(start, self.positions))
        self.pieces.append(TokenSpan(kind, start, self.positions, shown, supervised))

    def finish(self) -> RenderedSequence:
        nothing = np.empty((0, self.rules.delay.codebooks), np.int64)
        ids = np.concatenate(self.ids)
        labels = np.full_like(ids, IGNORED)
        for part in self.learned:
            labels[part] = ids[part]
        return RenderedSequence(
            id=self.id,
            ids=ids,
            codes=np.concatenate(self.codes) if self.codes else nothing,
            labels=labels,
            code_labels=np.concatenate(self.code_labels) if self.code_labels else nothing,
            pieces=tuple(self.pieces),
            target_seconds=self.target_frames / FRAME_RATE,
        )
