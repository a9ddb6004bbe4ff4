"""Cuts: every stretch is in one clip, edges lie in silence, and lengths follow the settings."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from myna.curate.cutting import (
    RecognisedWord,
    SpanMs,
    Stretch,
    assign_words,
    chunk_speech,
    cut_clips,
    merge_speech,
)
from myna.curate.settings import CutSettings

SETTINGS = CutSettings()
MIN_GAP = 150


@st.composite
def speech(draw: st.DrawFn) -> tuple[list[SpanMs], int]:
    """Draw spans of speech in order, and the length of the part."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 2500), st.integers(20, 30_000)), max_size=30))
    spans, at = [], 0
    for gap, length in lengths:
        spans.append((at + gap, at + gap + length))
        at += gap + length
    return spans, at + draw(st.integers(0, 2000))


@settings(deadline=None)
@given(speech(), st.data())
def test_clips_hold_every_stretch_once_and_are_cut_in_silence(
    drawn: tuple[list[SpanMs], int], data: st.DataObject
) -> None:
    spans, length = drawn
    merged = merge_speech(spans, length, MIN_GAP)
    assert all(after[0] - before[1] >= MIN_GAP for before, after in pairwise(merged))
    ends = data.draw(st.lists(st.sampled_from([" one", " two."]), min_size=len(merged), max_size=len(merged)))
    speakers = data.draw(st.lists(st.sampled_from("ab"), min_size=len(merged), max_size=len(merged)))
    flags = data.draw(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=len(merged), max_size=len(merged)))
    stretches = [
        Stretch(start, end, speaker, (RecognisedWord(word, start, end),), overlapped, new_voice)
        for (start, end), word, speaker, (overlapped, new_voice) in zip(merged, ends, speakers, flags, strict=True)
    ]
    clips = cut_clips(stretches, length, SETTINGS)
    assert [one for clip in clips for one in clip.stretches] == stretches
    edges = [0, *(edge for clip in clips for edge in (clip.start_ms, clip.end_ms)), length]
    assert edges == sorted(edges)
    for clip in clips:
        assert len({(one.speaker, one.overlapped) for one in clip.stretches}) == 1
        assert not any(one.new_voice for one in clip.stretches[1:])
        assert clip.start_ms <= clip.stretches[0].start_ms and clip.stretches[-1].end_ms <= clip.end_ms
        for edge in (clip.start_ms, clip.end_ms):
            assert not any(start < edge < end for start, end in merged)
        if len(clip.stretches) > 1:
            assert clip.end_ms - clip.start_ms <= 1000 * SETTINGS.hard_seconds[1]
            inner = pairwise(clip.stretches)
            assert all(after.start_ms - before.end_ms <= 1000 * SETTINGS.max_pause for before, after in inner)
    for before, after in pairwise(clips):
        gap = after.stretches[0].start_ms - before.stretches[-1].end_ms
        assert before.end_gap_ms == after.start_gap_ms == gap
        kept = min(100, gap // 2)
        assert before.end_ms - before.stretches[-1].end_ms == kept
        assert after.stretches[0].start_ms - after.start_ms == kept


def sentence(start: int, seconds: float, text: str) -> Stretch:
    return Stretch(start, start + round(1000 * seconds), "a", (RecognisedWord(text, start, start),))


def test_sentences_are_joined_and_not_cut_in_two() -> None:
    """Two short sentences become one clip; a sentence with a pause in it stays whole rather than being cut there."""
    stretches = [
        sentence(500, 1.5, " One."),
        sentence(2400, 1.5, " Two."),
        sentence(4500, 4.0, " Three begins"),
        sentence(8900, 5.0, " and ends."),
    ]
    clips = cut_clips(stretches, 15_000, SETTINGS)
    assert [clip.text for clip in clips] == ["One. Two.", "Three begins and ends."]


def test_words_go_to_the_stretch_that_holds_their_middle() -> None:
    """This holds even if the recogniser ends a word in the silence after it, or begins it in the silence before it."""
    words = [
        RecognisedWord(text, start, end) for text, start, end in ((" a", 0, 900), (" b", 850, 1000), (" c", 990, 1300))
    ]
    spans = [(0, 1000), (1200, 2000)]
    assert [[word.text for word in group] for group in assign_words(words, spans)] == [[" a", " b"], [" c"]]


@settings(deadline=None)
@given(speech())
def test_chunks_hold_every_span_once_and_fit_the_recogniser(drawn: tuple[list[SpanMs], int]) -> None:
    merged = merge_speech(*drawn, MIN_GAP)
    chunks = list(chunk_speech(merged))
    assert [index for first, after in chunks for index in range(first, after)] == list(range(len(merged)))
    for first, after in chunks:
        assert after == first + 1 or merged[after - 1][1] - merged[first][0] <= 28_000
