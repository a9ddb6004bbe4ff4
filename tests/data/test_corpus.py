"""A prepared folder opens as it was made, or says what has changed and what to type."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from myna.audio.clip import read
from myna.data.codec import Codes
from myna.data.codes import encode_corpus
from myna.data.corpus import PREPARED, Corpus, Prepared
from myna.data.manifest import write_manifest
from myna.data.utterance import Span, Utterance
from myna.errors import DataError
from tests.data.corpora import prepared, said
from tests.data.kill_helper import FakeCodec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepared(tmp_path / "data", clips(tmp_path / "data"))
    return tmp_path / "data"


def clips(folder: Path) -> list[Utterance]:
    return [said(folder, "a"), said(folder, "b", seconds=2), said(folder, "c", recording="a", span=Span(0.25, 0.5))]


def codes_of(utterance: Utterance) -> Codes:
    span = (utterance.span.start, utterance.span.end) if utterance.span else None
    codes: Codes = FakeCodec().encode(read(utterance.audio, sample_rate=800, span=span)[None])[0]
    return codes


def test_it_opens_as_it_was_prepared(folder: Path) -> None:
    corpus = Corpus.open(folder)
    assert corpus.utterances == clips(folder)
    assert corpus.prepared == Prepared("0123456789abcdef", 800, 100.0, 2, 1024)
    assert [corpus.seconds(utterance) for utterance in corpus.utterances] == [1.0, 2.0, 0.25]
    for utterance in corpus.utterances:
        assert np.array_equal(corpus.codes(utterance), codes_of(utterance))
        assert corpus.by_id(utterance.id, wanted_by="test") == utterance


def test_equal_sound_has_equal_keys(tmp_path: Path) -> None:
    corpus = prepared(tmp_path, [said(tmp_path, "a"), said(tmp_path, "copy", sound="a"), said(tmp_path, "b")])
    a, copy, b = (corpus.key(utterance) for utterance in corpus.utterances)
    assert a == copy != b


def test_it_moves_as_a_whole(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder, tmp_path / "elsewhere")
    corpus = Corpus.open(tmp_path / "elsewhere")
    assert [len(corpus.codes(utterance)) for utterance in corpus.utterances] == [100, 200, 25]


def test_clips_shorter_than_a_frame_are_left_out(tmp_path: Path) -> None:
    corpus = prepared(tmp_path, [said(tmp_path, "a"), said(tmp_path, "click", seconds=0.005)])
    assert [utterance.id for utterance in corpus.utterances] == ["a"]
    with pytest.raises(DataError, match=r"a names the reference click, of which .* holds no codes") as caught:
        corpus.by_id("click", wanted_by="a")
    assert "at least a frame long" in caught.value.hint


# What is not there


@pytest.mark.parametrize("missing", ["folder", "file", PREPARED])
def test_a_folder_that_was_not_prepared_says_how_to(tmp_path: Path, folder: Path, missing: str) -> None:
    place = {"folder": tmp_path / "nowhere", "file": tmp_path / "file", PREPARED: folder}[missing]
    (tmp_path / "file").touch()
    (folder / PREPARED).unlink()
    with pytest.raises(DataError, match=f"{place} is not a prepared folder: it has no {PREPARED}") as caught:
        Corpus.open(place)
    assert caught.value.hint == f"myna prepare SOURCE --out {place} --model MODEL"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"3", b'{"codec_revision": "x"}', b'{"more": 1}', b"\xff\xfe"])
def test_a_damaged_note_is_named(folder: Path, damage: bytes) -> None:
    (folder / PREPARED).write_bytes(damage)
    with pytest.raises(DataError, match=f"{PREPARED} is damaged") as caught:
        Corpus.open(folder)
    assert "myna prepare" in caught.value.hint


def test_the_note_is_written_whole(folder: Path) -> None:
    assert json.loads((folder / PREPARED).read_text())["codec_revision"] == "0123456789abcdef"
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_no_manifest_is_named(folder: Path) -> None:
    (folder / "manifest.jsonl").unlink()
    with pytest.raises(DataError, match=r"there is no manifest .*manifest\.jsonl"):
        Corpus.open(folder)


# What has changed


def changed(folder: Path, *utterances: Utterance) -> None:
    write_manifest(folder / "manifest.jsonl", utterances)


def test_a_new_line_in_the_manifest_wants_to_be_prepared(folder: Path) -> None:
    changed(folder, *clips(folder), said(folder, "new"))
    with pytest.raises(DataError, match="the utterance new is new since") as caught:
        Corpus.open(folder)
    assert f"myna prepare SOURCE --out {folder}" in caught.value.hint


@pytest.mark.parametrize("change", [{"span": Span(0, 0.5)}, {"audio": Path("/elsewhere/a.wav")}])
def test_another_sound_under_an_old_id_wants_to_be_prepared(folder: Path, change: dict[str, object]) -> None:
    a, *others = clips(folder)
    changed(folder, replace(a, **change), *others)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="the utterance a has other audio since"):
        Corpus.open(folder)


def test_texts_and_lines_may_change_freely(folder: Path) -> None:
    a, b, _ = clips(folder)
    changed(folder, replace(b, text="corrected"), replace(a, speaker="bert"))
    corpus = Corpus.open(folder)
    assert [(u.id, u.text, u.speaker) for u in corpus.utterances] == [
        ("b", "corrected", "anna"),
        ("a", "text of a", "bert"),
    ]


def test_an_id_that_comes_twice_is_refused(folder: Path) -> None:
    a, b, c = clips(folder)
    changed(folder, a, b, c, replace(b, text="said otherwise"))
    with pytest.raises(DataError, match=r"manifest\.jsonl has several utterances with the id b"):
        Corpus.open(folder)


# Another codec


def test_codes_of_another_codec_are_not_taken_for_these(folder: Path) -> None:
    other = FakeCodec("fedcba9876543210")
    Prepared.of(other).write(folder)
    with pytest.raises(DataError, match="holds no codes of the codec fedcba98") as caught:
        Corpus.open(folder)
    assert f"myna prepare SOURCE --out {folder}" in caught.value.hint
    encode_corpus(clips(folder), other, folder)
    assert len(Corpus.open(folder).utterances) == 3


def test_a_preparation_that_was_not_finished_is_not_taken_for_one(folder: Path) -> None:
    (folder / "codes" / "01234567" / "index.arrow").unlink()
    with pytest.raises(DataError, match="was not encoded to the end"):
        Corpus.open(folder)
