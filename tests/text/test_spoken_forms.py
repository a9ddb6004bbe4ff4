"""Spoken forms of text."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myna.curate.second_pass import add_diacritics
from myna.text.spoken_forms import (
    normalise_spoken_text,
    number_words,
    ordinal_words,
    year_words,
)
from tests.data.segment_rows import segment, segments_table

ENGLISH = {
    "It cost $5.20.": "It cost five dollars and twenty cents.",
    "$1.5 billion": "one point five billion dollars",
    "£0.01, €1": "one penny, one euro",
    "In 1999, 3.5 million came.": "In nineteen ninety-nine, three point five million came.",
    "2005 and 2024": "two thousand five and twenty twenty-four",
    "the 1990s": "the nineteen nineties",
    "at 10:30 a.m.": "at ten thirty a m.",
    "7:05, 9:00": "seven oh five, nine o'clock",
    "Jan. 5th, March 21": "January fifth, March twenty-first",
    "on 5 March": "on the fifth of March",
    "Dr. Smith and St. Mary's": "Doctor Smith and Saint Mary's",
    "50% of No. 5": "fifty percent of number five",
    "1,000 km/h, 1 km": "one thousand kilometers per hour, one kilometer",
    "20°C, -5 degrees": "twenty degrees Celsius, minus five degrees",
    "Call 555-1234.": "Call five five five one two three four.",
    "007": "oh oh seven",
    "3-4 days, 1/2 cup": "three to four days, one half cup",
    "the 2nd and 21st": "the second and twenty-first",
    "World War II": "World War two",
    "COVID-19, A4, B2B": "COVID nineteen, A four, B two B",
    "version 1.2.3": "version one dot two dot three",
    "salt & pepper": "salt and pepper",
    "I won't, he said.": "I won't, he said.",
}


@pytest.mark.parametrize(("written", "spoken"), ENGLISH.items())
def test_english(written: str, spoken: str) -> None:
    assert normalise_spoken_text(written, "en") == spoken


def test_numbers_ordinals_and_years() -> None:
    assert number_words(1_234_567) == "one million two hundred thirty-four thousand five hundred sixty-seven"
    assert number_words(0) == "zero"
    assert ordinal_words(112) == "one hundred twelfth"
    assert ordinal_words(20) == "twentieth"
    assert [year_words(year) for year in (1900, 1905, 2000, 2010)] == [
        "nineteen hundred",
        "nineteen oh five",
        "two thousand",
        "twenty ten",
    ]


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
def test_english_leaves_no_digit_of_ascii_and_words_alone(text: str) -> None:
    spoken = normalise_spoken_text(text, "en")
    assert not any(letter in "0123456789" for letter in spoken)
    assert normalise_spoken_text(spoken, "en") == spoken or "." in text or ":" in text


def test_arabic_letters_and_digits_are_uniform_and_get_no_vowels() -> None:
    assert normalise_spoken_text("كتـــاب ١٢٣", "ar") == "كتاب 123"
    assert normalise_spoken_text("کیف", "ar-EG") == "كيف"


@pytest.mark.extras
def test_arabic_gets_vowels_where_they_are_asked_for() -> None:
    pytest.importorskip("text2tashkeel")
    rows = [
        segment(str(number), "a.wav", number, number + 1, normalised_text=text, language=language, status=status)
        for number, (text, language, status) in enumerate(
            [("كتب الولد", "ar", "kept"), ("كتب الولد", "ar", "dropped"), ("good day", "en", "kept")]
        )
    ]
    kept, *others = add_diacritics(segments_table(rows))["normalised_text"].to_pylist()
    assert others == ["كتب الولد", "good day"]
    assert (
        kept != "كتب الولد" and "".join(letter for letter in kept if not unicodedata.combining(letter)) == "كتب الولد"
    )


@pytest.mark.extras
@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("Ngày 2/9/1945", "ngày hai tháng chín năm một nghìn chín trăm bốn mươi lăm"),
        ("giá 25.000 đồng", "giá hai mươi lăm nghìn đồng"),
    ],
)
def test_vietnamese_numbers_become_words(written: str, spoken: str) -> None:
    pytest.importorskip("sea_g2p")
    assert normalise_spoken_text(written, "vi").casefold() == spoken


def test_other_languages_stay_as_written() -> None:
    assert normalise_spoken_text("Am 5. Mai  um 10:30", "de") == "Am 5. Mai um 10:30"
