"""`myna speak` on a tiny real model: takes, lines, streams and players."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import myna
from myna.audio.files import read_audio, write_audio
from myna.core.errors import SpeakError
from tests.command_line import CommandResult, run_command

LONG = "The wind blew over the hills all night, and in the morning the river had risen above its banks. " * 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(myna.make_tiny(tmp_path_factory.mktemp("tiny") / "model"))


def words(model: str, *more: object) -> list[str]:
    return ["speak", *map(str, more), "-m", model, "--device", "cpu", "--max-seconds", "0.2"]


def speak(model: str, *more: object) -> CommandResult:
    return run_command(words(model, *more))


def players(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Only these programs are installed; `cat` and the like are reached by their own path."""
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_a_long_text_tells_what_was_cut(model: str, tmp_path: Path) -> None:
    result = speak(model, LONG, "-o", tmp_path / "long.wav")
    assert result.exit_code == 0, result.output
    assert "long.wav: " in result.output and "it did not find its end" in result.output
    assert result.output.count('cut after 0.2 s without finding its end: "The wind') > 2


def test_a_poor_reference_is_said_once_and_used(model: str, tmp_path: Path) -> None:
    write_audio(tmp_path / "call.wav", np.random.default_rng(0).uniform(-0.1, 0.1, 8_000).astype(np.float32), 8_000)
    reference = ["--reference", tmp_path / "call.wav", "--reference-text", "hello"]
    result = speak(model, "hi", "-o", tmp_path / "hi.wav", *reference)
    assert result.exit_code == 0 and (tmp_path / "hi.wav").is_file()
    assert result.output.count("like a telephone call") == 1 and "s of speech: give 3 to 15 s" in result.output


def test_takes_are_numbered_and_are_those_of_their_seeds(model: str, tmp_path: Path) -> None:
    result = speak(model, "hi", "-o", tmp_path / "hi.wav", "--takes", 2, "--seed", 4, "--codes", tmp_path / "hi.npy")
    assert "hi-1.wav" in result.output and "hi-2.wav" in result.output
    speak(model, "hi", "-o", tmp_path / "alone.wav", "--seed", 5, "--codes", tmp_path / "alone")
    first, second = (read_audio(tmp_path / name) for name in ("hi-2.wav", "alone.wav"))
    assert np.array_equal(first, second)  # the files differ in their signatures
    assert np.array_equal(np.load(tmp_path / "hi-2.npy"), np.load(tmp_path / "alone.npy"))
    assert not (tmp_path / "hi.wav").exists()
    with pytest.raises(myna.MynaError, match=r"hi-1\.wav exists"):
        speak(model, "hi", "-o", tmp_path / "hi.wav", "--takes", 3)


def test_lines_are_spoken_and_not_again(model: str, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("Good morning.\nGood night.\n")
    command = ["speak-lines", *words(model, tmp_path / "lines.txt", "-o", tmp_path / "out")[1:]]
    assert "2 lines, 0.4 s" in run_command(command).output
    again = run_command(command)
    assert "2 lines, 2 of them before" in again.output and "line-0001: cut after" in again.output
    rows = [json.loads(row) for row in (tmp_path / "out" / "spoken.jsonl").read_text().splitlines()]
    assert [row["file"] for row in rows] == ["line-0001.wav", "line-0002.wav"]
    assert all((tmp_path / "out" / row["file"]).is_file() for row in rows)


def test_a_stream_is_raw_audio_and_nothing_else(model: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "myna", *words(model, "hi", "--stream", "-o", tmp_path / "hi.wav")]
    result = subprocess.run(command, capture_output=True, check=True)
    streamed = np.frombuffer(result.stdout, "<i2") / 32767
    assert np.abs(streamed - read_audio(tmp_path / "hi.wav")).max() < 1e-3 and len(streamed) == 5 * 960
    assert b"0.20 s, it did not find its end" in result.stderr
    with subprocess.Popen(
        [sys.executable, "-m", "myna", *words(model, LONG, "--stream")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as left:
        assert left.stdout is not None and left.stderr is not None
        left.stdout.read(100)
        left.stdout.close()
        assert b"Traceback" not in left.stderr.read()
    assert left.returncode == 0, "a reader that leaves is no error"


def test_it_is_played_by_the_player_that_is_there(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = f'echo "$@" > {tmp_path}/words; /bin/cat > {tmp_path}/raw'
    players(tmp_path / "bin", monkeypatch, aplay=record, afplay="exit 3")
    speak(model, "hi", "--play", "-o", tmp_path / "hi.wav")
    assert (tmp_path / "words").read_text() == "-q -t raw -f S16_LE -c 1 -r 24000 -\n"
    played = np.frombuffer((tmp_path / "raw").read_bytes(), "<i2") / 32767
    assert np.abs(played - read_audio(tmp_path / "hi.wav")).max() < 1e-3


def test_a_player_of_files_gets_a_file(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    players(tmp_path / "bin", monkeypatch, afplay=f'/bin/cat "$1" > {tmp_path}/played.wav')
    speak(model, "hi", "--play")
    assert len(read_audio(tmp_path / "played.wav")) == 5 * 960


def test_without_a_player_it_says_what_to_install(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    players(tmp_path / "none", monkeypatch)
    with pytest.raises(SpeakError, match="no player is installed") as caught:
        speak(model, "hi", "--play")
    assert "apt install ffmpeg" in caught.value.hint
    players(tmp_path / "broken", monkeypatch, ffplay="exit 7")
    with pytest.raises(SpeakError, match="ffplay ended with code 7"):
        speak(model, LONG, "--play")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("hi",), "nowhere for the speech to go"),
        (("--out", "x.wav"), "give either a text or --text-file"),
        (("hi", "--text-file", "x", "--out", "x.wav"), "give either a text"),
        (("hi", "--stream", "--play"), "--stream does not go with --play"),
        (("hi", "--play", "--codes", "x.npy"), "--play does not go with --codes"),
        (("hi", "--play", "--takes", "2"), "--play does not go with --takes"),
    ],
)
def test_what_does_not_go_together_is_said(
    model: str, more: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpeakError, match=re.escape(message)):
        speak(model, *more)
    assert list(tmp_path.iterdir()) == []
