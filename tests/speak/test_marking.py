"""Marks on speech: on by default in every way of speaking, off only when asked, and then logged."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import myna
from myna.audio.files import read_audio, write_audio
from myna.provenance.credentials import read_credentials
from myna.provenance.speech_log import read_log
from myna.provenance.watermark import MARK_NAME, watermark
from myna.speak.request import SpeechRequest
from tests.command_line import run_command

SETTINGS: dict[str, Any] = {"max_seconds": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(myna.make_tiny(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def voice(model: str) -> myna.Voice:
    return myna.load(model, device="cpu")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MYNA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_speech_is_that_of_the_engine_with_the_mark(voice: myna.Voice) -> None:
    plain = voice.speak("hello there", watermark=False, **SETTINGS)
    marked = voice.speak("hello there", **SETTINGS)
    assert np.array_equal(marked.samples, watermark(plain.samples, plain.sample_rate))
    assert not np.array_equal(marked.samples, plain.samples)
    assert np.array_equal(marked.codes, plain.codes)
    request = SpeechRequest("hello there", max_seconds=1.0, seed=3)
    assert np.array_equal(voice.engine.speak([request])[0].samples, plain.samples), "the engine adds no mark"
    takes = voice.speak_takes("hello there", 2, max_seconds=1.0, seed=2)
    assert np.array_equal(takes[1].samples, marked.samples)


def test_a_stream_has_the_samples_of_its_file(voice: myna.Voice) -> None:
    for is_marked in (True, False):
        whole = voice.speak("hello there", watermark=is_marked, **SETTINGS)
        stream = voice.stream("hello there", watermark=is_marked, **SETTINGS)
        assert np.array_equal(np.concatenate(list(stream)), whole.samples)
        assert stream.finish_reason == whole.finish_reason
    spoken, streamed = [row for row in read_log() if row["watermark"]]
    assert spoken["event"] == "spoken"
    assert streamed["event"] == "streamed"
    assert spoken["audio_sha256"] == streamed["audio_sha256"]


def test_a_closed_stream_is_logged_up_to_its_end(voice: myna.Voice) -> None:
    stream = voice.stream("hello there", max_seconds=5.0, seed=3)
    first = next(stream)
    stream.close()
    (row,) = read_log()
    assert row["seconds"] == round(len(first) / voice.sample_rate, 3)


def test_files_are_signed_and_logged(voice: myna.Voice, tmp_path: Path) -> None:
    speech = voice.speak("hello there", **SETTINGS)
    for name in ("hello.wav", "hello.ogg"):
        speech.save(tmp_path / name)
    found = read_credentials(tmp_path / "hello.wav")
    assert found is not None
    assert found.state == "own"
    assert found.speech["watermark"] == MARK_NAME
    assert found.speech["model"] == "model"  # the folder's name, not where it lies
    spoken, signed, unsigned = read_log()
    assert [row["event"] for row in (spoken, signed, unsigned)] == ["spoken", "saved", "saved"]
    assert (signed["signed"], unsigned["signed"]) == (True, False)
    assert spoken["text"] == "hello there"


def test_lines_are_marked(voice: myna.Voice, tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("hello there\n")
    spoken = voice.speak_lines(lines, tmp_path / "out", **SETTINGS)
    assert spoken.rows[0]["watermark"] == MARK_NAME
    again = voice.speak_lines(lines, tmp_path / "out", **SETTINGS)
    assert again.kept == 1
    plain = voice.speak_lines(lines, tmp_path / "out", **SETTINGS, watermark=False)
    assert plain.kept == 0, "files with a mark are not those that were asked for"
    assert plain.rows[0]["watermark"] is None
    saved = [row for row in read_log() if row["event"] == "saved"]
    assert [row["watermark"] for row in saved] == [MARK_NAME, None]


def run(model: str, *words: object) -> Any:
    options = ["-m", model, "--device", "cpu", "--max-seconds", "1", "--seed", "3"]
    return run_command(["speak", "hello there", *options, *map(str, words)], catch=True)


def test_commands(model: str, tmp_path: Path) -> None:
    assert run(model, "-o", tmp_path / "a.wav").exit_code == 0
    result = run(model, "-o", tmp_path / "b.wav", "--no-watermark")
    assert "without a watermark" in result.output
    marked, plain = read_audio(tmp_path / "a.wav"), read_audio(tmp_path / "b.wav")
    assert len(marked) == len(plain)
    assert not np.array_equal(marked, plain)
    found = run_command(["detect", "--json", str(tmp_path / "a.wav"), str(tmp_path / "b.wav")], catch=True)
    first, second = json.loads(found.output)
    assert first["credentials"]["speech"]["watermark"] == MARK_NAME
    assert second["credentials"]["state"] == "own"
    assert second["logged"]["watermark"] is None
    assert found.exit_code == 0, "a file that is signed as speech of a model is told"


def test_detect_tells_real_recordings_by_its_exit_code(tmp_path: Path) -> None:
    recording = sorted((Path(myna.__file__).parent / "demo" / "recordings").glob("*.opus"))[0]
    samples = read_audio(recording, sample_rate=24_000)
    write_audio(tmp_path / "marked.mp3", watermark(samples, 24_000), 24_000)
    broken = tmp_path / "broken.wav"
    broken.write_text("no audio")

    def detect(*files: Path) -> Any:
        return run_command(["detect", *map(str, files)], catch=True)

    assert detect(tmp_path / "marked.mp3").exit_code == 0
    assert ": marked (score" in detect(tmp_path / "marked.mp3").output
    assert detect(recording).exit_code == 1
    assert "not marked" in detect(recording).output
    assert detect(recording, broken).exit_code == 2
    assert detect(tmp_path / "missing.wav").exit_code == 2


def test_without_the_packages_nothing_is_spoken(
    model: str, voice: myna.Voice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = metadata.distribution

    def missing(name: str) -> metadata.Distribution:
        if name == "resemble-perth":
            raise metadata.PackageNotFoundError(name)
        return original(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    for speak in (voice.speak, voice.stream):
        with pytest.raises(myna.MynaError) as error:
            speak("hello there", **SETTINGS)
        assert error.value.hint.startswith('pip install "myna[mark]"')
    failed = run(model, "-o", tmp_path / "a.wav")
    assert isinstance(failed.exception, myna.MynaError)
    assert not (tmp_path / "a.wav").exists()
    assert run(model, "-o", tmp_path / "a.wav", "--no-watermark").exit_code == 0
