"""Cuts of a part into clips: stretches of speech joined to whole sentences, with edges in the middle of silences.

Times are milliseconds of the part. A stretch is speech without a silence that is long enough for a cut; the words of a
recogniser say only which stretch they belong to, for their times fall inside speech in two of three cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from myna.curate.settings import CutSettings

SENTENCE_ENDS = tuple(".?!…؟۔。？！।")
CLOSING_MARKS = "\"'”’»)]}"
WORD_DELAY_MS = 100
"""Added to the middle of a word: recognised words begin 53 ms and end 153 ms early in the median (whisper-base)."""
MAX_CHUNK_MS = 28_000
"""Of speech that is recognised at once: a window of Whisper has 30 s."""
SENTENCE_BREAK_COST = 3.0
"""Of a cut within a sentence, less the seconds of its pause, as seconds by which a clip is too short or too long."""
CLIP_COST = 0.1
"""Of each clip, so that sentences are joined where nothing speaks against it."""
TOO_SHORT_COST = 5.0
"""Of a clip that is shorter than any that is kept."""

SpanMs = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RecognisedWord:
    text: str
    """With the blank before it, in languages that have them."""
    start_ms: int
    end_ms: int

    @property
    def ends_sentence(self) -> bool:
        return self.text.strip().rstrip(CLOSING_MARKS).endswith(SENTENCE_ENDS)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Speech without a silence that is long enough for a cut, with its words."""

    start_ms: int
    end_ms: int
    speaker: str = ""
    words: tuple[RecognisedWord, ...] = ()
    overlapped: bool = False
    """Somebody else speaks at the same time: it is not joined with what can be kept."""
    new_voice: bool = False
    """It does not sound like the stretch before it, and is not joined with that, whatever their speakers are."""

    @property
    def text(self) -> str:
        return "".join(word.text for word in self.words).strip()

    @property
    def ends_sentence(self) -> bool:
        return bool(self.words) and self.words[-1].ends_sentence


@dataclass(frozen=True, slots=True)
class CutClip:
    """A clip: whole stretches of one speaker, with some of the silence around them."""

    start_ms: int
    end_ms: int
    stretches: tuple[Stretch, ...]
    start_gap_ms: int
    """The silence in which it begins; all of it, also what is not in the clip."""
    end_gap_ms: int

    @property
    def text(self) -> str:
        return "".join(word.text for stretch in self.stretches for word in stretch.words).strip()


def merge_speech(spans: Sequence[SpanMs], length_ms: int, min_gap_ms: int) -> list[SpanMs]:
    """Spans of speech within the part, joined where the silence between them is too short for a cut."""
    merged: list[SpanMs] = []
    for start, end in sorted((max(0, start), min(end, length_ms)) for start, end in spans):
        if end <= start:
            continue
        if merged and start - merged[-1][1] < min_gap_ms:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def chunk_speech(spans: Sequence[SpanMs], max_ms: int = MAX_CHUNK_MS) -> Iterator[tuple[int, int]]:
    """Ranges of spans to be recognised at once, parted at the widest silences of the second half of what fits."""
    first = 0
    while first < len(spans):
        after = first + 1
        while after < len(spans) and spans[after][1] - spans[first][0] <= max_ms:
            after += 1
        if after < len(spans):
            middle = spans[first][0] + max_ms // 2
            later = [cut for cut in range(first + 1, after + 1) if spans[cut][0] > middle]
            after = max(later or [after], key=lambda cut: (spans[cut][0] - spans[cut - 1][1], cut))
        yield first, after
        first = after


def assign_words(words: Sequence[RecognisedWord], spans: Sequence[SpanMs]) -> list[tuple[RecognisedWord, ...]]:
    """The words of each span, in order: the one that holds the middle of the word, or is nearest to it."""
    assigned: list[list[RecognisedWord]] = [[] for _ in spans]
    last = 0
    for word in words:
        middle = (word.start_ms + word.end_ms) // 2 + WORD_DELAY_MS

        def distance(index: int, middle: int = middle) -> int:
            return max(spans[index][0] - middle, middle - spans[index][1], 0)

        last = min(range(last, len(spans)), key=distance)
        assigned[last].append(word)
    return [tuple(group) for group in assigned]


def cut_clips(stretches: Sequence[Stretch], length_ms: int, settings: CutSettings) -> list[CutClip]:
    """Clips in order; every stretch is in one of them. Dynamic programming over the silences between stretches."""
    count = len(stretches)
    best: list[tuple[float, int]] = [(0.0, 0)]
    for last in range(count):
        options = []
        for first in range(last, -1, -1):
            if first < last and not _may_join(stretches[first], stretches[first + 1], settings):
                break
            seconds = (stretches[last].end_ms - stretches[first].start_ms) / 1000 + 2 * settings.edge_silence
            if first < last and seconds > settings.hard_seconds[1]:
                break
            cost = _length_cost(seconds, settings) + CLIP_COST
            options.append((best[first][0] + cost, first))
        cost, first = min(options)
        best.append((cost + _break_cost(stretches, last, settings), first))
    ends, after = [], count
    while after:
        ends.append((best[after][1], after))
        after = best[after][1]
    return [_clip(stretches, first, after, length_ms, settings) for first, after in reversed(ends)]


def _may_join(one: Stretch, following: Stretch, settings: CutSettings) -> bool:
    alike = one.speaker == following.speaker and one.overlapped == following.overlapped
    return alike and not following.new_voice and following.start_ms - one.end_ms <= 1000 * settings.max_pause


def _length_cost(seconds: float, settings: CutSettings) -> float:
    shortest, longest = settings.seconds
    too_short = TOO_SHORT_COST if seconds < settings.hard_seconds[0] else 0.0
    return max(shortest - seconds, 0.0) + 0.5 * max(seconds - longest, 0.0) + too_short


def _break_cost(stretches: Sequence[Stretch], last: int, settings: CutSettings) -> float:
    """Of a cut after a stretch: none at a sentence's end, or where there must be one."""
    one = stretches[last]
    if last + 1 == len(stretches) or one.ends_sentence or not _may_join(one, stretches[last + 1], settings):
        return 0.0
    pause = (stretches[last + 1].start_ms - one.end_ms) / 1000
    return max(0.0, SENTENCE_BREAK_COST - pause)


def _clip(stretches: Sequence[Stretch], first: int, after: int, length_ms: int, settings: CutSettings) -> CutClip:
    start, end = stretches[first].start_ms, stretches[after - 1].end_ms
    before = start - (stretches[first - 1].end_ms if first else 0)
    behind = (stretches[after].start_ms if after < len(stretches) else length_ms) - end
    edge = round(1000 * settings.edge_silence)
    # Half of a silence between two clips belongs to each; at the ends of the part there is only one.
    lead = min(edge, before // 2 if first else before)
    tail = min(edge, behind // 2 if after < len(stretches) else behind)
    return CutClip(start - lead, end + tail, tuple(stretches[first:after]), before, behind)
