"""Files of lines to speak: every form gives the same lines, and an error names its line."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from myna.audio.files import write_audio
from myna.core.errors import SpeakError
from myna.speak.lines import SpeechLine, read_lines
from myna.speak.request import SpeechRequest


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
    return read_lines(file, file.parent / "media", SpeechRequest(""))


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
    assert line.request.recordings[0].file.parent == folder / "media"


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"text": " "}, "no text"),
        ({"id": "x"}, "there is no `text`"),
        ({"text": "a", "referense": "anna.wav"}, "unknown: referense"),
        ({"text": "a", "reference": "anna.wav"}, "1 references but 0"),
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
