"""Splits: nothing held out is trained on, by speaker, text or audio, also when the dataset grows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myna.core.errors import DataError
from myna.data.dataset import PreparedDataset
from myna.data.manifest import Span, Utterance
from myna.data.split import (
    SPEAKERS,
    SUBSETS,
    TEXTS,
    TRAIN,
    ComparedClip,
    DatasetSplit,
    assign_subsets,
    check_leaks,
    find_overlap,
    lost_references,
    split_folder,
    subset_members,
)
from myna.text.normalization import alphanumeric
from tests.data.corpora import prepared, said

names = st.sampled_from(["anna", "bela", "clara", "dora", "emil", ""])
words = st.sampled_from(["Good day.", "good day", "Yes!", "No.", "What now?", "So be it.", "Why?", "Who?", ""])
spans = st.one_of(st.none(), st.tuples(st.integers(0, 9), st.integers(1, 3)).map(lambda s: Span(s[0], s[0] + s[1])))


@st.composite
def corpora(draw: st.DrawFn) -> list[Utterance]:
    rows = draw(st.lists(st.tuples(names, words, st.integers(0, 4), st.integers(0, 1), spans), min_size=1, max_size=25))
    return [
        Utterance(f"u{number}", Path(f"{sound}.{copy}"), text, speaker, span=span)
        for number, (speaker, text, sound, copy, span) in enumerate(rows)
    ]


def split_dataset(folder: Path, *, speakers: int, texts: int) -> DatasetSplit:
    split_folder(folder, speakers=speakers, texts=texts)
    made = DatasetSplit.read(folder)
    assert made is not None
    return made


def key(utterance: Utterance) -> str:
    """Key by file stem: files that differ only in their suffix are copies."""
    return f"{utterance.audio.stem}/{utterance.span}"


@given(corpora(), st.integers(0, 3), st.integers(0, 3), st.integers(0, 5))
def test_no_choice_leaks(utterances: list[Utterance], speakers: int, texts: int, seed: int) -> None:
    try:
        made = assign_subsets(utterances, key, speakers=speakers, texts=texts, seed=seed)
    except DataError:
        return  # too few to hold so many out
    check_leaks(made, utterances, key)
    for one in utterances:
        for other in utterances:
            if one.audio == other.audio and made.subset_of[one.id] != made.subset_of[other.id]:
                a, b = one.span or Span(0, None), other.span or Span(0, None)
                assert (a.end or 99) <= b.start or (b.end or 99) <= a.start, "parts of one recording that overlap"
    backwards = assign_subsets(utterances[::-1], key, speakers=speakers, texts=texts, seed=seed)
    assert backwards.subset_of == made.subset_of, "the order of the source does not matter"
    grown = [*utterances, Utterance("new", Path("new.wav"), "Something else.", "zoe")]
    later = assign_subsets(grown, key, speakers=speakers, texts=texts, seed=seed, previous=made)
    assert later.subset_of == {**made.subset_of, "new": TRAIN}


def test_spans_that_share_a_second_stay_together() -> None:
    """Three spans, the first of which reaches over the second into the third."""
    spans = {"a": Span(0, 9), "b": Span(2, 3), "c": Span(8, 12), "d": Span(12, 20)}
    clips = [Utterance(id, Path("tape.wav"), f"words of {id}", "anna", span=span) for id, span in spans.items()]
    parts = [assign_subsets(clips, key, speakers=0, texts=1, seed=seed).subset_of for seed in range(8)]
    assert all(part["a"] == part["b"] == part["c"] != part["d"] for part in parts)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"speaker": "anna"}, "anna is held out with a, and is learned from as well"),
        ({"audio": Path("a.wav")}, "one sound, in train and in held_out_speakers"),
        ({"speaker": "clara", "text": "GOOD day"}, "the words of c are learned with b"),
    ],
)
def test_a_leak_is_told(changed: dict[str, object], told: str) -> None:
    clean = [
        Utterance("a", Path("a.wav"), "Yes.", "anna"),
        Utterance("b", Path("b.wav"), "No.", "bela"),
        Utterance("c", Path("c.wav"), "Good day!", "bela"),
    ]
    made = DatasetSplit(0, 1, 1, {"a": SPEAKERS, "b": TRAIN, "c": TEXTS})
    check_leaks(made, clean, key)
    leaking = [clean[0], replace(clean[1], **changed), clean[2]]  # type: ignore[arg-type]
    with pytest.raises(DataError, match=told):
        check_leaks(made, leaking, key)
    with pytest.raises(DataError, match="d is in no subset"):
        check_leaks(made, [*clean, replace(clean[0], id="d")], key)


def test_what_was_learned_from_cannot_be_held_out_later() -> None:
    """A later clip with the audio of both a held-out speaker and a trained one makes them one person."""
    clips = [
        Utterance(f"{who}{n}", Path(f"{who}{n}.wav"), f"{who} {n}", who) for who in ("anna", "bela") for n in "123"
    ]
    made = assign_subsets(clips, key, speakers=1, texts=0, seed=0)
    held, learned = made.ids(SPEAKERS)[0], made.ids(TRAIN)[0]
    named = {clip.id: clip for clip in clips}
    twin = replace(named[held], id="twin", speaker=named[learned].speaker)
    with pytest.raises(DataError, match="was learned from and would now be held out"):
        assign_subsets([*clips, twin], key, speakers=1, texts=0, seed=0, previous=made)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    clips = [
        said(tmp_path, f"{speaker}-{number}", speaker, text=f"Line {number} it is.")
        for speaker in ("anna", "bela", "clara", "dora")
        for number in range(5)
    ]
    clips[0] = replace(clips[0], extras={"references": ["anna-1"]})
    prepared(tmp_path, clips)
    return tmp_path


def test_parts_are_prepared_folders_with_the_same_codes(folder: Path) -> None:
    made = split_dataset(folder, speakers=1, texts=2)
    whole, parts = (
        PreparedDataset.open(folder),
        {part: PreparedDataset.open(folder / "subsets" / part) for part in SUBSETS},
    )
    assert {part: len(corpus.utterances) for part, corpus in parts.items()} == {TRAIN: 9, TEXTS: 6, SPEAKERS: 5}
    assert len({utterance.speaker for utterance in parts[SPEAKERS].utterances}) == 1
    learned = {alphanumeric(utterance.text) for utterance in parts[TRAIN].utterances}
    assert not learned & {alphanumeric(utterance.text) for utterance in parts[TEXTS].utterances}
    for part, corpus in parts.items():
        assert [utterance.id for utterance in corpus.utterances if utterance.is_target] == made.ids(part)
        for utterance in corpus.utterances:
            assert utterance.audio.is_file()
            assert (corpus.codes(utterance) == whole.codes(whole.by_id(utterance.id, wanted_by="a test"))).all()
            assert all(corpus.find(id) is not None for id in utterance.references or ())
    shard = next(whole.store.codes_folder.glob("[0-9]*.arrow"))
    assert shard.samefile(parts[TRAIN].store.codes_folder / shard.name), "linked, not copied"


def test_it_is_made_once(folder: Path) -> None:
    made = split_dataset(folder, speakers=1, texts=1)
    stored = json.loads((folder / "split.json").read_text(encoding="utf-8"))
    assert stored["subset_of"] == made.subset_of and DatasetSplit.read(folder) == made
    assert split_dataset(folder, speakers=1, texts=1) == made
    with pytest.raises(DataError, match="was split before, with 1 speakers and 1 texts"):
        split_dataset(folder, speakers=2, texts=1)
    (folder / "split.json").write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        split_dataset(folder, speakers=1, texts=1)


def test_too_much_cannot_be_held_out(folder: Path) -> None:
    with pytest.raises(DataError, match="4 speakers cannot be held out of 4"):
        split_dataset(folder, speakers=4, texts=0)
    with pytest.raises(DataError, match="5 texts cannot be held out of 5"):
        split_dataset(folder, speakers=0, texts=5)
    assert DatasetSplit.read(folder) is None


def voiced(id: str, speaker: str, *references: str, **extras: object) -> Utterance:
    return Utterance(
        id, Path(f"{id}.wav"), f"words of {id}", speaker, extras={"references": list(references), **extras}
    )


def test_a_held_out_target_takes_its_references_along() -> None:
    """A trained clip may be a reference of a held-out target; training gets nothing that is held out."""
    clips = [
        Utterance("voice", Path("voice.wav"), "follow me", "anna", extras={"reference_only": True}),
        voiced("a", "anna", "voice"),
        voiced("b", "anna", "a", "voice"),
        voiced("c", "anna", "b"),
        voiced("d", "anna", "b", "a", task="multi_speaker_voice_cloning"),
    ]
    made = DatasetSplit(0, 0, 1, {"voice": TRAIN, "a": TRAIN, "b": TEXTS, "c": TRAIN, "d": TRAIN})
    held_out = {clip.id: clip for clip in subset_members(made, TEXTS, clips)}
    assert list(held_out) == ["voice", "a", "b"] and held_out["b"] == clips[2]
    assert [clip.id for clip in held_out.values() if clip.is_target] == ["b"] and held_out["a"].references is None
    trained = {clip.id: clip.references for clip in subset_members(made, TRAIN, clips)}
    assert trained == {"voice": None, "a": ("voice",), "c": None, "d": None}
    assert lost_references(made, clips) == ["c", "d"]


def test_the_voices_of_a_target_and_of_its_references_are_held_out_together() -> None:
    clips = [
        *(voiced(f"a{number}", "anna", "bela's") for number in range(3)),
        Utterance("bela's", Path("b.wav"), "follow me", "bela", extras={"reference_only": True}),
        *(voiced(f"c{number}", "clara") for number in range(3)),
    ]
    for seed in range(8):
        made = assign_subsets(clips, key, speakers=1, texts=0, seed=seed)
        assert made.subset_of["bela's"] == made.subset_of["a0"] != made.subset_of["c0"]


def test_what_training_loses_is_told(tmp_path: Path) -> None:
    clips = [said(tmp_path, str(number), text=f"Line {number}.") for number in range(4)]
    clips += [said(tmp_path, f"of {clip.id}", text="The same.", references=[clip.id]) for clip in clips]
    prepared(tmp_path, clips)
    notes = split_folder(tmp_path, texts=1)["train"].notes
    made = DatasetSplit.read(tmp_path)
    assert made is not None
    (held_out,) = made.ids(TEXTS)
    assert notes == (f"1 training targets name a held-out clip as a reference, and do without it: of {held_out}",)


@pytest.mark.parametrize(
    ("trained", "same"),
    [
        ("كَتَبَ الوَلَدُ", "كتب الولد"),
        ("أهلاً وسهلاً", "اهلا وسهلا"),
        ("مرحبـــا", "مرحبا"),
        ("She is twenty-one.", "she is twenty one"),
        ("xin cha\u0300o", "Xin ch\u00e0o!"),
        ("Işık", "ışık"),
    ],
)
def test_spellings_of_one_text_count_as_the_same_words(tmp_path: Path, trained: str, same: str) -> None:
    data = prepared(tmp_path, [said(tmp_path, "a", text=trained), said(tmp_path, "b", text="???")])
    clips = [ComparedClip("x", "anna", same), ComparedClip("y", "anna", "..."), ComparedClip("z", "bela", same)]
    assert find_overlap(data.utterances, clips) == {"x": "words"}
    assert alphanumeric(trained) == alphanumeric(same)


@pytest.mark.parametrize(("one", "other"), [("ดี", "ดู"), ("की", "का"), ("ป่า", "ป้า"), ("কি", "কী")])
def test_vowels_and_tones_that_are_always_written_tell_texts_apart(one: str, other: str) -> None:
    assert alphanumeric(one) != alphanumeric(other)


def test_overlapping_spans_of_one_file_count_as_the_same_audio(tmp_path: Path) -> None:
    def clip(id: str, start: float, end: float | None) -> Utterance:
        return said(tmp_path, id, seconds=12, recording="tape", span=Span(start, end), text=f"words of {id}")

    data = prepared(tmp_path / "train", [clip("a", 0, 9.9), clip("b", 10, 11)])
    near = {"whole": (0, 10), "inside": (3, 4), "end": (10.5, None), "between": (9.9, 10), "after": (11, None)}
    held_out = [clip(id, *span) for id, span in near.items()]
    held_out.append(said(tmp_path, "other", seconds=12, span=Span(0, 10)))
    compared = [ComparedClip(one.id, one.speaker, one.text, f"key of {one.id}", one) for one in held_out]
    assert find_overlap(data.utterances, compared) == dict.fromkeys(("whole", "inside", "end"), "audio")
