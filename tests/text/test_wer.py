"""Words, errors and loops; and the ASR itself if it is installed."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from myna.audio.files import Samples, read_audio
from myna.core.errors import ConfigError, ModelError
from myna.listen import asr as asr_module
from myna.listen.asr import ASR, Transcript, is_loop
from myna.text.normalization import words
from myna.text.wer import ErrorCount, character_errors, word_errors
from tests.listen.prose import PROSE

ONES = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]

short_words = st.lists(st.sampled_from("abcd"), max_size=8)


def spelled(number: int, joined: str) -> str:
    """Return a whole number below ten thousand in words, with `and` or without."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10 - 2] + (f"-{ONES[number % 10]}" if number % 10 else "")
    if number < 1000:
        rest = joined + spelled(number % 100, joined) if number % 100 else ""
        return f"{ONES[number // 100]} hundred{rest}"
    rest = (joined if number % 1000 < 100 else " ") + spelled(number % 1000, joined) if number % 1000 else ""
    return f"{spelled(number // 1000, joined)} thousand{rest}"


@pytest.mark.parametrize(
    ("due", "heard", "wrong"),
    [
        ("a b c", "a b c", 0),
        ("a b c", "a c", 1),
        ("a b", "a x b y", 2),
        ("a b c", "", 3),
        ("", "a", 1),
        ("a b", "b a", 2),
    ],
)
def test_words_to_change_add_or_drop_are_counted(due: str, heard: str, wrong: int) -> None:
    assert Levenshtein.distance(due.split(), heard.split()) == wrong


@given(short_words, short_words, short_words)
def test_edits_are_a_distance(one: list[str], two: list[str], three: list[str]) -> None:
    assert Levenshtein.distance(one, two) == Levenshtein.distance(two, one)
    assert (Levenshtein.distance(one, two) == 0) == (one == two)
    assert Levenshtein.distance(one, three) <= Levenshtein.distance(one, two) + Levenshtein.distance(two, three)
    assert abs(len(one) - len(two)) <= Levenshtein.distance(one, two) <= max(len(one), len(two))


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("Don’t — STOP, Zoë!", "don't stop zoe"),
        ("3 times", "three times"),
        ("In 1984", "in nineteen eighty-four"),
        ("1,234 men", "one thousand two hundred and thirty four men"),
        ("the 23rd", "the twenty third"),
        ("Mr. Brown", "Mister Brown"),
        ("I'm", "I am"),
        ("the old (very old) house", "the old very old house"),
        ("3.5 percent", "three point five percent"),
    ],
)
def test_what_sounds_alike_is_alike(written: str, spoken: str) -> None:
    assert word_errors(written, spoken).errors == word_errors(spoken, written).errors == 0
    assert words(written)


@given(st.integers(0, 9999), st.sampled_from([" ", " and "]))
def test_numbers_may_be_digits_or_words(number: int, joined: str) -> None:
    said = words(f"about {spelled(number, joined)} men")
    assert said == words(f"About {number} men.")
    assert [said[0], *said[2:]] == ["about", "men"]


@given(st.integers(0, 9999), st.integers(0, 9999))
def test_another_number_is_an_error(one: int, other: int) -> None:
    assert word_errors(spelled(one, " and "), str(other)).errors == (one != other)


@given(st.text(max_size=40))
def test_any_text_is_like_itself_whatever_its_case_and_stops(text: str) -> None:
    for language in ("en", "vi"):
        assert word_errors(text, text, language) == ErrorCount(0, len(words(text, language)))
    assert all(any(map(str.isalnum, word)) for word in words(text))


def test_letters_are_counted_with_the_spaces_between_words() -> None:
    assert character_errors("a cat", "a cut") == ErrorCount(1, 5)
    assert character_errors("a cat", "acat") == ErrorCount(1, 5)
    assert character_errors("你好 世界", "你好世界", "zh") == ErrorCount(0, 4)


def test_a_rate_is_of_all_words_and_not_a_mean_of_lines() -> None:
    lines = [word_errors("one", "two"), word_errors("it was a nice day", "it was a nice day")]
    assert sum(lines, ErrorCount()) == ErrorCount(1, 6)
    assert sum(lines, ErrorCount()).rate == pytest.approx(1 / 6)
    assert math.isnan(ErrorCount().rate)


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, " * 20,
        "no no no no no no",
        "And then the dog. And then the dog. And then the dog.",
        "Well, he came back to the house to see, " * 3,
        "a" * 80,
    ],
)
def test_loops_are_seen(text: str) -> None:
    assert is_loop(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No.",
        "no, no, no, never again",
        "He works in an unsystematic manner, and she works in a systematic manner.",
        "The cat and the dog and the bird and the fish went to the sea.",
        "You cannot windsurf when the air is completely still. The branches made a roof over the small yard.",
    ],
)
def test_speech_is_no_loop(text: str) -> None:
    assert not is_loop(text)


@pytest.mark.parametrize("language", sorted(PROSE))
def test_prose_is_no_loop_in_scripts_of_several_bytes_a_letter(language: str) -> None:
    for letters in range(10, len(PROSE[language]) + 1, 7):
        assert not is_loop(PROSE[language][:letters]), letters


@pytest.mark.parametrize("language", sorted(PROSE))
def test_repeated_prose_is_a_loop_in_every_script(language: str) -> None:
    for letters, times in ((4, 20), (10, 12), (25, 8), (60, 6), (100, 5)):
        assert is_loop(PROSE[language][:letters].strip() * times), (letters, times)
        assert is_loop(PROSE[language][200:300] + f"{PROSE[language][:letters].strip()} " * times), (letters, times)


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8), st.integers(6, 12), short_words, short_words)
def test_whatever_comes_round_six_times_is_a_loop(
    phrase: list[str], times: int, before: list[str], after: list[str]
) -> None:
    assert is_loop(" ".join([*before, *(phrase * times), *after]))


@given(st.integers(1, 400))
def test_words_that_never_come_twice_are_no_loop(count: int) -> None:
    rng = np.random.default_rng(count)
    letters = rng.integers(97, 123, (count, 7)).astype(np.uint8)
    assert not is_loop(" ".join(bytes(row).decode() for row in letters))


class FakeModel:
    """Model that answers with its own arguments."""

    def __init__(self, folder: str, **options: Any) -> None:
        self.folder, self.options = folder, options
        self.model = SimpleNamespace(device=options["device"])

    def transcribe(self, clip: Samples, **options: Any) -> tuple[Iterator[SimpleNamespace], None]:
        self.heard, self.asked = clip, options
        return iter([SimpleNamespace(text=" Two words."), SimpleNamespace(text=" And more. ")]), None


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Install a fake faster-whisper with one model, in a local folder."""
    made, folder = ModuleType("faster_whisper"), tmp_path / "faster"
    folder.mkdir()
    for file in asr_module.REQUIRED_FILES:
        (folder / file).write_text("{}")

    def download_model(name: str) -> str:
        if name != "base":
            raise ValueError("no such model")
        return str(folder)

    made.__dict__.update(WhisperModel=FakeModel, download_model=download_model)
    monkeypatch.setitem(sys.modules, "faster_whisper", made)
    monkeypatch.setattr(asr_module, "version", lambda _: "1.0")
    return folder


def test_a_recogniser_has_no_randomness_and_no_memory(fake: Path) -> None:
    asr = ASR.open(str(fake))
    whisper = asr
    assert isinstance(whisper, asr_module.FasterWhisper) and asr.name == "faster-whisper 1.0 faster 2"
    model = whisper._model
    assert model.folder == str(fake) and model.options["device"] == "cpu"
    tone = np.sin(np.arange(24_000, dtype=np.float32))
    assert asr.transcribe(tone, 24_000, "en") == Transcript("Two words. And more.", looped=False)
    assert len(model.heard) == 16_000 and model.heard.dtype == np.float32
    due = {"temperature": 0.0, "beam_size": 5, "condition_on_previous_text": False, "word_timestamps": False}
    assert model.asked == due | {"language": "en"}


def test_a_recogniser_is_on_the_device_that_was_asked_for(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_gpu = ASR.open(str(fake), "cuda:1")
    asked = on_gpu._model.options
    assert (asked["device"], asked["device_index"], asked["compute_type"]) == ("cuda", 1, "float16")
    assert on_gpu.name == "faster-whisper 1.0 faster 2 float16" and not on_gpu.note

    def no_library(self: FakeModel, clip: Samples, **_: Any) -> tuple[Iterator[SimpleNamespace], None]:
        if self.options["device"] == "cuda":
            raise RuntimeError("Library libcublas.so.12 is not found")
        return iter([SimpleNamespace(text=f"{len(clip)} samples")]), None

    monkeypatch.setattr(FakeModel, "transcribe", no_library)
    with pytest.raises(ModelError, match=r"cannot be opened on cuda: Library libcublas\.so\.12 is not found") as caught:
        ASR.open(str(fake), "cuda")
    assert "--device cpu" in caught.value.hint and "transformers:" in caught.value.hint
    anywhere = ASR.open(str(fake), "auto")
    assert anywhere.note.startswith("faster-whisper runs on the CPU, since it does not on cuda: Library libcublas")
    assert anywhere.transcribe(np.ones(99, np.float32), 16_000).text == "99 samples"
    assert anywhere.name == "faster-whisper 1.0 faster 2"


@pytest.mark.usefixtures("fake")
def test_silence_is_not_given_to_a_recogniser_that_would_make_up_words() -> None:
    asr = ASR.open("base")
    assert asr.name.startswith("faster-whisper 1.0 base")
    for silence in (np.zeros(24_000, np.float32), np.zeros(0, np.float32)):
        assert asr.transcribe(silence, 24_000, "en") == Transcript("", looped=False)


def test_a_recogniser_that_is_not_there_is_told(fake: Path) -> None:
    for file in ("tokenizer.json", "config.json"):
        (fake / file).unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json, config\.json"):
        ASR.open(str(fake))
    with pytest.raises(ModelError, match="there is no folder") as caught:
        ASR.open(str(fake / "nothing"))
    assert "model.bin" in caught.value.hint and "model.safetensors" in caught.value.hint
    with pytest.raises(ModelError, match="cannot be downloaded: no such model"):
        ASR.open("basis")


def test_what_to_type_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faster_whisper", None)
    with pytest.raises(ConfigError) as caught:
        ASR.open("base")
    assert caught.value.hint == 'pip install "myna[evaluate]"'


def test_a_real_recogniser_transcribes_words() -> None:
    """Needs MYNA_WHISPER, a folder, and MYNA_SPEECH, a recording with its text beside it."""
    pytest.importorskip("faster_whisper", reason='pip install "myna[evaluate]"')
    if not (folder := os.environ.get("MYNA_WHISPER")) or not (speech := os.environ.get("MYNA_SPEECH")):
        pytest.skip("MYNA_WHISPER and MYNA_SPEECH do not name a recogniser's folder and a recording")
    asr, recording = ASR.open(folder), Path(speech)
    samples = read_audio(recording, sample_rate=24_000)
    transcript = asr.transcribe(samples, 24_000, "en")
    assert transcript == asr.transcribe(samples, 24_000, "en")
    assert word_errors(recording.with_suffix(".txt").read_text(encoding="utf-8"), transcript.text).rate < 0.2


@pytest.mark.parametrize(
    ("text", "transcript"),
    [("iyi günler", "İyi günler"), ("ışık", "Işık"), ("ISPARTA", "ısparta"), ("İSTANBUL", "i̇stanbul")],
)
@pytest.mark.parametrize("language", ["tr", "tr-TR", "az"])
def test_capitals_of_both_turkish_i_are_no_errors(text: str, transcript: str, language: str) -> None:
    assert word_errors(text, transcript, language).errors == 0
    assert character_errors(text, transcript, language).errors == 0
    assert word_errors("ılık", "ilik", language).errors == 1
