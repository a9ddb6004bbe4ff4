"""Prompt renderer: conversation to token ids, features and labels, for training and for answering.

    <|user|><|audio|> x n question<|end|><|assistant|>answer<|end|>

One placeholder stands for eight spectra, 80 ms. Only the assistant's turn is supervised, its end token included.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from myna.core.errors import DataError
from myna.data.codec import Codes
from myna.data.conversation import AudioClip, Conversation, Turn
from myna.models.base import IGNORE_INDEX, RenderedSequence, TokenSpan
from myna.models.family_parts import Ids, PromptRenderer, PromptSegment
from myna.models.phi4.codec import WINDOW_FRAMES, valid_frames

END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
FILL_CODE = -1
"""Value that fills the last position of a clip, which may have fewer spectra than a position holds."""
MAX_CLIP_POSITIONS = 500
"""Longest clip in positions, 40 s. The encoder would cut longer clips into parts that do not attend to one another."""


@dataclass(frozen=True, eq=False)
class Phi4Renderer(PromptRenderer):
    """Prompt format of one checkpoint, from its tokenizer and configuration."""

    audio_id: int
    bands: int
    spectra_per_position: int
    frame_rate: float
    max_positions: int
    """Longest sequence. A longer one would need other rotary frequencies from its start on."""

    @property
    def revision(self) -> str:
        clip = AudioClip("probe", np.zeros((self.spectra_per_position + WINDOW_FRAMES, self.bands), np.uint16))
        question = Turn("user", (clip, "one"))
        probes = [(question,), (Turn("system", ("two",)), question, Turn("assistant", ("three",)))]
        ids = [self.render(Conversation("probe", turns)).ids for turns in probes]
        return hashlib.blake2b(np.concatenate(ids).tobytes(), digest_size=8).hexdigest()

    def positions(self, frames: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        spectra = np.maximum(frames - WINDOW_FRAMES + 1, 0)
        return (spectra + self.spectra_per_position - 1) // self.spectra_per_position

    def render(self, conversation: Conversation, **_: bool) -> RenderedSequence:
        """Render a conversation. Only the answer is supervised, whatever is asked for."""
        ids, codes, spans, labels = [], [], [], []
        position, seconds = 0, 0.0
        for segment in self._segments(conversation):
            if segment.clip is None:
                part = self._ids(segment)
            else:
                codes.append(self._stack_spectra(segment.clip))
                part = np.full(len(codes[-1]), self.audio_id, np.int64)
                seconds += len(segment.clip.codes) / self.frame_rate
            ids.append(part)
            labels.append(part if segment.supervised else np.full_like(part, IGNORE_INDEX))
            spans.append(TokenSpan(segment.kind, position, position + len(part), segment.text, segment.supervised))
            position += len(part)
        if position > self.max_positions:
            raise DataError(
                f"{conversation.id} takes {position} tokens, and the model was made for at most {self.max_positions}",
                hint="shorten its answer, or lower data.seconds",
            )
        # A single clip, the usual case, is not copied once more.
        empty = np.empty((0, self.spectra_per_position * self.bands), np.int64)
        stacked = codes[0] if len(codes) == 1 else np.concatenate([empty, *codes])
        return RenderedSequence(
            id=conversation.id,
            ids=np.concatenate(ids),
            codes=stacked,
            labels=np.concatenate(labels),
            code_labels=np.broadcast_to(np.int64(IGNORE_INDEX), stacked.shape),
            spans=tuple(spans),
            target_seconds=seconds,
        )

    def _segments(self, conversation: Conversation) -> Iterator[PromptSegment]:
        for turn in conversation.turns:
            supervised = turn.role == "assistant"
            yield PromptSegment("special", f"<|{turn.role}|>")
            for part in turn.parts:
                if isinstance(part, str):
                    yield PromptSegment("text", self._check_text(part, conversation.id), supervised)
                    continue
                if part.target or turn.role != "user":
                    raise DataError(
                        f"{conversation.id} is to be spoken, and this model answers in words: its manifest line has no "
                        "answer",
                        hint="write `question` and `answer` into its `extras`, or train a model that speaks",
                    )
                yield PromptSegment("audio", f"{part.id}: {len(part.codes) / self.frame_rate:.2f} s", False, part)
            yield PromptSegment("special", END, supervised)
        if conversation.is_open:
            yield PromptSegment("special", "<|assistant|>")

    def _clip_positions(self, clip: AudioClip) -> int:
        return int(self.positions(np.array([len(clip.codes)], np.int32))[0])

    def _stack_spectra(self, clip: AudioClip) -> Ids:
        """Return (positions, spectra of a position x bands), with the last position filled up."""
        codes: Codes = clip.codes
        if codes.ndim != 2 or codes.shape[1] != self.bands:
            raise DataError(
                f"clip {clip.id} has features of shape {codes.shape}, the model wants (frames, {self.bands})",
                hint="run `myna prepare` again with this model",
            )
        spectra, count = valid_frames(codes), self._clip_positions(clip)
        if not 1 <= count <= MAX_CLIP_POSITIONS:
            raise DataError(
                f"clip {clip.id} lasts {len(codes) / self.frame_rate:.2f} s; the model takes from 0.03 s to 40 s",
                hint="lower data.seconds, or cut the recording",
            )
        filled = np.full((count * self.spectra_per_position, self.bands), FILL_CODE, np.int64)
        filled[: len(spectra)] = spectra
        return filled.reshape(count, -1)
