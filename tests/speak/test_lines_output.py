"""Lines spoken into a folder by a tiny real model: nothing twice, nothing lost, nothing of others replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from filelock import FileLock

import myna
from myna.audio.files import AUDIO_FORMATS, read_audio, write_audio
from myna.core.errors import OutputError, SpeakError
from myna.speak.lines import SPOKEN_FILE, SpokenLines
from myna.speak.request import SpeechRequest, read_reference

SETTINGS: dict[str, Any] = {"max_seconds": 0.2, "batch_size": 2, "seed": 7}


@pytest.fixture(scope="module")
def voice(tmp_path_factory: pytest.TempPathFactory) -> myna.Voice:
    return myna.load(myna.make_tiny(tmp_path_factory.mktemp("tiny") / "model"), device="cpu")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    time = np.arange(9600) / 24_000
    write_audio(tmp_path / "anna.wav", (0.4 * np.sin(2000 * time)).astype(np.float32), 24_000)
    rows = [
        {"text": "Good morning.", "id": "greeting"},
        {"text": "I am Anna.", "id": "a/b", "reference": "anna.wav", "reference_text": "hello", "seed": 3},
        {"text": "Good evening."},
    ]
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return file


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / SPOKEN_FILE).read_text(encoding="utf-8").splitlines()]


def changed(before: dict[Path, int], out: Path) -> set[str]:
    return {file.name for file in out.glob("*.wav") if before.get(file) != file.stat().st_mtime_ns}


def times(out: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in out.glob("*.wav")}


def test_each_line_is_what_speaking_it_alone_gives(voice: myna.Voice, lines: Path, tmp_path: Path) -> None:
    calls: list[Any] = []
    spoken = voice.speak_lines(lines, tmp_path / "out", **SETTINGS, progress=lambda *call: calls.append(call))
    assert calls == [("speaking", done, 3) for done in range(4)] and spoken.kept == 0
    assert spoken.rows == rows_of(tmp_path / "out")
    greeting, anna, evening = spoken.rows
    assert (greeting["id"], greeting["file"], greeting["seed"]) == ("greeting", "greeting.wav", 7)
    assert (anna["id"], anna["seed"]) == ("a/b", 3) and evening["id"] == "line-0003"
    assert greeting["finish_reason"] == "length" and len(spoken.warnings) == 3, "a random model finds no end"
    assert spoken.warnings[0].startswith("greeting: cut after 0.2 s")
    alone = voice.speak("I am Anna.", reference=tmp_path / "anna.wav", reference_text="hello", max_seconds=0.2, seed=3)
    saved = read_audio(tmp_path / "out" / anna["file"])
    assert np.abs(saved - alone.samples.clip(-1, 1)).max() < 1e-3 and anna["seconds"] == alone.seconds
    [reference] = anna["references"]
    heard = read_reference(tmp_path / "anna.wav")
    assert np.abs(read_audio(tmp_path / "out" / reference) - heard.clip(-1, 1)).max() < 1e-3


def test_what_is_spoken_is_not_spoken_again(voice: myna.Voice, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def again(**settings: Any) -> tuple[SpokenLines, set[str]]:
        before = times(out)
        spoken = voice.speak_lines(lines, out, **(SETTINGS | settings))
        return spoken, changed(before, out)

    first = again()[0]
    same, files = again()
    assert (same.kept, files, same.rows) == (3, set(), first.rows)
    (out / "greeting.wav").unlink()
    assert again()[1] == {"greeting.wav"}
    lines.write_text(lines.read_text().replace("evening", "night"))
    assert again()[1] == {"line-0003.wav"}
    spoken, files = again(seed=8)
    assert spoken.kept == 1 and files == {"greeting.wav", "line-0003.wav"}, "a line with a seed of its own keeps it"
    write_audio(tmp_path / "anna.wav", np.float32(0.5) * read_audio(tmp_path / "anna.wav"), 24_000)
    assert len(again(seed=8)[1]) == 2, "another recording of the voice, and its copy"


def test_after_a_kill_it_goes_on(voice: myna.Voice, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def kill(_stage: str, done: int, _total: int | None) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        voice.speak_lines(lines, out, **SETTINGS, progress=kill)
    assert len(rows_of(out)) == 2
    with (out / SPOKEN_FILE).open("a", encoding="utf-8") as file:
        file.write('{"id": "line-0003", "te')
    spoken = voice.speak_lines(lines, out, **SETTINGS)
    assert spoken.kept == 2 and [row["id"] for row in rows_of(out)] == ["greeting", "a/b", "line-0003"]


def test_a_folder_of_others_and_inputs_are_not_written_to(voice: myna.Voice, lines: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "song.txt").write_text("la")
    with pytest.raises(OutputError, match="holds no spoken lines"):
        voice.speak_lines(lines, tmp_path / "theirs", **SETTINGS)
    assert voice.speak_lines(lines, tmp_path / "theirs", **SETTINGS, force=True).rows
    lines.write_text('{"text": "hi", "id": "anna", "reference": "anna.wav", "reference_text": "hello"}')
    before = (tmp_path / "anna.wav").read_bytes()
    with pytest.raises(OutputError, match="is an input"):
        voice.speak_lines(lines, tmp_path, **SETTINGS, force=True)
    assert (tmp_path / "anna.wav").read_bytes() == before


def test_a_given_reference_is_that_of_lines_without_one(voice: myna.Voice, lines: Path, tmp_path: Path) -> None:
    anna: dict[str, Any] = {"reference": tmp_path / "anna.wav", "reference_text": "hello"}
    spoken = voice.speak_lines(lines, tmp_path / "out", **SETTINGS, **anna)
    assert [len(row["references"]) for row in spoken.rows] == [1, 1, 1]
    two: dict[str, Any] = {"reference": [tmp_path / "anna.wav"] * 2, "reference_text": ["hello", "you"]}
    with pytest.raises(SpeakError, match=r"lines\.jsonl:1: there are 2 references"):
        voice.speak_lines(lines, tmp_path / "two", **SETTINGS, **two)


def test_two_processes_do_not_speak_into_one_folder(voice: myna.Voice, lines: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"), pytest.raises(OutputError, match="another process is speaking into"):
        voice.speak_lines(lines, tmp_path / "out", **SETTINGS, force=True)


@pytest.mark.parametrize("format", ["flac", "mp3", "ogg", "opus"])
def test_lines_in_other_formats(voice: myna.Voice, lines: Path, tmp_path: Path, format: Any) -> None:
    spoken = voice.speak_lines(lines, tmp_path / "out", **SETTINGS, format=format)
    expected = {(f".{format}", AUDIO_FORMATS[f".{format}"][0])}
    for row in spoken.rows:
        files = [tmp_path / "out" / name for name in (row["file"], *row["references"])]
        assert {(file.suffix, soundfile.info(file).format) for file in files} == expected
        assert abs(len(read_audio(files[0])) / 24_000 - row["seconds"]) < 0.06
    assert voice.speak_lines(lines, tmp_path / "out", **SETTINGS, format=format).kept == 3
    assert voice.speak_lines(lines, tmp_path / "out", **SETTINGS).kept == 0, "WAV now, and the others stay"
    assert len(list((tmp_path / "out").glob(f"*.{format}"))) == 4


def test_lines_are_planned_as_the_batch_comes_to_them(
    voice: myna.Voice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of very many is spoken at once, and one that needs a larger batch in its turn."""
    (tmp_path / "lines.txt").write_text("".join(f"line {number}\n" for number in range(30)) + 200 * "word " + "\n")
    planned, ahead, plan = list[str](), list[int](), voice.engine.plan

    def record(request: SpeechRequest, *args: Any, **kwargs: Any) -> Any:
        planned.append(request.text)
        return plan(request, *args, **kwargs)

    def progress(_stage: str, done: int, _total: int | None) -> None:
        ahead.append(len(planned) - done)

    monkeypatch.setattr(voice.engine, "plan", record)
    spoken = voice.speak_lines(tmp_path / "lines.txt", tmp_path / "out", **SETTINGS, progress=progress)
    assert len(spoken.rows) == 31 and len(planned) == 31
    assert ahead[0] == 0 and max(ahead) <= 2 * SETTINGS["batch_size"]
    alone = voice.speak("line 7", max_seconds=0.2, seed=7)
    assert np.abs(read_audio(tmp_path / "out" / spoken.rows[7]["file"]) - alone.samples.clip(-1, 1)).max() < 1e-3


def test_a_reference_that_cannot_be_read_names_its_line(voice: myna.Voice, lines: Path, tmp_path: Path) -> None:
    (tmp_path / "anna.wav").write_bytes(b"RIFF")
    with pytest.raises(SpeakError, match=r"line 2, a/b: .*anna\.wav"):
        voice.speak_lines(lines, tmp_path / "out", **SETTINGS)
