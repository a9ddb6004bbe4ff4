"""Prompt renderer: conversation to token ids, delayed codes and labels, for training and for generation.

An audio turn of T frames takes T + 9 positions (eight codebooks): a begin-of-stream frame, the codes with codebook k
shifted by k frames, and one end-of-stream per codebook. Begin, fill and reference are never supervised; each codebook's
first end-of-stream is, so that the model learns to stop.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import zip_longest

import numpy as np
from numpy.lib.stride_tricks import as_strided

from myna.core.errors import DataError
from myna.data.codec import Codes
from myna.data.conversation import AudioClip, Conversation, Turn
from myna.data.manifest import SPEAKER_TAG
from myna.models.base import IGNORE_INDEX, RenderedSequence, TokenSpan
from myna.models.family_parts import Ids, PromptRenderer, PromptSegment

FRAME_RATE = 25.0

SYSTEM_PROMPT = "Generate audio following instruction."
MULTI_SPEAKER_SYSTEM_PROMPT = (
    "You are an AI assistant designed to convert text into speech.\n"
    "If the user's message includes a [SPEAKER*] tag, do not read out the tag and generate speech for the following "
    "text, using the specified voice.\n"
    "If no speaker tag is present, select a suitable voice on your own."
)


@dataclass(frozen=True, slots=True)
class DelayPattern:
    """Delay pattern of the codebooks of a clip; all numbers come from the model's configuration."""

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
        # Codebook k of a frame lies k positions further on, so this is one strided view.
        down, right = out.strides
        as_strided(out[1:], codes.shape, (down, down + right))[:] = codes
        return out

    def labels(self, codes: Codes) -> Ids:
        """Return `apply(codes)` with everything masked except the codes and one end per codebook."""
        books = self.codebooks
        out = self.apply(codes)
        out[:books][_triangle(books, books).T] = IGNORE_INDEX
        out[len(out) - books + 1 :][_triangle(books - 1, books)] = IGNORE_INDEX
        return out


_triangle = cache(partial(np.tri, dtype=bool))
"""True on the diagonal and below it, by rows and columns."""


@dataclass(frozen=True, eq=False)
class HiggsRenderer(PromptRenderer):
    """Prompt format of one checkpoint, from its tokenizer and configuration."""

    delay: DelayPattern
    codes_per_book: int
    audio_id: int
    delay_id: int

    @property
    def revision(self) -> str:
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

    def render(
        self, conversation: Conversation, *, supervise_text: bool = False, supervise_references: bool = False
    ) -> RenderedSequence:
        ids, codes, code_labels, spans = [], [], [], []
        position = target_frames = 0
        for segment in self._segments(conversation, supervise_text, supervise_references):
            shown, clip = segment.text, segment.clip
            if clip is None:
                ids.append(self._ids(segment))
            else:
                self._check_codes(clip)
                delayed, frames = self.delay.apply(clip.codes), len(clip.codes)
                codes.append(delayed)
                code_labels.append(
                    self.delay.labels(clip.codes) if segment.supervised else np.full_like(delayed, IGNORE_INDEX)
                )
                ids.append(np.full(len(delayed), self.audio_id, np.int64))
                ids[-1][len(delayed) - self.delay.codebooks + 1 :] = self.delay_id
                shown = f"{clip.id}: {frames} frames, {frames / FRAME_RATE:.2f} s"
                target_frames += frames if segment.supervised else 0
            spans.append(TokenSpan(segment.kind, position, position + len(ids[-1]), shown, segment.supervised))
            position = spans[-1].stop
        all_ids = np.concatenate(ids)
        labels = np.full_like(all_ids, IGNORE_INDEX)
        for span in spans:
            if span.supervised and span.kind != "audio":
                labels[span.start : span.stop] = all_ids[span.start : span.stop]
        no_codes = np.empty((0, self.delay.codebooks), np.int64)
        return RenderedSequence(
            id=conversation.id,
            ids=all_ids,
            codes=np.concatenate(codes or [no_codes]),
            labels=labels,
            code_labels=np.concatenate(code_labels or [no_codes]),
            spans=tuple(spans),
            target_seconds=target_frames / FRAME_RATE,
        )

    def _clip_positions(self, clip: AudioClip) -> int:
        return self.delay.positions(len(clip.codes))

    def _segments(
        self, conversation: Conversation, supervise_text: bool = False, supervise_references: bool = False
    ) -> Iterator[PromptSegment]:
        turns = conversation.turns
        yield PromptSegment("special", "<|begin_of_text|>")
        if turns[0].role != "system":
            turns = (Turn("system", ()), *turns)
        texts = [part for turn in turns for part in turn.parts if isinstance(part, str)]
        many_speakers = any(len(set(SPEAKER_TAG.findall(text))) > 1 for text in texts)
        for turn, following in zip_longest(turns, turns[1:]):
            yield from _header(turn.role)
            if turn.role == "system":
                yield from self._system(conversation, turn, many_speakers)
                yield PromptSegment("special", "<|eot_id|>")
                continue
            clips = [part for part in turn.parts if isinstance(part, AudioClip)]
            trained = not clips or any(clip.target for clip in clips)
            text_label = supervise_text and turn.role == "assistant" and trained
            for part in turn.parts:
                if isinstance(part, AudioClip):
                    supervised = part.target or (supervise_references and not part.reference_only)
                    yield from _clip(part, turn.role, supervised, text_label)
                else:
                    yield PromptSegment("text", self._check_text(part, conversation.id), text_label)
            continues = turn.role == "assistant" and following is not None and following.role == "assistant"
            yield PromptSegment("special", "<|eom_id|>" if continues else "<|eot_id|>", text_label)
        if conversation.is_open:
            yield from _header("assistant")
            yield PromptSegment("special", "<|audio_out_bos|>")

    def _system(self, conversation: Conversation, turn: Turn, many_speakers: bool) -> Iterator[PromptSegment]:
        texts = [part for part in turn.parts if isinstance(part, str)]
        clips = [part for part in turn.parts if isinstance(part, AudioClip)]
        system = texts[0] if texts else MULTI_SPEAKER_SYSTEM_PROMPT if many_speakers else SYSTEM_PROMPT
        opening, scene = self._check_text(system, conversation.id), conversation.scene
        if scene or clips:
            opening += "\n\n<|scene_desc_start|>\n"
        if scene:
            opening += self._check_text(scene, conversation.id) + ("\n\n" if clips else "")
        for number, clip in enumerate(clips):
            yield PromptSegment("text", f"{opening}SPEAKER{number}: ", cached=True)
            yield from _clip(clip, "system", False, False)
            opening = "\n"
        closing = ("\n" if scene and not clips else "") + ("<|scene_desc_end|>" if scene or clips else "")
        yield PromptSegment("text", opening + closing, cached=True)

    def _check_codes(self, clip: AudioClip) -> None:
        codes = clip.codes
        if codes.ndim != 2 or codes.shape[1] != self.delay.codebooks or len(codes) == 0:
            raise DataError(
                f"clip {clip.id} has codes of shape {codes.shape}, the model wants (frames, {self.delay.codebooks})",
                hint="run `myna prepare` again with this model",
            )
        if codes.max() >= self.codes_per_book:
            raise DataError(
                f"clip {clip.id} has code {codes.max()}, the model's codebooks end at {self.codes_per_book - 1}",
                hint="run `myna prepare` again with this model's codec",
            )


def _header(role: str) -> Iterator[PromptSegment]:
    yield PromptSegment("special", "<|start_header_id|>")
    yield PromptSegment("text", role, cached=True)
    yield PromptSegment("special", "<|end_header_id|>")
    yield PromptSegment("text", "\n\n", cached=True)


def _clip(clip: AudioClip, role: str, supervised: bool, text_label: bool) -> Iterator[PromptSegment]:
    yield PromptSegment("special", "<|audio_out_bos|>" if role == "assistant" else "<|audio_bos|>", text_label)
    yield PromptSegment("audio", clip.id, supervised, clip)
    yield PromptSegment("special", "<|audio_eos|>", text_label)
