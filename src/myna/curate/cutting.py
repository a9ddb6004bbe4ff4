"""Cuts of a part into clips: stretches of speech joined to whole sentences, with edges in the middle of silences.

Times are milliseconds of the part. A stretch is speech without a silence that is long enough for a cut. Words of a
recogniser only tell which stretch they belong to, since two of three of their times fall inside speech.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from myna.curate.settings import CutSettings

SENTENCE_ENDS = tuple(".?!…؟۔。？！।")
CLOSING_MARKS = "\"'”’»)]}"
WORD_DELAY_MS = 100
"""Milliseconds added to the middle of a word: recognised words begin 53 ms and end 153 ms early in the median
(whisper-base)."""
MAX_CHUNK_MS = 28_000
"""Maximum speech that is recognised at once: a window of Whisper has 30 s."""
SENTENCE_BREAK_COST = 3.0
"""Cost of a cut inside a sentence, from which the seconds of its pause are subtracted. Cost 1 equals one second of
deviation from the wanted clip length."""
CLIP_COST = 0.1
"""Cost of each clip, so that sentences are joined if nothing speaks against it."""
TOO_SHORT_COST = 5.0
"""Cost of a clip that is too short to be kept."""

SpanMs = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RecognisedWord:
    text: str
    """Text with the blank before it, in languages with blanks."""
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
    """True if a second person speaks: the stretch is then not joined with clean ones."""
    new_voice: bool = False
    """True if the voice differs from the stretch before: the two are then not joined, whatever their speakers are."""

    @property
    def ends_sentence(self) -> bool:
        return bool(self.words) and self.words[-1].ends_sentence


@dataclass(frozen=True, slots=True)
class CutClip:
    """Clip of whole stretches of one speaker, with some of the silence around them."""

    start_ms: int
    end_ms: int
    stretches: tuple[Stretch, ...]
    start_gap_ms: int
    """Milliseconds of the whole silence in which the clip begins, including the part outside the clip."""
    end_gap_ms: int

    @property
    def text(self) -> str:
        return "".join(word.text for stretch in self.stretches for word in stretch.words).strip()

    @property
    def start_of_speech(self) -> int:
        return self.stretches[0].start_ms

    @property
    def end_of_speech(self) -> int:
        return self.stretches[-1].end_ms


def merge_speech(spans: Sequence[SpanMs], length_ms: int, min_gap_ms: int) -> list[SpanMs]:
    """Return spans of speech within the part, joined if the silence between them is too short for a cut."""
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
    """Yield ranges of spans to be recognised at once, divided at the widest silence in the second half of what fits."""
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
    """Return the words of each span in order: those whose middle it holds or is nearest to."""
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
    """Join all stretches to clips in order, by dynamic programming over the silences between them."""
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
            shortest, longest = settings.seconds
            too_short = TOO_SHORT_COST if seconds < settings.hard_seconds[0] else 0.0
            cost = max(shortest - seconds, 0.0) + 0.5 * max(seconds - longest, 0.0) + too_short + CLIP_COST
            options.append((best[first][0] + cost, first))
        cost, first = min(options)
        one = stretches[last]
        # A cut is free at the end of a sentence, and where it is forced.
        if last + 1 < count and not one.ends_sentence and _may_join(one, stretches[last + 1], settings):
            cost += max(0.0, SENTENCE_BREAK_COST - (stretches[last + 1].start_ms - one.end_ms) / 1000)
        best.append((cost, first))
    ends, after = [], count
    while after:
        ends.append((best[after][1], after))
        after = best[after][1]
    return [_clip(stretches, first, after, length_ms, settings) for first, after in reversed(ends)]


def _may_join(one: Stretch, following: Stretch, settings: CutSettings) -> bool:
    alike = one.speaker == following.speaker and one.overlapped == following.overlapped
    return alike and not following.new_voice and following.start_ms - one.end_ms <= 1000 * settings.max_pause


def _clip(stretches: Sequence[Stretch], first: int, after: int, length_ms: int, settings: CutSettings) -> CutClip:
    start, end = stretches[first].start_ms, stretches[after - 1].end_ms
    before = start - (stretches[first - 1].end_ms if first else 0)
    behind = (stretches[after].start_ms if after < len(stretches) else length_ms) - end
    edge = round(1000 * settings.edge_silence)
    # Half of a silence between two clips belongs to each; at the ends of the part there is only one clip.
    lead = min(edge, before // 2 if first else before)
    tail = min(edge, behind // 2 if after < len(stretches) else behind)
    return CutClip(start - lead, end + tail, tuple(stretches[first:after]), before, behind)
