"""Prepared folders: opening them, and messages about what has changed and what to type."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from myna.audio.files import read_audio
from myna.core.errors import DataError
from myna.data.codec import Codes
from myna.data.dataset import DATASET_INFO_FILE, TABLE_FILE, DatasetInfo, PreparedDataset
from myna.data.encoding import encode_dataset
from myna.data.manifest import Span, Utterance, write_manifest
from tests.data.corpora import prepared, said, utterance_key
from tests.data.kill_helper import FakeCodec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepared(tmp_path / "data", clips(tmp_path / "data"))
    return tmp_path / "data"


def clips(folder: Path) -> list[Utterance]:
    return [said(folder, "a"), said(folder, "b", seconds=2), said(folder, "c", recording="a", span=Span(0.25, 0.5))]


def codes_of(utterance: Utterance) -> Codes:
    span = (utterance.span.start, utterance.span.end) if utterance.span else None
    codes: Codes = FakeCodec().encode(read_audio(utterance.audio, sample_rate=800, span=span)[None])[0]
    return codes


def test_it_opens_as_it_was_prepared(folder: Path) -> None:
    corpus = PreparedDataset.open(folder)
    assert list(corpus.utterances) == clips(folder)
    assert corpus.info == DatasetInfo("0123456789abcdef", 800, 100.0, 2, 1024)
    assert (corpus.table.frames / corpus.info.frame_rate).tolist() == [1.0, 2.0, 0.25]
    for utterance in corpus.utterances:
        assert np.array_equal(corpus.codes(utterance), codes_of(utterance))
        assert corpus.by_id(utterance.id, wanted_by="test") == utterance


def test_equal_sound_has_equal_keys(tmp_path: Path) -> None:
    corpus = prepared(tmp_path, [said(tmp_path, "a"), said(tmp_path, "copy", sound="a"), said(tmp_path, "b")])
    a, copy, b = (corpus.key(utterance) for utterance in corpus.utterances)
    assert a == copy != b


def test_it_moves_as_a_whole(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.move(folder, tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "elsewhere" / "recordings")
    for name in (tmp_path / "elsewhere", Path(".."), Path("../../elsewhere")):
        for _ in range(2):
            corpus = PreparedDataset.open(name)
            assert [len(corpus.codes(utterance)) for utterance in corpus.utterances] == [100, 200, 25]
            assert [utterance.audio.exists() for utterance in corpus.utterances] == [True] * 3


def test_nothing_is_lost_on_the_way_into_columns(tmp_path: Path) -> None:
    said(tmp_path, "plain", seconds=3)
    made = [
        Utterance("plain", tmp_path / "recordings" / "plain.wav", "", ""),
        said(tmp_path, "whole", recording="plain", span=Span(0.0, None)),
        said(tmp_path, "from", recording="plain", span=Span(0.5, None), text="الكلام بـ\u200fالعربية"),
        said(tmp_path, "part", recording="plain", span=Span(0.5, 1.25), references=["whole", "from"], scene="A cave."),
        replace(said(tmp_path, "voice", "bert", reference_only=True, nested={"a": [1, None]}), language="vi"),
    ]
    for corpus in (prepared(tmp_path, made), PreparedDataset.open(tmp_path)):
        assert list(corpus.utterances) == made
        assert [utterance.id for utterance in corpus.utterances[1:4:2]] == ["whole", "part"]
        assert corpus.utterances[-1].id == "voice" and len(corpus.utterances) == 5
        with pytest.raises(IndexError):
            corpus.utterances[5]


def test_utterances_are_found_by_id_speaker_and_sound(tmp_path: Path) -> None:
    clips = [said(tmp_path, "a"), said(tmp_path, "copy", "bert", sound="a"), said(tmp_path, "b", "bert")]
    every = prepared(tmp_path, clips).utterances
    assert [u.id for u in every.with_id("b")] == ["b"] and not every.with_id("c") and not every[:2].with_id("b")
    assert [u.id for u in every.by_speakers(["bert", "nobody"])] == ["copy", "b"]
    keys = [utterance_key(clip, FakeCodec().revision) for clip in clips]
    assert every.keys_among([*keys, "0" * 32]) == set(keys) and len(set(keys)) == 2
    assert every[2:].keys_among(keys) == {keys[2]}


def test_clips_shorter_than_a_frame_are_left_out(tmp_path: Path) -> None:
    corpus = prepared(tmp_path, [said(tmp_path, "a"), said(tmp_path, "click", seconds=0.005)])
    assert [utterance.id for utterance in corpus.utterances] == ["a"]
    with pytest.raises(DataError, match=r"a names the reference click, of which .* holds no codes") as caught:
        corpus.by_id("click", wanted_by="a")
    assert "at least a frame long" in caught.value.hint


# What is not there


@pytest.mark.parametrize("missing", ["folder", "file", DATASET_INFO_FILE])
def test_a_folder_that_was_not_prepared_says_how_to(tmp_path: Path, folder: Path, missing: str) -> None:
    place = {"folder": tmp_path / "nowhere", "file": tmp_path / "file", DATASET_INFO_FILE: folder}[missing]
    (tmp_path / "file").touch()
    (folder / DATASET_INFO_FILE).unlink()
    with pytest.raises(DataError, match=f"{place} is not a prepared folder: it has no {DATASET_INFO_FILE}") as caught:
        PreparedDataset.open(place)
    assert caught.value.hint == f"myna prepare SOURCE --out {place} --model MODEL"


def test_recordings_in_place_of_a_prepared_folder_are_to_be_prepared_into_another_one(tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    folder.mkdir()
    (folder / "anna.wav").touch()
    with pytest.raises(DataError) as caught:
        PreparedDataset.open(folder)
    assert f"myna prepare {folder} --out data/recordings" in caught.value.hint


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"3", b'{"codec_revision": "x"}', b'{"more": 1}', b"\xff\xfe"])
def test_a_damaged_note_is_named(folder: Path, damage: bytes) -> None:
    (folder / DATASET_INFO_FILE).write_bytes(damage)
    with pytest.raises(DataError, match=f"{DATASET_INFO_FILE} is damaged") as caught:
        PreparedDataset.open(folder)
    assert "myna prepare" in caught.value.hint


def test_the_note_is_written_whole(folder: Path) -> None:
    assert json.loads((folder / DATASET_INFO_FILE).read_text())["codec_revision"] == "0123456789abcdef"
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_no_manifest_is_named(folder: Path) -> None:
    (folder / "manifest.jsonl").unlink()
    with pytest.raises(DataError, match=r"there is no manifest .*manifest\.jsonl"):
        PreparedDataset.open(folder)


# What has changed


def changed(folder: Path, *utterances: Utterance) -> None:
    write_manifest(folder / "manifest.jsonl", utterances)


def test_a_new_line_in_the_manifest_wants_to_be_prepared(folder: Path) -> None:
    changed(folder, *clips(folder), said(folder, "new"))
    with pytest.raises(DataError, match="the utterance new is new since") as caught:
        PreparedDataset.open(folder)
    assert f"myna prepare SOURCE --out {folder}" in caught.value.hint


@pytest.mark.parametrize("change", [{"span": Span(0, 0.5)}, {"audio": Path("/elsewhere/a.wav")}])
def test_another_sound_under_an_old_id_wants_to_be_prepared(folder: Path, change: dict[str, object]) -> None:
    a, *others = clips(folder)
    changed(folder, replace(a, **change), *others)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="the utterance a has other audio since"):
        PreparedDataset.open(folder)


def test_texts_and_lines_may_change_freely(folder: Path) -> None:
    a, b, _ = clips(folder)
    changed(folder, replace(b, text="corrected"), replace(a, speaker="bert"))
    corpus = PreparedDataset.open(folder)
    assert [(u.id, u.text, u.speaker) for u in corpus.utterances] == [
        ("b", "corrected", "anna"),
        ("a", "text of a", "bert"),
    ]


def test_an_id_that_comes_twice_is_refused(folder: Path) -> None:
    a, b, c = clips(folder)
    changed(folder, a, b, c, replace(b, text="said otherwise"))
    with pytest.raises(DataError, match=r"manifest\.jsonl has several utterances with the id b"):
        PreparedDataset.open(folder)


def test_the_lines_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise AssertionError(f"{path} was read line by line")

    monkeypatch.setattr("myna.data.dataset.iterate_manifest", refuse)
    corpus = PreparedDataset.open(folder)
    assert list(corpus.utterances) == clips(folder) and corpus.notes == ()
    changed(folder, *clips(folder)[:1])
    with pytest.raises(AssertionError, match="line by line"):
        PreparedDataset.open(folder)


def test_a_change_of_one_letter_is_noticed_whatever_the_clock_says(folder: Path) -> None:
    path = folder / "manifest.jsonl"
    before = path.stat()
    path.write_text(path.read_text().replace("text of b", "text OF b"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    corpus = PreparedDataset.open(folder)
    assert [utterance.text for utterance in corpus.utterances] == ["text of a", "text OF b", "text of c"]
    assert corpus.notes == (f"{path} or its codes have changed, and were read anew",)
    assert PreparedDataset.open(folder).notes == (), "once is enough"


def test_a_folder_of_an_earlier_version_opens(folder: Path) -> None:
    (table_of(folder)).unlink()
    assert list(PreparedDataset.open(folder).utterances) == clips(folder)
    assert table_of(folder).is_file()


@pytest.mark.parametrize("part", [0.0, 0.2, 0.5, 0.9, 0.999])
def test_a_table_cut_short_is_made_anew(folder: Path, part: float) -> None:
    path = table_of(folder)
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[: int(part * len(whole))])
    assert list(PreparedDataset.open(folder).utterances) == clips(folder)
    assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_opens_and_says_what_that_costs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise DataError("cannot write codes into there: read-only", hint="make room")

    table_of(folder).unlink()
    monkeypatch.setattr("myna.data.code_store.write_arrow", refuse)
    corpus = PreparedDataset.open(folder)
    assert list(corpus.utterances) == clips(folder) and not table_of(folder).exists()
    [note] = corpus.notes
    assert "line by line every time" in note and "read-only" in note


def test_a_corpus_travels_to_workers(folder: Path) -> None:
    def same(there: PreparedDataset, here: PreparedDataset) -> bool:
        whole = list(there.utterances) == list(here.utterances) == clips(folder)
        codes = (np.array_equal(there.codes(each), here.codes(each)) for each in here.utterances)
        return whole and all(codes) and there.table.fingerprint == here.table.fingerprint

    corpus = PreparedDataset.open(folder)
    assert corpus.find(corpus.utterances[0].id) == 0, "which leaves something behind that need not be sent"
    sent = pickle.dumps(corpus)
    assert len(sent) < 2000 and same(pickle.loads(sent), corpus)

    path, written = table_of(folder), table_of(folder).read_bytes()
    path.unlink()
    with pytest.raises(DataError, match=r"utterances\.arrow was changed or removed"):
        pickle.loads(sent)
    path.write_bytes(written)
    manifest = folder / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace("text of", "words of", 1))
    PreparedDataset.open(folder)
    with pytest.raises(DataError, match="was changed or removed"):
        pickle.loads(sent)


def test_a_corpus_that_could_not_be_written_down_is_sent_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise DataError("cannot write codes into there: read-only", hint="make room")

    table_of(folder).unlink()
    monkeypatch.setattr("myna.data.code_store.write_arrow", refuse)
    there = pickle.loads(pickle.dumps(PreparedDataset.open(folder)))
    assert list(there.utterances) == clips(folder) and not table_of(folder).exists()


def test_audio_is_not_needed_and_codes_that_changed_are_noticed(folder: Path) -> None:
    shutil.rmtree(folder / "recordings")
    shards = sorted((folder / "codes" / "01234567").glob("0*.arrow"))
    assert len(PreparedDataset.open(folder).utterances) == 3
    shards[0].unlink()
    with pytest.raises(DataError, match=r"holds no codes of a") as caught:
        PreparedDataset.open(folder)
    assert f"myna prepare SOURCE --out {folder}" in caught.value.hint


def test_a_shard_cut_short_is_named_before_anything_is_learned(folder: Path) -> None:
    [shard] = (folder / "codes" / "01234567").glob("0*.arrow")
    whole = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(whole[:-100])
    with pytest.raises(DataError, match=str(shard)) as caught:
        PreparedDataset.open(folder)
    assert f"rm {shard}" in caught.value.hint


def test_a_sound_recorded_again_is_another_after_the_next_preparation(folder: Path) -> None:
    before = PreparedDataset.open(folder)
    (folder / "recordings" / "b.wav").unlink()
    again = [said(folder, "a"), said(folder, "b", seconds=2, sound="new"), clips(folder)[2]]
    encode_dataset(again, FakeCodec(), folder)
    after = PreparedDataset.open(folder)
    assert after.key(again[1]) != before.key(again[1]) and after.key(again[0]) == before.key(again[0])
    assert np.array_equal(after.codes(again[1]), codes_of(again[1]))
    assert after.table.fingerprint != before.table.fingerprint


def test_half_a_character_is_named(folder: Path) -> None:
    lines = (folder / "manifest.jsonl").read_text().replace("text of b", "\\ud800 b")
    (folder / "manifest.jsonl").write_text(lines)
    with pytest.raises(DataError, match="'b' holds half a character"):
        PreparedDataset.open(folder)


def table_of(folder: Path) -> Path:
    return folder / "codes" / "01234567" / TABLE_FILE


# Another codec


def test_codes_of_another_codec_are_not_taken_for_these(folder: Path) -> None:
    other = FakeCodec("fedcba9876543210")
    DatasetInfo.from_codec(other).write(folder)
    with pytest.raises(DataError, match="holds no codes of the codec fedcba98") as caught:
        PreparedDataset.open(folder)
    assert f"myna prepare SOURCE --out {folder}" in caught.value.hint
    encode_dataset(clips(folder), other, folder)
    assert len(PreparedDataset.open(folder).utterances) == 3


def test_a_preparation_that_was_not_finished_is_not_taken_for_one(folder: Path) -> None:
    (folder / "codes" / "01234567" / "index.arrow").unlink()
    with pytest.raises(DataError, match="was not encoded to the end"):
        PreparedDataset.open(folder)
