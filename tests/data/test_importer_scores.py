"""Recordings with scores, as a JSONL file and in SpeechOcean762's layout: what is wrong is named with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from myna.audio.files import write_audio
from myna.data.importers import ImportResult, import_source, write_import
from myna.data.manifest import read_manifest
from tests.tone_learners import RATE, lines, record, sound


def imported(source: Path, tmp_path: Path, **options: Any) -> ImportResult:
    return import_source(str(source), media=tmp_path / "media", **options)


def test_a_file_of_scores_is_known_and_read(tmp_path: Path) -> None:
    found = imported(record(tmp_path / "recordings"), tmp_path)
    assert found.format == "scored_jsonl" and not found.rejected
    first = found.utterances[0]
    assert first.text == "tok" and first.speaker == "s0" and first.references == ()
    assert json.loads(first.answer)["phones"] == "T T" and first.extras["question"] == "How was it?"


def test_its_manifest_says_the_same(tmp_path: Path) -> None:
    found = imported(record(tmp_path / "recordings"), tmp_path)
    write_import(found, tmp_path / "out")
    assert [u.answer for u in read_manifest(tmp_path / "out" / "manifest.jsonl")] == [
        u.answer for u in found.utterances
    ]
    again = imported(tmp_path / "out", tmp_path)
    assert again.format == "myna" and again.utterances[3].answer == found.utterances[3].answer


def test_a_bad_score_is_named_with_file_and_line(tmp_path: Path) -> None:
    path = record(tmp_path / "recordings")
    broken = lines()
    broken[4]["scores"]["fluency"] = 11
    del broken[9]["scores"]["total"]
    path.write_text("".join(json.dumps(line) + "\n" for line in broken))
    found = imported(path, tmp_path)
    assert len(found.utterances) == 14
    assert [(item.line, item.reason) for item in found.rejected] == [(5, "bad score"), (10, "bad score")]
    assert f"{path}:5 (04) bad score: `scores.fluency` is 11" in str(found.rejected[0])
    assert "there is no `scores.total`" in found.rejected[1].detail


@pytest.fixture
def ocean(tmp_path: Path) -> Path:
    """Three sentences as SpeechOcean762 has them; the folder of its training part."""
    root = tmp_path / "speechocean762"
    word = {"text": "TOK", "accuracy": 10, "stress": 10, "total": 10, "phones": ["T", "OW0", "K"]}
    word |= {"phones-accuracy": [2.0, 1.8, 0.2], "mispronunciations": []}
    scores: dict[str, Any] = {}
    for number, mistake in enumerate(["S", "<DEL>", "T*"]):
        id = f"00001001{number}"
        wrong = {"canonical-phone": "K", "index": 2, "pronounced-phone": mistake}
        scores[id] = {"text": "TOK", "accuracy": 8, "completeness": 10.0, "fluency": 9, "prosodic": 9, "total": 8}
        scores[id]["words"] = [word | {"mispronunciations": [wrong]}]
        (root / "WAVE" / "SPEAKER0001").mkdir(parents=True, exist_ok=True)
        write_audio(root / "WAVE" / "SPEAKER0001" / f"{id}.WAV", sound("T K"), RATE)
    (root / "resource").mkdir()
    (root / "resource" / "scores.json").write_text(json.dumps(scores, indent=4))
    part = root / "train"
    part.mkdir()
    (part / "wav.scp").write_text("".join(f"{id}\tWAVE/SPEAKER0001/{id}.WAV\n" for id in scores))
    (part / "text").write_text("".join(f"{id}\tTOK\n" for id in scores))
    (part / "utt2spk").write_text("".join(f"{id}\t0001\n" for id in scores))
    return part


def change(ocean: Path, id: str, **changed: Any) -> Path:
    path = ocean.parent / "resource" / "scores.json"
    scores = json.loads(path.read_text())
    scores[id] |= changed
    path.write_text(json.dumps(scores, indent=4))
    return path


def test_speechocean_is_known_and_read(ocean: Path, tmp_path: Path) -> None:
    found = imported(ocean, tmp_path)
    assert found.format == "speechocean" and not found.rejected
    assert [json.loads(u.answer)["phones"] for u in found.utterances] == ["T OW S", "T OW", "T OW T"]
    assert {(u.speaker, u.extras["corpus"]) for u in found.utterances} == {("0001", "speechocean762")}
    assert found.utterances[0].extras["assessment"]["words"][0]["phone_scores"] == [2.0, 1.8, 0.2]


def test_its_bad_scores_are_named_where_they_stand(ocean: Path, tmp_path: Path) -> None:
    path = change(ocean, "000010011", fluency=12)
    [rejected] = imported(ocean, tmp_path).rejected
    line = path.read_text().splitlines()[(rejected.line or 0) - 1]
    assert rejected.source == str(path) and '"000010011"' in line
    assert "`scores.fluency` is 12" in rejected.detail


def test_a_mistake_in_a_phone_that_is_not_there_is_named(ocean: Path, tmp_path: Path) -> None:
    words = [{"text": "TOK", "phones": "T OW K", "mispronunciations": [{"index": 3, "pronounced-phone": "S"}]}]
    change(ocean, "000010010", words=words)
    [rejected] = imported(ocean, tmp_path).rejected
    assert rejected.reason == "bad score" and "a mistake in number 3" in rejected.detail


def test_a_sentence_without_scores_and_one_without_text_are_named(ocean: Path, tmp_path: Path) -> None:
    with (ocean / "wav.scp").open("a") as file:
        file.write("000019999\tWAVE/SPEAKER0001/000010010.WAV\n")
    (ocean / "text").write_text("000010010\tTOK\n000010012\tTOK\n000019999\tTOK\n")
    found = {item.id: item for item in imported(ocean, tmp_path).rejected}
    assert found["000019999"].line == 4 and "has none for it" in found["000019999"].detail
    assert found["000010011"].reason == "empty text"


def test_a_command_in_wav_scp_is_not_run(ocean: Path, tmp_path: Path) -> None:
    (ocean / "wav.scp").write_text(f"000010010\ttouch {tmp_path}/ran |\n")
    [rejected] = imported(ocean, tmp_path).rejected
    assert "only files are read" in rejected.detail and not (tmp_path / "ran").exists()
