"""Layouts of plain files: a folder of pairs, LJSpeech, tables and metadata.json."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from myna.audio.files import read_audio, write_audio
from myna.core.errors import DataError
from myna.data.importers import import_source
from myna.data.manifest import Span, Utterance
from tests.data.sources import write_json


def test_folder_names_speakers_after_subfolders(tmp_path: Path, clips: list[Path]) -> None:
    data = tmp_path / "studio"
    for place in ("a", "marta/b", "deep/er/c", ".hidden/d", "marta/._b"):
        (data / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(clips[0], data / f"{place}.wav")
        (data / f"{place}.lab").write_bytes("\ufeff  xin   chào\n".encode())
    (data / "README.txt").write_text("about these recordings")
    result = import_source(str(data), media=tmp_path, language="vi")
    assert result.rejected == []
    speakers = {(each.id, each.speaker, each.text, each.language) for each in result.utterances}
    assert speakers == {
        ("a", "studio", "xin chào", "vi"),
        ("marta/b", "marta", "xin chào", "vi"),
        ("deep/er/c", "er", "xin chào", "vi"),
    }
    named = import_source(str(data), media=tmp_path, speaker="lan")
    assert {each.id: each.speaker for each in named.utterances}["a"] == "lan"


def test_folder_names_what_stands_alone(tmp_path: Path, clips: list[Path]) -> None:
    for name in ("good", "no-text", "latin"):
        shutil.copy(clips[0], tmp_path / f"{name}.wav")
    (tmp_path / "good.txt").write_text("hello")
    (tmp_path / "no-audio.txt").write_text("hello")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    result = import_source(str(tmp_path), media=tmp_path)
    assert [each.id for each in result.utterances] == ["good"]
    reasons = {Path(item.source).name: item.reason for item in result.rejected}
    assert reasons == {"no-text.wav": "missing file", "latin.wav": "not UTF-8", "no-audio.txt": "missing file"}


def test_lists_of_published_corpora(tmp_path: Path, clips: list[Path]) -> None:
    corpora = {
        "arctic": (
            "etc/txt.done.data",
            '( a1 "Author of the trail." )',
            "wav/a1.wav",
            "Author of the trail.",
            "arctic",
        ),
        "vais": ("txt/text", "1|xăng , năm phần trăm", "wav/1.wav", "xăng, năm phần trăm", "vais"),
        "libri": ("84/121/84-121.trans.txt", "84-121-0 GO ON", "84/121/84-121-0.wav", "Go on.", "84"),
        "vivos": ("prompts.txt", "S1_R1 TRỞ NÊN", "waves/S1/S1_R1.wav", "Trở nên.", "S1"),
        "asc": (
            *("orthographic-transcript.txt", '"ARA NORM  0002.wav" "ra>aY - h`*A |l^umA"', "wav/ARA NORM  0002.wav"),
            *("رَأَى، هٰذا آلثُما", "asc"),
        ),
    }
    for name, (index, line, audio, text, speaker) in corpora.items():
        for file in (index, audio):
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / index).write_text(f"{line}\n", encoding="utf-8")
        shutil.copy(clips[0], tmp_path / name / audio)
        for source in (tmp_path / name, tmp_path / name / index):
            result = import_source(str(source), media=tmp_path)
            assert (result.format, result.rejected) == ("transcripts", []), source
            (found,) = result.utterances
            assert (found.text, found.speaker, found.audio) == (text, speaker, tmp_path / name / audio), source
            assert found.extras.get("original_text", found.text) in line
            assert found.language == ("ar" if name == "asc" else "")


def test_a_list_leaves_recordings_of_another_list_below_it(tmp_path: Path, clips: list[Path]) -> None:
    for folder, ids in ((tmp_path, "ab"), (tmp_path / "test set", "bc")):
        (folder / "wav").mkdir(parents=True)
        lines = "".join(f'"{id}.wav" "kitAb"\n' for id in ids)
        (folder / "orthographic-transcript.txt").write_text(lines)
    for file in ("wav/a.wav", "test set/wav/b.wav", "test set/wav/c.wav"):
        shutil.copy(clips[0], tmp_path / file)
    result = import_source(str(tmp_path), media=tmp_path)
    assert [each.id for each in result.utterances] == ["a"]
    assert [(each.id, each.reason) for each in result.rejected] == [("b", "missing file")]


def test_samples_of_a_damaged_shard_before_the_damage_are_read(tmp_path: Path, clips: list[Path]) -> None:
    shard = tmp_path / "000000.tar"
    with tarfile.open(shard, "w") as made:
        for name, data in (("a.wav", clips[0].read_bytes()), ("a.txt", b"one"), ("b.txt", b"\xff"), ("c.json", b"[1]")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            made.addfile(member, io.BytesIO(data))
        end = made.offset
    shard.write_bytes(shard.read_bytes()[:end] + b"damage" * 200)
    result = import_source(str(shard), media=tmp_path / "media")
    assert [(each.id, each.text) for each in result.utterances] == [("a", "one")]
    assert {each.id: each.reason for each in result.rejected} == {"b": "not UTF-8", "c": "malformed", None: "malformed"}


def test_ljspeech_bad_lines(tmp_path: Path, clips: list[Path]) -> None:
    (tmp_path / "wavs").mkdir()
    for name in ("a.wav", ".wav"):
        shutil.copy(clips[0], tmp_path / "wavs" / name)
    text = b'a|He said "5"|He said "five"\nb|gone\nno bars\na|1|2|3\nc|caf\xe9\n|nameless\n'
    (tmp_path / "metadata.csv").write_bytes(text)
    result = import_source(str(tmp_path), media=tmp_path)
    assert result.format == "ljspeech"
    assert result.utterances == [
        Utterance(
            "a", tmp_path / "wavs" / "a.wav", 'He said "five"', tmp_path.name, extras={"original_text": 'He said "5"'}
        )
    ]
    assert [(item.line, item.reason) for item in result.rejected] == [
        (2, "missing file"),
        (3, "malformed"),
        (4, "malformed"),
        (5, "not UTF-8"),
        (6, "malformed"),
    ]


def test_table_in_the_manner_of_common_voice(tmp_path: Path, clips: list[Path]) -> None:
    (tmp_path / "clips").mkdir()
    shutil.copy(clips[0], tmp_path / "clips" / "a.wav")
    rows = [
        "client_id\tpath\tsentence\tlocale",
        '5f\ta.wav\t"Now," he said\tcy',
        "5f\ta.wav",
        "5f\tgone.wav\thello\tcy",
    ]
    (tmp_path / "train.tsv").write_bytes("\n".join(rows).encode() + b"\n5f\ta.wav\tcaf\xe9\tcy\n\n")
    result = import_source(str(tmp_path / "train.tsv"), media=tmp_path)
    assert result.utterances == [Utterance("a", tmp_path / "clips" / "a.wav", '"Now," he said', "5f", "cy")]
    assert [(item.line, item.reason) for item in result.rejected] == [
        (3, "malformed"),
        (4, "missing file"),
        (5, "not UTF-8"),
    ]


def test_a_release_of_common_voice_is_read_as_it_comes(tmp_path: Path, clips: list[Path]) -> None:
    """Two of its tables, with the columns of release 17 and recordings as MP3."""
    (tmp_path / "vi" / "clips").mkdir(parents=True)
    samples = read_audio(clips[0], sample_rate=32_000)
    write_audio(tmp_path / "vi" / "clips" / "common_voice_vi_1.mp3", samples, 32_000)
    header = "client_id path sentence_id sentence sentence_domain up_votes down_votes age gender accents variant locale"
    row = ["5f0c", "common_voice_vi_1.mp3", "9a", "Xin chào.", "", "2", "0", "twenties", "", "", "", "vi", ""]
    for name in ("train.tsv", "test.tsv"):
        lines = ["\t".join([*header.split(), "segment"]), "\t".join(row)]
        (tmp_path / "vi" / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    [found] = import_source(str(tmp_path / "vi" / "train.tsv"), media=tmp_path).utterances
    assert (found.id, found.text, found.speaker, found.language) == ("common_voice_vi_1", "Xin chào.", "5f0c", "vi")
    assert found.extras["age"] == "twenties" and "segment" not in found.extras
    with pytest.raises(DataError, match=r"what lies in it is: test\.tsv, train\.tsv"):
        import_source(str(tmp_path / "vi"), media=tmp_path)


def test_a_release_of_fleurs_is_read_as_it_comes(tmp_path: Path, clips: list[Path]) -> None:
    """Its tables have no header, and one number for all recordings of a sentence."""
    (tmp_path / "vi_vn" / "audio" / "dev").mkdir(parents=True)
    rows = []
    for clip in clips[:2]:
        shutil.copy(clip, tmp_path / "vi_vn" / "audio" / "dev" / f"10{clip.stem}.wav")
        words = ["Xin chào, Lan!", "xin chào lan", "x i n | c h à o | l a n |"]
        rows.append("\t".join(["1509", f"10{clip.stem}.wav", *words, "2000", "FEMALE"]))
    (tmp_path / "vi_vn" / "dev.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    result = import_source(str(tmp_path / "vi_vn" / "dev.tsv"), media=tmp_path, language="vi")
    assert [(one.id, one.text, one.language) for one in result.utterances] == [
        ("100", "Xin chào, Lan!", "vi"),
        ("101", "Xin chào, Lan!", "vi"),
    ]
    assert result.rejected == [] and result.utterances[0].extras["gender"] == "FEMALE"


def test_recordings_of_one_sentence_of_fleurs_on_the_hub_are_no_duplicates(tmp_path: Path, clips: list[Path]) -> None:
    rows = [
        {
            **{"id": 1509, "num_samples": 2000, "path": f"/cache/{clip.name}"},
            **{"audio": {"bytes": clip.read_bytes(), "path": f"dev/{clip.name}"}, "transcription": "xin chào lan"},
            **{"raw_transcription": "Xin chào, Lan!", "gender": 1, "language": "Vietnamese"},
        }
        for clip in clips[:2]
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "dev.parquet")
    result = import_source(str(tmp_path / "dev.parquet"), media=tmp_path / "media")
    assert [(one.id, one.text) for one in result.utterances] == [
        ("dev/0", "Xin chào, Lan!"),
        ("dev/1", "Xin chào, Lan!"),
    ]
    assert result.rejected == []


def test_table_spans_by_offset_and_duration(tmp_path: Path, clips: list[Path]) -> None:
    rows = [
        "file_name;transcript;offset;duration;mood",
        f"{clips[0]};one;0.0625;0.125;calm",
        f"{clips[0]};two;x;1;calm",
    ]
    (tmp_path / "metadata.csv").write_text("\n".join([*rows, f"{clips[0]};three;;0.25;calm", ";four;;;"]))
    result = import_source(str(tmp_path), media=tmp_path, speaker="marta")
    assert [(each.id, each.span, each.extras) for each in result.utterances] == [
        ("0@0.0625", Span(0.0625, 0.1875), {"mood": "calm"}),
        ("0", None, {"duration": "0.25", "mood": "calm"}),
    ]
    assert [(item.line, item.reason) for item in result.rejected] == [(3, "bad span"), (5, "missing file")]
    assert {each.speaker for each in result.utterances} == {"marta"}


def test_columns_that_mean_something_to_us_are_kept_aside_unless_they_fit(tmp_path: Path, clips: list[Path]) -> None:
    rows = ["audio,text,scene,task,references", f"{clips[0]},hello,a quiet room,reading,b"]
    (tmp_path / "data.csv").write_text("\n".join(rows))
    (utterance,) = import_source(str(tmp_path), media=tmp_path).utterances
    assert utterance.extras == {"scene": "a quiet room", "source_task": "reading", "source_references": "b"}


def voices(folder: Path, clips: list[Path]) -> list[dict[str, Any]]:
    for number in range(5):
        shutil.copy(clips[number], folder / f"{number}.wav")
        (folder / f"{number}.txt").write_text(f"text {number}")
    return [
        {
            "id": f"sample{number}",
            "audio_file": f"{number}.wav",
            "transcript_file": f"{number}.txt",
            "duration": 0.25,
            "speaker_id": "huo",
            "speaker_name": "Huo",
            "scene": "quiet_room",
            "emotion": "neutral",
            "language": "vi",
            "gender": "unknown",
            "quality_score": 1.0,
        }
        for number in range(2)
    ]


def test_metadata_json_with_one_shared_voice(tmp_path: Path, clips: list[Path]) -> None:
    samples = voices(tmp_path, clips)
    for sample in samples:
        sample |= {"ref_audio_file": "2.wav", "ref_transcript": "text 2", "task_type": "zero_shot_voice_cloning"}
    write_json(tmp_path / "metadata.json", {"dataset_info": {}, "samples": samples})
    result = import_source(str(tmp_path), media=tmp_path)
    voice, first, second = result.utterances
    assert voice == Utterance(
        "sample0/ref0", tmp_path / "2.wav", "text 2", "huo", "vi", extras={"reference_only": True}
    )
    assert first.references == second.references == ("sample0/ref0",)
    kept = {"duration": 0.25, "speaker_name": "Huo", "scene": "quiet_room", "emotion": "neutral", "gender": "unknown"}
    kept |= {"quality_score": 1.0, "task": "zero_shot_voice_cloning", "references": ["sample0/ref0"]}
    assert first == Utterance("sample0", tmp_path / "0.wav", "text 0", "huo", "vi", extras=kept)


def test_metadata_json_with_several_voices_in_the_order_of_their_tags(tmp_path: Path, clips: list[Path]) -> None:
    sample = voices(tmp_path, clips)[0] | {"task_type": "multi_speaker_voice_cloning"}
    (tmp_path / "0.txt").write_text("[SPEAKER1] no [SPEAKER0] yes [SPEAKER2] hm")
    sample["ref_speakers"] = [
        {
            "speaker_tag": f"[SPEAKER{tag}]",
            "speaker_id": f"s{tag}",
            "ref_audio_file": f"{clip}.wav",
            "ref_transcript": "hi",
        }
        for tag, clip in ((2, 2), (0, 3), (1, 4))
    ]
    write_json(tmp_path / "metadata.json", {"samples": [sample]})
    result = import_source(str(tmp_path / "metadata.json"), media=tmp_path)
    by_id = {each.id: each for each in result.utterances}
    references = [by_id[id] for id in by_id["sample0"].references or ()]
    assert [(each.speaker, each.audio.name) for each in references] == [
        ("s0", "3.wav"),
        ("s1", "4.wav"),
        ("s2", "2.wav"),
    ]
    assert by_id["sample0"].extras["speaker_tags"] == ["[SPEAKER0]", "[SPEAKER1]", "[SPEAKER2]"]


def test_metadata_json_tasks_and_flaws(tmp_path: Path, clips: list[Path]) -> None:
    one, two = voices(tmp_path, clips)
    cloned = {"ref_audio_file": "0.wav", "ref_transcript": "text 0", "task_type": "zero_shot_voice_cloning"}
    samples = [
        one | cloned,
        two | cloned | {"id": "smart", "task_type": "single_speaker_smart_voice"},
        two | {"id": "other"},
        two | {"id": "unknown", "task_type": "audio_generation"},
        two | {"id": "gone", "transcript_file": "gone.txt"},
        two | {"id": "voiceless"} | cloned | {"ref_audio_file": "gone.wav"},
        {"id": "empty"},
        "text",
    ]
    write_json(tmp_path / "metadata.json", {"dataset_info": {}, "samples": samples})
    result = import_source(str(tmp_path), media=tmp_path)
    smart, other = result.utterances
    assert smart.references == () and smart.extras["task"] == "single_speaker_smart_voice"
    assert other.references is None and "task" not in other.extras
    assert [(item.line, item.id, item.reason) for item in result.rejected] == [
        (1, "sample0", "reference equals target"),
        (4, "unknown", "malformed"),
        (5, "gone", "missing file"),
        (6, "voiceless/ref0", "missing file"),
        (6, "voiceless", "missing reference"),
        (7, "empty", "malformed"),
        (8, None, "malformed"),
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"{", "malformed"), (b'{"samples": 3}', "malformed"), (b'{"samples": ["\xff"]}', "not UTF-8")],
)
def test_metadata_json_that_is_none(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "metadata.json").write_bytes(content)
    result = import_source(str(tmp_path), media=tmp_path, format="metadata_json")
    assert [item.reason for item in result.rejected] == [reason]
