"""Lines of real recordings for the language model: long recordings cut at pauses, poorly understood ones as references.

Whisper hears every recording with the times of its words. A reader with one long recording becomes pieces, so that one
can be the reference of another. A recording whose text Whisper does not find in it teaches wrong words, and is a
reference alone: a voice is a voice, however the words came out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from codec_training.recordings import Recording, decode
from corpus_making.corpus_folder import SAMPLE_RATE
from corpus_making.loudness import Samples, speech_bounds
from myna.core.io import atomic_write

if TYPE_CHECKING:  # machines that augment need not have it
    from myna.listen.asr import ASR

WINDOW_SECONDS, GAP_SECONDS = 29.5, 0.6
"""Whisper takes as long for any clip as for 30 s: clips of a speaker are heard together, with silence between them."""
SILENCE_DB = -28.0
"""Level below the loudest moment of a clip at which its ends are silent. Rooms are louder than studios."""
MARGIN_SECONDS = 0.15
MAX_WORD_ERROR_RATE = 0.15
"""Highest word error rate of Whisper on a recording that may be a target."""
DIGITS = frozenset(("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"))
COMMANDS = DIGITS.union(
    ("bed", "bird", "cat", "dog", "down", "go", "happy", "house", "left", "marvin", "no", "off", "on", "right"),
    ("sheila", "stop", "tree", "up", "wow", "yes"),
)
"""Words of AudioMNIST and Speech Commands. Texts of nothing else are lists that were put together of single words, and
known exactly. Whisper writes digits as one long number."""
PIECE_SECONDS = (2.0, 8.0)
"""Seconds of the pieces of a long recording: at least the first, and cut as soon as possible after half of the
second."""
MIN_PAUSE_SECONDS = 0.12
MIN_CHARACTERS_PER_SECOND = 6.0
"""Lowest pace of a piece: with less, Whisper has left words out."""


class HeardWord(NamedTuple):
    """A word with the blank before it, in seconds of its recording."""

    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class RealLine:
    """A recording, or a piece of one."""

    id: str
    text: str
    samples: Samples
    is_target: bool
    """False where the words are not those of the text: a reference alone."""


def word_times(clips: Sequence[Samples], asr: ASR) -> list[list[HeardWord]]:
    """The words of each clip of one speaker, in seconds of the clip."""
    found: list[list[HeardWord]] = []
    gap, margin = np.zeros(round(GAP_SECONDS * SAMPLE_RATE), np.float32), round(MARGIN_SECONDS * SAMPLE_RATE)
    bounds = [speech_bounds(clip, SAMPLE_RATE, SILENCE_DB) for clip in clips]
    firsts = [max(0, first - margin) for first, _ in bounds]
    trimmed = [clip[first : last + margin] for clip, first, (_, last) in zip(clips, firsts, bounds, strict=True)]
    for window in _windows([len(clip) + len(gap) for clip in trimmed]):
        joined = np.concatenate([part for place in window for part in (trimmed[place], gap)])
        words, start = asr.transcribe_words(joined, SAMPLE_RATE, "en").words, 0
        for place in window:
            end = start + len(trimmed[place]) + len(gap)
            inside = [word for word in words if start <= (word.start + word.end) / 2 * SAMPLE_RATE < end]
            shift = (firsts[place] - start) / SAMPLE_RATE
            found.append([HeardWord(word.text, word.start + shift, word.end + shift) for word in inside])
            start = end
    return found


def _windows(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Places of neighbours that are heard together."""
    window: list[int] = []
    for place, length in enumerate(lengths):
        if window and sum(lengths[one] for one in window) + length > WINDOW_SECONDS * SAMPLE_RATE:
            yield window
            window = []
        window.append(place)
    if window:
        yield window


class HeardRecordings:
    """Words and word error rates of recordings by their ids, in a file that is written anew after every speaker."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def has(self, recordings: Iterable[Recording]) -> bool:
        return all(one.id in self._known or is_word_list(one.text) for one in recordings)

    def hear(self, recordings: Sequence[Recording], asr: ASR) -> None:
        """Recognize the recordings of one speaker."""
        from myna.text.wer import word_errors

        times = word_times([decode(one.data, SAMPLE_RATE) for one in recordings], asr)
        for one, words in zip(recordings, times, strict=True):
            errors = word_errors(one.text, _text(words))
            timed = [(word.text, round(word.start, 2), round(word.end, 2)) for word in words]
            self._known[one.id] = {"word_error_rate": round(errors.rate, 3), "words": timed}
        with atomic_write(self._file) as temporary:
            temporary.write_text(json.dumps(self._known, ensure_ascii=False) + "\n", encoding="utf-8")

    def words(self, recording: Recording) -> list[HeardWord]:
        """Return the words of a recording; none if it was not recognized."""
        return [HeardWord(*word) for word in self._known.get(recording.id, {"words": ()})["words"]]

    def is_understood(self, recording: Recording) -> bool:
        if is_word_list(recording.text):
            return True
        return bool(self._known[recording.id]["word_error_rate"] <= MAX_WORD_ERROR_RATE)


def is_word_list(text: str) -> bool:
    words = text.lower().replace(",", "").removesuffix(".").split()
    return bool(words) and COMMANDS.issuperset(words)


def real_lines(recordings: Sequence[Recording], heard: HeardRecordings) -> Iterator[RealLine]:
    """Recordings of one speaker. The only one of a speaker is cut at its pauses, with Whisper's words as the texts."""
    for one in recordings:
        samples = decode(one.data, SAMPLE_RATE)
        if len(recordings) > 1 or not heard.words(one) or not heard.is_understood(one):
            yield RealLine(one.id, one.text, samples, heard.is_understood(one))
            continue
        for number, (text, start, end) in enumerate(pieces(heard.words(one), len(samples) / SAMPLE_RATE)):
            piece = samples[round(start * SAMPLE_RATE) : round(end * SAMPLE_RATE)]
            yield RealLine(f"{one.id}-{number}", text, piece, len(text) >= MIN_CHARACTERS_PER_SECOND * (end - start))


def pieces(words: Sequence[HeardWord], seconds: float) -> Iterator[tuple[str, float, float]]:
    """Text, start and end of each piece, cut in the middle of pauses between words."""
    shortest, longest = PIECE_SECONDS
    begun, start = 0, 0.0
    for place, (word, following) in enumerate(pairwise(words), start=1):
        middle = (word.end + following.start) / 2
        if following.start - word.end < MIN_PAUSE_SECONDS or middle - start < longest / 2:
            continue
        if seconds - middle < shortest:
            break
        yield _text(words[begun:place]), start, middle
        begun, start = place, middle
    if words[begun:]:
        yield _text(words[begun:]), start, seconds


def _text(words: Sequence[HeardWord]) -> str:
    return "".join(word.text for word in words).strip()
