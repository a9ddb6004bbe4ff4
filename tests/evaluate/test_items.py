"""Items of an evaluation and their voices, from prepared folders, text files and lists."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from myna.core.config import DataSettings
from myna.core.errors import DataError
from myna.evaluate.items import load_eval_set
from tests.data.corpora import prepared, said


@pytest.fixture
def data(tmp_path: Path) -> Path:
    clips = [said(tmp_path, f"{speaker}-{number}", speaker) for speaker in ("anna", "bela") for number in range(4)]
    clips += [replace(said(tmp_path, "clara-0", "clara"), language="vi")]
    prepared(tmp_path, clips)
    return tmp_path


def settings(data: Path, **changes: object) -> DataSettings:
    return DataSettings(train=data, reference_seconds=(0.5, 10.0), **changes)  # type: ignore[arg-type]


def test_every_target_is_an_item_with_another_clip_of_its_speaker(data: Path) -> None:
    eval_set = load_eval_set(data, None, settings(data), seed=0, language="en")
    assert [item.id for item in eval_set.items][:2] == ["anna-0", "anna-1"] and len(eval_set.items) == 9
    for item in eval_set.items[:-1]:
        assert item.recording is not None and item.text == item.recording.text and item.language == "en"
        assert [clip.speaker for clip in item.references] == [item.speaker] and item.references[0].id != item.id
    assert eval_set.items[-1].references == () and eval_set.items[-1].language == "vi"
    assert any("1 items are spoken without a reference" in note for note in eval_set.notes)
    assert {speaker: len(clips) for speaker, clips in eval_set.speaker_clips.items()} == {
        "anna": 4,
        "bela": 4,
        "clara": 1,
    }
    assert eval_set == load_eval_set(data, None, settings(data), seed=0, language="en")


def test_with_a_limit_speakers_take_turns(data: Path) -> None:
    eval_set = load_eval_set(data, None, settings(data), seed=0, limit=5)
    assert sorted(item.speaker for item in eval_set.items) == ["anna", "anna", "bela", "bela", "clara"]
    assert any("name no language" in note for note in eval_set.notes)
    others = [load_eval_set(data, None, settings(data), seed=seed, limit=5) for seed in range(1, 6)]
    assert any({item.id for item in eval_set.items} != {item.id for item in other.items} for other in others)


def test_sentences_of_a_file_are_given_to_speakers_in_turn(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "lines.txt.gz"
    file.write_bytes(gzip.compress(b"Good morning.\n\n  What a   day! \nYes.\nNo.\n"))
    eval_set = load_eval_set(data, file, settings(data), seed=0, language="en")
    assert [item.text for item in eval_set.items] == ["Good morning.", "What a day!", "Yes.", "No."]
    assert [item.speaker for item in eval_set.items] == ["anna", "bela", "clara", "anna"]
    assert all(item.recording is None and item.references[0].speaker == item.speaker for item in eval_set.items)
    assert eval_set.items[0].references != eval_set.items[3].references, "another clip of the same speaker"
    alone = load_eval_set(None, file, None, seed=0, limit=2)
    assert [item.references for item in alone.items] == [(), ()] and len(alone.notes) == 2
    with pytest.raises(DataError, match="no clip of 20 to 30 s"):
        load_eval_set(data, file, settings(data).model_copy(update={"reference_seconds": (20.0, 30.0)}), seed=0)


def test_a_list_names_its_references(tmp_path: Path) -> None:
    sound = said(tmp_path, "one").audio.relative_to(tmp_path)
    file = tmp_path / "meta.lst"
    file.write_text(f"a|what is said|{sound}|What to say.\nb|what is said|{sound}|And this.|{sound}\n")
    one, two = load_eval_set(None, file, None, seed=0, language="en").items
    assert (one.id, one.text, one.references[0].text, one.recording) == ("a", "What to say.", "what is said", None)
    assert one.references[0].audio == tmp_path / sound and two.recording is not None
    for wrong in ("a|b|c", "a|b|nowhere.wav|text", f"|b|{sound}|text"):
        file.write_text(wrong + "\n")
        with pytest.raises(DataError, match=r"meta\.lst:1"):
            load_eval_set(None, file, None, seed=0)


def test_an_unreadable_file_of_sentences_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        load_eval_set(None, tmp_path / "nothing.txt", None, seed=0)
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(DataError, match="has no lines"):
        load_eval_set(None, tmp_path / "empty.txt", None, seed=0)


def test_many_speakers_have_fewer_comparison_clips_each(tmp_path: Path) -> None:
    clips = [
        said(tmp_path, f"s{who:02d}-{number}", f"s{who:02d}", seconds=0.3) for who in range(30) for number in range(5)
    ]
    prepared(tmp_path, clips)
    few = load_eval_set(
        tmp_path, None, settings(tmp_path).model_copy(update={"reference_seconds": (0.1, 1.0)}), 0, limit=3
    )
    speakers = {item.speaker for item in few.items}
    assert len(speakers) == 3 and speakers <= few.speaker_clips.keys() and len(few.speaker_clips) == 20
    every = load_eval_set(tmp_path, None, settings(tmp_path).model_copy(update={"reference_seconds": (0.1, 1.0)}), 0)
    assert len(every.speaker_clips) == 30 and {len(theirs) for theirs in every.speaker_clips.values()} == {5}
