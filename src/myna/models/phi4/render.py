"""Conversation to ids, features and labels: the one renderer, for training and for answering.

    <|system|>...<|end|><|user|><|audio|> x n question<|end|><|assistant|>answer<|end|>

Eight spectra, 80 ms, stand behind one placeholder. Of all this only what the assistant says is learned, its end
included.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from myna.data.codec import Codes
from myna.data.conversation import AudioClip, Conversation, Turn
from myna.errors import DataError
from myna.models.base import IGNORED, RenderedSequence, TokenSpan
from myna.models.phi4.codec import HEARD_WITHIN, heard

END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SYSTEM = "You are a teacher who listens to learners of a language."
FILL = -1
"""Stands where the last position of a clip has fewer spectra than a position holds."""
LONGEST = 500
"""Positions of one clip, 40 s: beyond them the encoder would cut it into parts that do not hear one another."""

Ids = npt.NDArray[np.int64]


class _Part(NamedTuple):
    kind: Any
    said: str
    learned: bool
    clip: AudioClip | None = None


@dataclass(frozen=True, eq=False)
class Renderer:
    """Built once per checkpoint from its tokenizer and configuration."""

    tokenizer: Any
    audio_id: int
    bands: int
    reduction: int
    """Spectra behind one position."""
    frame_rate: float
    """Spectra a second."""
    longest: int
    """Positions of a sequence: a longer one would turn at other frequencies from its start on."""

    @property
    def revision(self) -> str:
        """A hash over the ids of conversations that use every rule of the prompt."""
        clip = AudioClip("probe", np.zeros((self.reduction + HEARD_WITHIN, self.bands), np.uint16))
        asked = Turn("user", (clip, "one"))
        probes = [(asked,), (Turn("system", ("two",)), asked, Turn("assistant", ("three",)))]
        ids = [self.render(Conversation("probe", turns)).ids for turns in probes]
        return hashlib.blake2b(np.concatenate(ids).tobytes(), digest_size=8).hexdigest()

    @property
    def text_revision(self) -> str:
        """A hash over the whole tokenizer."""
        return hashlib.blake2b(self._words.to_str().encode(), digest_size=16).hexdigest()

    def positions(self, frames: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        spectra = np.maximum(frames - HEARD_WITHIN + 1, 0)
        return (spectra + self.reduction - 1) // self.reduction

    def count_tokens(self, texts: Mapping[str, str]) -> list[int]:
        return [len(self._encode(self._plain(text, id))) for id, text in texts.items()]

    def length(self, conversation: Conversation) -> int:
        def measured(part: _Part) -> int:
            if part.clip is not None:
                return int(self.positions(np.array([len(part.clip.codes)], np.int32))[0])
            return 1 if part.kind == "special" else len(self._encode(part.said))

        return sum(map(measured, self._walk(conversation)))

    def render(self, conversation: Conversation) -> RenderedSequence:
        ids: list[Ids] = []
        codes: list[npt.NDArray[np.int64]] = []
        pieces: list[TokenSpan] = []
        labels: list[Ids] = []
        position, seconds = 0, 0.0
        for kind, said, learned, clip in self._walk(conversation):
            if clip is not None:
                part = np.full(self._count(clip), self.audio_id, np.int64)
                codes.append(self._stacked(clip))
                seconds += len(clip.codes) / self.frame_rate
            elif kind == "special":
                part = np.array([self._special(said)], np.int64)
            else:
                part = np.array(self._encode(said), np.int64)
            ids.append(part)
            labels.append(part if learned else np.full_like(part, IGNORED))
            pieces.append(TokenSpan(kind, position, position + len(part), said, learned))
            position += len(part)
        if position > self.longest:
            raise DataError(
                f"{conversation.id} takes {position} tokens, and the model was made for {self.longest} at once",
                hint="shorten its answer, or lower data.seconds",
            )
        # A single clip, as nearly always, need not be copied once more.
        empty = np.empty((0, self.reduction * self.bands), np.int64)
        stacked = codes[0] if len(codes) == 1 else np.concatenate([empty, *codes])
        return RenderedSequence(
            id=conversation.id,
            ids=np.concatenate(ids),
            codes=stacked,
            labels=np.concatenate(labels),
            code_labels=np.broadcast_to(np.int64(IGNORED), stacked.shape),
            pieces=tuple(pieces),
            target_seconds=seconds,
        )

    def _walk(self, conversation: Conversation) -> Iterator[_Part]:
        """Everything a conversation comes to, in order."""
        turns = conversation.turns
        if turns[0].role != "system":
            turns = (Turn("system", (SYSTEM,)), *turns)
        for turn in turns:
            learned = turn.role == "assistant"
            yield _Part("special", f"<|{turn.role}|>", False)
            for part in turn.parts:
                if isinstance(part, str):
                    yield _Part("text", self._plain(part, conversation.id), learned)
                    continue
                if part.target or turn.role != "user":
                    raise DataError(
                        f"{conversation.id} is to be spoken, and this model listens: its manifest line has no answer",
                        hint="import scores or answers beside the recordings: docs/decisions/0015 says how",
                    )
                yield _Part("audio", f"{part.id}: {len(part.codes) / self.frame_rate:.2f} s", False, part)
            yield _Part("special", END, learned)
        if conversation.is_open:
            yield _Part("special", "<|assistant|>", False)

    def _count(self, clip: AudioClip) -> int:
        count = int(self.positions(np.array([len(clip.codes)], np.int32))[0])
        if not 1 <= count <= LONGEST:
            raise DataError(
                f"clip {clip.id} lasts {len(clip.codes) / self.frame_rate:.2f} s; the model hears from 0.03 s to 40 s",
                hint="lower data.seconds, or cut the recording",
            )
        return count

    def _stacked(self, clip: AudioClip) -> npt.NDArray[np.int64]:
        """(positions, spectra of a position x bands); the last position may be filled up, which `collate` sees to."""
        codes: Codes = clip.codes
        if codes.ndim != 2 or codes.shape[1] != self.bands:
            raise DataError(
                f"clip {clip.id} has features of shape {codes.shape}, the model wants (frames, {self.bands})",
                hint="run `myna prepare` again with this model",
            )
        spectra, count = heard(codes), self._count(clip)
        filled = np.full((count * self.reduction, self.bands), FILL, np.int64)
        filled[: len(spectra)] = spectra
        return filled.reshape(count, -1)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._words.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _words(self) -> Any:
        """The tokenizer without transformers around it, which takes ten times as long for a sentence."""
        words = self.tokenizer.backend_tokenizer
        words.no_truncation()
        words.no_padding()
        return words

    def _special(self, token: str) -> int:
        id: int = self.tokenizer.convert_tokens_to_ids(token)
        return id

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(token) for token in self.tokenizer.get_added_vocab()) or r"(?!)")

    def _plain(self, text: str, id: str) -> str:
        """Text of the user's, which must not smuggle control tokens into the prompt."""
        found = self._control.search(text)
        if found:
            raise DataError(f"the text of {id} contains the control token {found[0]}", hint="remove it from the text")
        return text
