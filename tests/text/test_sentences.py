"""Long text: every character in its order, sentences that end where a reader would end them, speakable segments."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from myna.text.normalization import normalise_text
from myna.text.sentences import (
    MAX_SEGMENT_SECONDS,
    SHORT_SEGMENT_SECONDS,
    estimate_seconds,
    frame_budget,
    split_long_text,
    split_sentences,
    voice_pace,
)

LONG = "the river runs along the old road and the hills stand dark above it "

MARKS = st.text("aZé.!?…,;:\"'’“”«»()؟،؛。！？、あ山مرحב1 \n-—%$\u0301\u064e", max_size=120)


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        ("en", ["It is 3.14, or 1,000.5 at most. ", "Really? ", "Yes!"]),
        (
            "en",
            ["Mr. Smith met Dr. J. R. Jones at 5 p.m. on the corner of St. James St. and left. ", "Then it rained."],
        ),
        ("en", ["“Is it you?” she asked. ", "“Yes.” ", "He nodded (twice.) ", "Good."]),
        ("en", ["Wait... what? ", "I said no… ", "Never."]),
        ("en", ["Visit example.com or see No. 5, e.g. the second one."]),
        ("vi", ["TP. Hồ Chí Minh rất đẹp. ", "Bạn có khỏe không? ", "Tôi khỏe."]),
        ("ar", ["كيف حالك؟ ", "أنا بخير، شكرا؛ وأنت؟ ", "الحمد لله."]),
        ("fr", ["M. Dupont dit : « Bonjour ! » ", "Puis il partit."]),
        ("de", ["Am 3. Mai kam Hr. Müller, d.h. gestern. ", "„Nein.“ ", "Gut."]),
        ("es", ["¿Qué hora es? ", "¡No lo sé! ", "El Sr. Pérez sí."]),
        ("zh", ["你好。", "今天天气怎么样？", "「很好！」", "走吧"]),
        ("ja", ["これはペンです。", "あれは何ですか？ ", "本です。"]),
        ("hi", ["यह घर है। ", "वह कौन है?"]),
        ("", ["Sr. Pérez wohnt bei Mme. Fünf. ", "Gut."]),
    ],
)
def test_sentences_end_where_a_reader_would_end_them(language: str, sentences: list[str]) -> None:
    assert split_sentences("".join(sentences), language) == sentences


@given(text=st.one_of(MARKS, st.text(max_size=200)), language=st.sampled_from(["", "en", "de", "ar", "zh", "xx"]))
@example(text="\u0301" * 50, language="")
@example(text="a" * 3000, language="en")
@example(text="." * 5000 + "a", language="en")
@example(text="山" * 500 + "\n\n***\n\n" + "か\u3099" * 800, language="ja")
def test_no_character_is_lost_or_moved_and_no_segment_is_too_long(text: str, language: str) -> None:
    for max_seconds in (MAX_SEGMENT_SECONDS, 3.0):
        segments = split_long_text(text, language, max_seconds=max_seconds)
        assert "".join(segments) == normalise_text(text)
        assert all(estimate_seconds(segment) <= max_seconds + 1e-6 for segment in segments)
        assert all(segment.strip() for segment in segments)
    if estimate_seconds(text):
        assert all(estimate_seconds(segment) for segment in split_long_text(text, language))


def test_short_sentences_go_together_and_a_heading_goes_with_its_paragraph() -> None:
    paragraph = "He came. He saw. " + LONG.capitalize().strip() + ". It was late. " * 3
    text = f"Chapter one\n\n{paragraph}\n\nChapter two\n \n{paragraph}"
    segments = split_long_text(text, "en")
    assert len(segments) == 2 and segments[0].startswith("Chapter one He came.")
    assert segments[1].startswith("Chapter two He came.")
    assert split_long_text("Yes.\n\n***\n\nNo.", "en") == ["Yes. *** No."]
    assert split_long_text(" \n ", "en") == []


def test_sentences_are_not_merged_beyond_the_target() -> None:
    segments = split_long_text(f"{LONG.capitalize().strip()}. " * 40, "en")
    assert len(segments) > 8
    for segment in segments:
        assert segment.endswith(". ") or segment == segments[-1]
        assert 4 < estimate_seconds(segment) <= 15


def test_an_overlong_sentence_is_cut_at_clauses_then_words_then_characters() -> None:
    clauses = split_long_text((LONG.strip() + ", ") * 14, "en")
    assert len(clauses) > 1 and all(piece.rstrip().endswith(",") for piece in clauses)
    words = split_long_text(LONG * 14, "en")
    assert len(words) > 1 and {word for piece in words for word in piece.split()} == set(LONG.split())
    lengths = [estimate_seconds(piece) for piece in words]
    assert min(lengths) > 0.6 * max(lengths) and min(lengths) > SHORT_SEGMENT_SECONDS
    characters = split_long_text("は" * 1000, "ja")
    assert len(characters) == 5


def test_a_slow_voice_gets_shorter_segments() -> None:
    text = "It rained all day. " * 60
    slow = voice_pace("one two three four", 4.0)
    assert slow > 1 and len(split_long_text(text, "en", pace=slow)) > len(split_long_text(text, "en"))
    assert voice_pace("", 3.0) == 1 and voice_pace("hello", 60.0) == 2.5 and voice_pace(LONG * 20, 1.0) == 0.5


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("The birds were singing in the morning light.", 2.0, 3.5),
        ("我们今天去公园散步，天气很好。", 2.5, 4.0),
        ("Hôm nay trời đẹp và chúng tôi đi dạo trong công viên.", 2.2, 4.0),
        ("كان الطقس جميلا اليوم وذهبنا إلى الحديقة.", 2.2, 4.2),
        ("1984", 1.0, 1.5),
        ("... — !?", 0.0, 0.0),
    ],
)
def test_estimates_are_those_of_unhurried_speech(text: str, low: float, high: float) -> None:
    assert low <= estimate_seconds(text) <= high


def test_the_budget_is_generous_and_finite() -> None:
    text = "The birds were singing in the morning light."
    assert 8 * 25 < frame_budget(text, 25.0) < 13 * 25
    assert frame_budget("", 25.0) == 50 and frame_budget(text, 25.0, pace=2.0) > 1.5 * frame_budget(text, 25.0)


def test_a_book_on_one_line_is_split_in_moments() -> None:
    book = f"{LONG.capitalize().strip()}, as Mr. Smith said. " * 5000
    start = time.process_time()
    assert "".join(split_long_text(book, "en")) == normalise_text(book)
    assert time.process_time() - start < 10
