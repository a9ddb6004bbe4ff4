"""Whisper over windows of many clips at once: faster-whisper's procedure, with each step on a batch.

Windows of all clips are encoded, decoded and aligned together. A clip whose decoder stopped before its end has another
window in the next round. The result of a clip does not depend on the others beyond rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from myna.audio.files import Samples
from myna.core.errors import import_optional

BEAMS = 5
MAX_INITIAL_TIMESTAMP = 50
"""Latest start of the first segment in steps of 20 ms: one second."""
NO_SPEECH_PROBABILITY, MIN_AVG_LOG_PROB = 0.6, -1.0
"""Probability of no speech above which, and log probability up to which, a window has no text: Whisper's own rule."""
SHORT_WINDOW_STEP, MIN_SHORT_WINDOW = 500, 1000
"""Frames of 10 ms: lengths of short windows are multiples of the first, and at least the second; they end with a second
of silence. Of 90 clips of 3 to 12 s, Whisper base made as many errors as with 30 s (natural voices 1.7 against 1.8 % of
the characters, learners 22.0 against 21.8), in a third of the time."""
MIN_WINDOW_FRAMES = 4
"""Frames of 10 ms below which a window is skipped: it holds no word, and text for it could not be aligned."""
TOKENS_PER_SECOND, SPARE_TOKENS = 30, 20
"""Tokens a second, and in addition, after which a decoder has failed; a batch waits for its slowest clip. Both networks
write at most half of the requested length (CTranslate2 leaves the rest to the prompt), so 15 a second. Text of that
length always fits into an alignment."""
PREPENDED, APPENDED = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"
"""Punctuation that belongs to the word after it, and to the one before it."""


@dataclass(slots=True)
class DecodedClip:
    """Text of a clip with the decoder's confidence."""

    language: str
    language_probability: float = 1.0
    """Probability of the detected language; 1 if it was given."""
    texts: list[str] = field(default_factory=list)
    """Text of each segment."""
    words: list[tuple[str, float, float]] = field(default_factory=list)
    """Words with the blank before each, start and end in seconds; empty unless requested."""
    avg_log_probs: list[float] = field(default_factory=list)
    compression_ratios: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Progress:
    """Progress of the decoding of one clip."""

    features: npt.NDArray[np.float32]
    clip: DecodedClip
    tokenizer: Any = None
    position: int = 0
    """Frame at which the next window begins."""
    last_word_end: float = 0.0

    @property
    def frames(self) -> int:
        return int(self.features.shape[-1]) - 1


@dataclass(frozen=True, slots=True)
class _Alignment:
    """Stand-in for a `WhisperModel` with words that are aligned already. Clips get their times one by one, because they
    would otherwise depend on the clip before in the batch."""

    frames_per_second: int
    words: list[dict[str, Any]]

    def find_alignment(self, *_: object) -> list[list[dict[str, Any]]]:
        return [self.words]


def decode_clips(
    whisper: Any,
    clips: Sequence[Samples],
    languages: Sequence[str | None],
    *,
    word_times: bool,
    short_windows: bool = False,
) -> list[DecodedClip]:
    """Transcribe clips at 16 kHz by a `faster_whisper.WhisperModel`; None as the language detects it.

    With `short_windows` a clip has a window that is hardly longer than it instead of 30 s, and clips are taken one by
    one. That is for a CPU, where the encoder costs most and a batch gains nothing.
    """
    states = [
        _Progress(whisper.feature_extractor(clip), DecodedClip(language or ""))
        for clip, language in zip(clips, languages, strict=True)
    ]
    while pending := [state for state in states if state.frames - state.position >= MIN_WINDOW_FRAMES]:
        for batch in [[state] for state in pending] if short_windows else [pending]:
            _decode_windows(whisper, batch, word_times=word_times, short=short_windows)
    return [state.clip for state in states]


def _decode_windows(whisper: Any, states: list[_Progress], *, word_times: bool, short: bool) -> None:
    """Decode the next window of each clip."""
    package = import_optional("faster_whisper.transcribe")
    limit = whisper.feature_extractor.nb_max_frames
    sizes = [min(limit, state.frames - state.position) for state in states]
    width = limit
    if short:
        padded = max(sizes) + whisper.frames_per_second
        width = min(limit, max(MIN_SHORT_WINDOW, -(-padded // SHORT_WINDOW_STEP) * SHORT_WINDOW_STEP))
    pieces = (one.features[:, one.position : one.position + size] for one, size in zip(states, sizes, strict=True))
    encoded = whisper.encode(np.stack([package.pad_or_trim(piece, width) for piece in pieces]))
    _set_languages(whisper, states, encoded)
    # A batch has one list of suppressed tokens, which is equal for all languages.
    suppressed = package.get_suppressed_tokens(states[0].tokenizer, [-1])
    prompts = [whisper.get_prompt(state.tokenizer, [], without_timestamps=False) for state in states]
    spoken = TOKENS_PER_SECOND * max(sizes) // whisper.frames_per_second
    results = whisper.model.generate(
        encoded,
        prompts,
        beam_size=BEAMS,
        patience=1,
        length_penalty=1,
        max_length=min(whisper.max_length, len(prompts[0]) + spoken + SPARE_TOKENS),
        suppress_blank=True,
        suppress_tokens=suppressed,
        max_initial_timestamp_index=MAX_INITIAL_TIMESTAMP,
        return_scores=True,
        return_no_speech_prob=True,
    )
    segments: list[list[dict[str, Any]]] = []
    ends: list[tuple[int, bool]] = []
    scores = []
    for state, size, result in zip(states, sizes, results, strict=True):
        tokens = result.sequences_ids[0]
        avg_log_prob = result.scores[0] * len(tokens) / (len(tokens) + 1)
        scores.append(avg_log_prob)
        if result.no_speech_prob > NO_SPEECH_PROBABILITY and avg_log_prob <= MIN_AVG_LOG_PROB:
            segments.append([])
            ends.append((state.position + size, True))
            continue
        found, position, ended = whisper._split_segments_by_timestamps(
            tokenizer=state.tokenizer,
            tokens=tokens,
            time_offset=state.position / whisper.frames_per_second,
            segment_size=size,
            segment_duration=size / whisper.frames_per_second,
            seek=state.position,
        )
        segments.append(found)
        ends.append((position, ended))
    if word_times:
        _add_words(whisper, states, encoded, segments, sizes)
    decoded = zip(states, sizes, segments, ends, results, scores, strict=True)
    for state, size, found, (position, ended), result, score in decoded:
        start, state.position = state.position, position
        if word_times and found:
            state.last_word_end = package.get_end(found)
            if not ended and state.last_word_end > start / whisper.frames_per_second:
                state.position = round(state.last_word_end * whisper.frames_per_second)
        if state.position <= start:  # the decoder wrote only times
            state.position = start + size
        whole = state.tokenizer.decode(result.sequences_ids[0]).strip()
        for segment in found:
            text = state.tokenizer.decode(segment["tokens"])
            if segment["start"] != segment["end"] and text.strip():
                state.clip.texts.append(text.strip())
                state.clip.words += [(word["word"], word["start"], word["end"]) for word in segment.get("words", ())]
                state.clip.avg_log_probs.append(score)
                state.clip.compression_ratios.append(package.get_compression_ratio(whole))


def _set_languages(whisper: Any, states: list[_Progress], encoded: Any) -> None:
    package = import_optional("faster_whisper.tokenizer")
    multilingual = whisper.model.is_multilingual
    if multilingual and not all(state.clip.language for state in states):
        for state, [(token, probability), *_] in zip(states, whisper.model.detect_language(encoded), strict=True):
            if not state.clip.language:
                state.clip.language, state.clip.language_probability = token[2:-2], probability
    for state in states:
        if state.tokenizer is None:
            state.clip.language = state.clip.language if multilingual else "en"
            state.tokenizer = package.Tokenizer(
                whisper.hf_tokenizer, multilingual, task="transcribe", language=state.clip.language
            )


def _add_words(
    whisper: Any, states: list[_Progress], encoded: Any, segments: list[list[dict[str, Any]]], sizes: list[int]
) -> None:
    """Add words with their times to each segment, by cross-attention."""
    tokens = [
        [token for segment in found for token in segment["tokens"] if token < state.tokenizer.eot]
        for state, found in zip(states, segments, strict=True)
    ]
    # An alignment begins with the tokens of one language, so a batch of several is aligned once for each.
    for language in dict.fromkeys(state.clip.language for state in states):
        tokenizer = next(state.tokenizer for state in states if state.clip.language == language)
        aligned = whisper.find_alignment(tokenizer, tokens, encoded, sizes)
        for state, found, size, words in zip(states, segments, sizes, aligned, strict=True):
            if state.clip.language == language and found:
                stand_in = _Alignment(whisper.frames_per_second, words)
                type(whisper).add_word_timestamps(
                    stand_in, [found], tokenizer, encoded, size, PREPENDED, APPENDED, state.last_word_end
                )
