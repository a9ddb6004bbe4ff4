"""Scripts: read from text and subtitles, aligned to recognised words, and preferred to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from myna.core.errors import DataError
from myna.curate.decision import decide
from myna.curate.settings import CurateSettings
from myna.curate.texts import align_script, apply_scripts, edge_cer, measure_text, read_script
from myna.listen.asr import compression_ratio
from tests.data.segment_rows import segment, segments_table
from tests.listen.prose import PROSE

SCRIPT = "Foreword by nobody. It was the best of times, it was the worst of times. Mr. Lorry slept; the coach went on."


def test_a_script_replaces_words_that_were_misheard() -> None:
    texts = ["It was the best of thymes,", "it was the worst of times.", "Mister Laurie slept the coach went on."]
    assert align_script(texts, SCRIPT, "en") == [
        "It was the best of times,",
        "it was the worst of times.",
        "Mr. Lorry slept; the coach went on.",
    ]


def test_what_is_not_in_the_script_keeps_its_recognised_text() -> None:
    said = ["It was the best of times,", "it was the worst of times.", "Mr. Lorry slept; the coach went on."]
    texts = [said[0], "excuse me while I drink some water", *said[1:]]
    assert align_script(texts, SCRIPT, "en") == [said[0], None, *said[1:]]
    assert align_script(["", "hello"], SCRIPT, "en") == [None, None]


def test_a_chapter_finds_its_place_in_a_book() -> None:
    book = " ".join(f"Sentence number {n} of the book is about {n * 7} things." for n in range(500))
    texts = [f"Sentence number {n} of a book is about {n * 7} things." for n in range(300, 320)]
    expected = [f"Sentence number {n} of the book is about {n * 7} things." for n in range(300, 320)]
    assert align_script(texts, book, "en") == expected


def test_scripts_without_blanks_between_words() -> None:
    assert align_script(["今天天氣好"], "前言。今天天气好。", "zh") == ["今天天气好"]


def test_subtitles_lose_numbers_times_and_tags(tmp_path: Path) -> None:
    srt, vtt = tmp_path / "a.srt", tmp_path / "a.vtt"
    srt.write_text(
        "1\n00:00:01,000 --> 00:00:02,000\n<i>Good</i> morning.\n\n2\n00:00:03,000 --> 00:00:04,000\n1984\n", "utf-8"
    )
    vtt.write_text(
        "WEBVTT\n\nNOTE a remark\n\nintro\n00:01.000 --> 00:02.000 align:start\n<v Anna>Good morning.\n", "utf-8"
    )
    assert read_script(srt) == "Good morning. 1984"
    assert read_script(vtt) == "Good morning."
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match="UTF-8"):
        read_script(tmp_path / "bad.txt")


def test_a_script_is_measured_against_the_second_transcription() -> None:
    rows = [
        segment(
            "a", "one.wav", 0, 2000, text="It was the best of thymes", check_text="It was the best of times.", cer=0.1
        ),
        segment("b", "two.wav", 0, 2000, text="It was the best of thymes", check_text="", cer=0.1),
    ]
    table = apply_scripts(segments_table(rows), {"one.wav": SCRIPT})
    assert table["text"].to_pylist() == ["It was the best of times,", "It was the best of thymes"]
    assert table["text_source"].to_pylist() == ["script", ""]
    assert table["cer"].to_pylist() == pytest.approx([0.0, 0.1])


@pytest.mark.parametrize(
    ("transcript", "low", "high"),
    [
        ("The quick brown fox jumps over the lazy dog", 0.0, 0.0),
        ("quick brown fox jumps over the lazy dog", 0.3, 0.4),
        ("The quick brown fox jumps over the la", 0.5, 0.6),
        ("The quick brown cat jumps over the lazy dog", 0.0, 0.0),
        ("And then the quick brown fox jumps over the lazy dog", 0.7, 0.8),
        ("", 1.0, 1.0),
    ],
)
def test_edge_cer_sees_the_ends_alone(transcript: str, low: float, high: float) -> None:
    assert low <= edge_cer("The quick brown fox jumps over the lazy dog.", transcript) <= high


@pytest.mark.parametrize("language", sorted(PROSE))
def test_prose_of_every_script_is_no_loop_for_a_curation(language: str) -> None:
    """Thai, Khmer, Burmese and Japanese prose repeats its characters, which counted as words that come again."""
    for letters in range(70, len(PROSE[language]), 50):
        text = PROSE[language][:letters]
        row = segment("a", "r", 0, 19_000, speaker="anna", text=text, language=language, language_probability=1.0)
        row |= {"compression_ratio": compression_ratio(text)} | measure_text(text, text, language, 19)
        reason = decide(segments_table([row]), CurateSettings())["reason"][0].as_py()
        assert reason in ("", "pace"), letters
