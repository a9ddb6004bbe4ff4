"""References without a transcript: the installed recogniser hears them, and what it heard is shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import myna
from myna.core.errors import MynaError, ReferenceWarning
from myna.core.io import whisper_folder
from myna.data.codec import Samples
from myna.listen.asr import ASR, Transcript
from myna.speak import references
from myna.speak.references import speech_request
from tests.command_line import run_command
from tests.tone_corpus import REFERENCE, write_recordings


class Recogniser:
    """A recogniser that always hears the same."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.heard: list[str | None] = []

    def transcribe(self, samples: Samples, sample_rate: int, language: str | None) -> Transcript:
        assert len(samples) and sample_rate == 16_000
        self.heard.append(language)
        return Transcript(f" {REFERENCE} ", looped=False)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Forget recognisers and what they heard, before a test and after it."""

    def clear() -> None:
        references._recogniser.cache_clear()
        references._hear_file.cache_clear()

    clear()
    yield
    clear()


@pytest.fixture
def recogniser(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recogniser:
    made = Recogniser()
    monkeypatch.setenv("MYNA_HOME", str(tmp_path / "home"))
    whisper_folder().mkdir(parents=True)

    def opened(name: str, *_: Any, **__: Any) -> Any:
        made.opened.append(name)
        return made

    monkeypatch.setattr(ASR, "open", opened)
    return made


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    write_recordings(tmp_path / "recordings")
    return tmp_path / "recordings" / "robin" / "robin-0.wav"


def test_a_reference_without_a_transcript_is_heard_once_and_shown(recogniser: Recogniser, recording: Path) -> None:
    for _ in range(2):
        with pytest.warns(ReferenceWarning, match=f'robin-0.wav: heard "{REFERENCE}"'):
            request = speech_request("hello", reference=recording, language="de")
    assert request.recordings[0].text == REFERENCE and request.recordings[0].heard
    assert recogniser.opened == [str(whisper_folder())] and recogniser.heard == ["de"]
    given = speech_request("hello", reference=recording, reference_text="good day").recordings[0]
    assert (given.text, given.heard) == ("good day", False)


def test_without_a_recogniser_the_error_says_how_to_get_one(recording: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MYNA_HOME", str(tmp_path / "empty"))
        with pytest.raises(MynaError, match="no recogniser is installed") as error:
            speech_request("hello", reference=recording)
    assert "--reference-text" in error.value.hint and "myna setup metrics" in error.value.hint


def test_speak_shows_what_it_heard(recogniser: Recogniser, recording: Path, tmp_path: Path) -> None:
    words = ["speak", "hello", "-m", str(myna.make_tiny(tmp_path / "model")), "--device", "cpu", "--max-seconds", "1"]
    words += ["--reference", str(recording), "--asr", "small", "--out", str(tmp_path / "out.wav")]
    result = run_command(words, catch=True)
    assert result.exit_code == 0, result.output
    assert f'{recording}: heard "{REFERENCE}"' in result.output
    assert (tmp_path / "out.wav").is_file() and recogniser.opened == ["small"] and len(recogniser.heard) == 1


def test_lines_of_a_file_may_lack_the_transcript_of_their_reference(
    recogniser: Recogniser, recording: Path, tmp_path: Path
) -> None:
    lines = tmp_path / "lines.jsonl"
    rows = [{"text": text, "reference": str(recording)} for text in ("hello", "good morning")]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["speak-lines", str(lines), "-m", str(myna.make_tiny(tmp_path / "model")), "--device", "cpu"]
    words += ["--max-seconds", "0.4", "--out", str(tmp_path / "out")]
    result = run_command(words, catch=True)
    assert result.exit_code == 0, result.output
    assert result.output.count(f'heard "{REFERENCE}"') == 1 and len(recogniser.heard) == 1
    assert (tmp_path / "out" / "line-0001.wav").is_file()
    assert "2 of them before" in run_command(words, catch=True).output, "what was heard is part of the key"


def test_a_lexicon_is_read_with_the_options_and_its_change_speaks_lines_again(tmp_path: Path) -> None:
    lexicon, lines = tmp_path / "words.tsv", tmp_path / "lines.txt"
    lexicon.write_text("nguyen\twin\n")
    lines.write_text("Nguyen says yes.\n")
    assert speech_request("hello", lexicon=lexicon).spellings == {"nguyen": "win"}
    voice = myna.load(myna.make_tiny(tmp_path / "model"), device="cpu")
    options: dict[str, Any] = {"max_seconds": 0.2, "watermark": False, "lexicon": lexicon}
    assert [voice.speak_lines(lines, tmp_path / "out", **options).kept for _ in range(2)] == [0, 1]
    lexicon.write_text("nguyen\tngu yen\n")
    assert voice.speak_lines(lines, tmp_path / "out", **options).kept == 0
