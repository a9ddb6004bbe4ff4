"""Files of lines: every form gives the same lines, errors name their line, and lines are spoken into a folder once."""

from __future__ import annotations

import base64
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
from myna.speak.lines import SPOKEN_FILE, SpeechLine, SpokenLines, open_lines
from myna.speak.request import SpeechRequest, read_reference


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("anna", "ben"):
        write_audio(tmp_path / f"{name}.wav", 0.1 * np.ones(2400, np.float32), 24_000)
    return tmp_path


def written(folder: Path, name: str, *lines: Any) -> Path:
    file = folder / name
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    file.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return file


def read(file: Path) -> list[SpeechLine]:
    return open_lines(file, file.parent / "out", SpeechRequest(""), suffix=".wav", force=False)


def test_text_is_one_line_each(folder: Path) -> None:
    (folder / "lines.txt").write_bytes("\ufeffGood  morning.\r\n\r\n xin chào \n".encode())
    first, second = read(folder / "lines.txt")
    assert (first.request.text, first.name, first.line) == ("Good morning.", "line-0001", 1)
    assert (second.request.text, second.name, second.line, second.request.references) == (
        "xin chào",
        "line-0003",
        3,
        (),
    )


def test_json_lines_have_references_scene_and_seed(folder: Path) -> None:
    full = {
        "text": "Hello.",
        "id": "a/b",
        "reference": "anna.wav",
        "reference_text": "I am Anna.",
        "scene": "",
        "seed": 3,
    }
    two = {
        "text": "[SPEAKER0] Hi. [SPEAKER1] Ho.",
        "reference": ["anna.wav", str(folder / "ben.wav")],
        "reference_text": ["I am Anna.", "I am Ben."],
        "language": "en",
    }
    for file in (written(folder, "l.jsonl", full, two), written(folder, "l.json", [full, two])):
        first, second = read(file)
        assert (first.id, first.request.scene, first.request.seed, first.request.language) == ("a/b", "", 3, "")
        assert "/" not in first.name and first.request.recordings[0].file == folder / "anna.wav"
        assert second.request.scene is None and second.request.seed == 0 and second.request.language == "en"
        assert [reference.text for reference in second.request.references] == ["I am Anna.", "I am Ben."]


def test_names_are_unique_where_case_does_not_count(folder: Path) -> None:
    ids = ["Anna", "anna", "a b", "a_b", "..", "CON/1", 7]
    lines = read(written(folder, "l.jsonl", *({"text": "Hello.", "id": id} for id in ids)))
    names = [line.name.casefold() for line in lines]
    assert len(set(names)) == len(ids) and all(names)
    assert not any(set(name) & set('/\\:*?"<>| ') for name in names) and lines[0].name == "Anna"


def message(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": content[0] if len(content) == 1 else list(content)}


def audio(url: str) -> dict[str, str]:
    return {"type": "audio", "audio_url": url}


def test_chatml_gives_the_open_text_and_the_voice_before_it(folder: Path) -> None:
    scene = "Generate audio.\n<|scene_desc_start|>\nA quiet room.\n<|scene_desc_end|>"
    turns = [message("system", scene), message("user", "I am Anna."), message("assistant", audio("anna.wav"))]
    sample = {"messages": [*turns, message("user", "Good morning.")], "misc": {"sample_id": "one"}}
    (line,) = read(written(folder, "l.json", sample))
    assert (line.request.text, line.id, line.request.scene) == ("Good morning.", "one", "A quiet room.")
    assert [(reference.name, reference.text) for reference in line.request.recordings] == [("anna.wav", "I am Anna.")]


def test_chatml_with_its_answer_is_spoken_anew(folder: Path) -> None:
    said = "Please generate speech for given text in reference audio's voice:"
    sample = {
        "messages": [
            message(
                "user",
                {"type": "text", "text": "I am Anna."},
                audio("anna.wav"),
                {"type": "text", "text": f"{said} Hello."},
            ),
            message("assistant", audio("ben.wav")),
        ]
    }
    open_sample = {"messages": sample["messages"][:1], "id": "open"}
    for line in read(written(folder, "l.jsonl", sample, open_sample)):
        assert line.request.text == "Hello." and [reference.name for reference in line.request.recordings] == [
            "anna.wav"
        ]
        assert line.request.recordings[0].text == "I am Anna."


def test_clips_within_chatml_are_written_down(folder: Path) -> None:
    raw = {
        "type": "audio",
        "audio_url": "placeholder",
        "raw_audio": base64.b64encode((folder / "anna.wav").read_bytes()).decode(),
    }
    sample = {"messages": [message("user", "I am Anna."), message("assistant", raw), message("user", "Hello.")]}
    (line,) = read(written(folder, "l.jsonl", sample))
    assert line.request.recordings[0].file.parent == folder / "out" / "media"


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"text": " "}, "no text"),
        ({"id": "x"}, "there is no `text`"),
        ({"text": "a", "referense": "anna.wav"}, "unknown: referense"),
        ({"text": "a", "reference": "anna.wav", "reference_text": ["b", "c"]}, "1 references but 2"),
        ({"text": "a", "reference": "anna.wav"}, "silence"),  # nothing to hear
        ({"text": "a", "reference": "gone.wav", "reference_text": "b"}, r"gone\.wav is not there"),
        ({"text": "a", "reference": "anna.wav", "reference_text": ""}, "reference 1 is empty"),
        ({"text": "a", "seed": "1"}, "`seed`"),
        ({"text": "a", "id": ["x"]}, "`id`"),
        ({"text": "a", "id": "first"}, "is that of line 1 too"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no text"),
        ("[1]", "list, not dict"),
        ("{", "Expecting"),
    ],
)
def test_an_error_names_the_line_and_says_what_to_write(folder: Path, bad: Any, match: str) -> None:
    file = written(folder, "l.jsonl", {"text": "Hello.", "id": "first"}, "", bad)
    with pytest.raises(SpeakError, match=rf"l\.jsonl:3: .*{match}"):
        read(file)


def test_files_without_lines_are_refused(folder: Path) -> None:
    with pytest.raises(SpeakError, match=r"gone\.txt is not there"):
        read(folder / "gone.txt")
    with pytest.raises(SpeakError, match="has no lines"):
        read(written(folder, "empty.txt", "", " "))
    (folder / "latin.txt").write_bytes("ok\nd\xe9j\xe0\n".encode("latin-1"))
    with pytest.raises(SpeakError, match=r"latin\.txt:2: not UTF-8"):
        read(folder / "latin.txt")


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


def test_finished_lines_are_not_spoken_again(voice: myna.Voice, lines: Path, tmp_path: Path) -> None:
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


def test_lines_continue_after_a_kill(voice: myna.Voice, lines: Path, tmp_path: Path) -> None:
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


def test_foreign_folders_and_inputs_are_not_overwritten(voice: myna.Voice, lines: Path, tmp_path: Path) -> None:
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
    """Speak the first of very many lines at once, and one that needs a larger batch in its turn."""
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
