"""Common parts of all importers: detection, validation with reasons, and files left on disk."""

from __future__ import annotations

import json
import shutil
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

import myna
from myna.audio.files import AudioInfo, check_audio
from myna.core.errors import DataError
from myna.data.importers import FORMATS, ImportResult, detect_format, import_source, write_import
from myna.data.importers.records import RejectionReason
from myna.data.manifest import Span, Utterance, read_manifest
from tests.data import sources
from tests.data.sources import write_json, write_lines


def line(audio: Path | str, **changes: Any) -> dict[str, Any]:
    return {"id": "a", "audio": str(audio), "text": "hello", "speaker": "marta"} | changes


def manifest(folder: Path, *lines: dict[str, Any]) -> ImportResult:
    return import_source(
        str(write_lines(folder / "manifest.jsonl", list(lines))), media=folder / "media", format="myna"
    )


def float_wav(path: Path, values: list[float]) -> Path:
    soundfile.write(path, np.array(values, np.float32), 8_000, subtype="FLOAT")
    return path


# -- reasons -----------------------------------------------------------------------------------------------------------


def provoke(reason: RejectionReason, folder: Path, clips: list[Path]) -> ImportResult:
    """Write a manifest whose second line has the given fault."""
    good = line(clips[0], id="good")
    voiced = line(clips[1], extras={"references": ["voice"]})
    voice = line(clips[2], id="voice", extras={"reference_only": True})
    (folder / "garbage.wav").write_bytes(b"garbage" * 20)
    cut = float_wav(folder / "cut.wav", [0.5, -0.5] * 4_000)
    cut.write_bytes(cut.read_bytes()[:8_000])
    bad: dict[RejectionReason, list[dict[str, Any]]] = {
        "missing file": [line("gone.wav")],
        "unreadable audio": [line("garbage.wav")],
        "empty text": [line(clips[1], text=" \t ")],
        "control token": [line(clips[1], extras={"scene": "a room <|eot_id|>"})],
        "implausible pace": [line(clips[1], text="as fast as light " * 100)],
        "silence": [line(float_wav(folder / "silent.wav", [0.0] * 800))],
        "cut short": [line(cut)],
        "zero length": [line(float_wav(folder / "nothing.wav", []))],
        "NaN samples": [line(float_wav(folder / "nan.wav", [0.0, float("nan")]))],
        "duplicate id": [line(clips[1], id="good")],
        "bad span": [line(clips[1], span={"start": 0.1, "end": 0.4})],
        "malformed": [line(clips[1], speaker=7)],
        "reference equals target": [line(clips[1], extras={"references": ["voice"]}), voice | {"audio": str(clips[1])}],
        "missing reference": [voiced, voice | {"id": "another", "text": ""}],
        "not UTF-8": [line(clips[1], text="half a pair \ud83d")],
    }
    if reason == "not UTF-8":
        path = folder / "manifest.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in (good, *bad[reason])))
        return import_source(str(path), media=folder / "media")
    if reason == "bad score":
        fair = {"accuracy": 8, "fluency": 8, "prosodic": 8, "total": 8}
        assessed = [good | {"scores": fair}, line(clips[1]) | {"scores": fair | {"total": 11}}]
        return import_source(str(write_lines(folder / "manifest.jsonl", assessed)), media=folder / "media")
    if reason == "wrong duration":
        (folder / "text.txt").write_text("hello")
        fields = {"transcript_file": "text.txt", "speaker_id": "anna"}
        said: list[dict[str, Any]] = [
            {"id": str(number), "audio_file": str(clips[number])} | fields for number in (0, 1)
        ]
        said[1]["duration"] = 25
        return import_source(str(write_json(folder / "metadata.json", {"samples": said})), media=folder / "media")
    if reason == "placeholder without clip":
        pairs = [[{"role": "assistant", "content": text}] for text in ("hello <audio>", "hello <audio><audio>")]
        samples = [
            {"id": str(number), "messages": pair, "audios": [str(clips[number])]} for number, pair in enumerate(pairs)
        ]
        return import_source(str(write_lines(folder / "swift.jsonl", samples)), media=folder / "media")
    return manifest(folder, good, *bad[reason])


@pytest.mark.parametrize("reason", typing.get_args(RejectionReason))
def test_each_reason(tmp_path: Path, clips: list[Path], reason: RejectionReason) -> None:
    result = provoke(reason, tmp_path, clips)
    assert len(result.utterances) == 1
    assert result.counts == {reason: 1}
    (rejected,) = result.rejected
    assert rejected.line == 2
    assert Path(rejected.source).name in ("manifest.jsonl", "swift.jsonl", "metadata.json")
    assert rejected.id in ("a", "good", "1")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"id": "a", "text": "caf\xe9"}', "not UTF-8"),
        (b"{broken", "malformed"),
        (b"[1, 2]", "malformed"),
        (b'{"id": "a", "audio": "a.wav", "text": "x", "speaker": "s", "span": {"start": 1, "end": 0}}', "bad span"),
    ],
)
def test_a_bad_line_costs_one_line(tmp_path: Path, clips: list[Path], bad: bytes, reason: str) -> None:
    good = [json.dumps(line(clips[number], id=str(number))).encode() for number in range(2)]
    (tmp_path / "manifest.jsonl").write_bytes(b"\n".join([b"\xef\xbb\xbf" + good[0], bad, b"", good[1] + b"\r"]))
    result = import_source(str(tmp_path), media=tmp_path)
    assert [utterance.id for utterance in result.utterances] == ["0", "1"]
    assert [(item.line, item.reason) for item in result.rejected] == [(2, reason)]


def test_a_recording_with_many_spans_is_decoded_once(
    tmp_path: Path, clips: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []

    def check_once(path: Path) -> AudioInfo:
        opened.append(path)
        return check_audio(path)

    monkeypatch.setattr("myna.data.importers.validation.check_audio", check_once)
    spans = [{"start": start / 10, "end": start / 10 + 0.05} for start in range(3)]
    result = manifest(tmp_path, *[line(clips[0], id=str(n), span=span) for n, span in enumerate(spans)])
    assert len(result.utterances) == 3 and opened == [clips[0]]


@pytest.mark.parametrize(
    ("span", "kept"),
    [
        ({"start": 0.0, "end": 0.28}, None),  # a length someone rounded up
        ({"start": 0.125, "end": 0.28}, Span(0.125, None)),
        ({"start": 0.0, "end": 0.25}, None),
        ({"start": 0, "end": None}, None),
        ({"start": 0.0, "end": 0.125}, Span(0.0, 0.125)),
    ],
)
def test_a_span_that_reaches_the_end_has_one_spelling(
    tmp_path: Path, clips: list[Path], span: dict[str, Any], kept: Span | None
) -> None:
    assert manifest(tmp_path, line(clips[0], span=span)).utterances[0].span == kept


@pytest.mark.parametrize(
    "span",
    [
        {"start": 0.25, "end": None},
        {"start": 0.0, "end": 0.4},
        {"start": 0.3, "end": 0.31},
        {"start": 0.1, "end": 0.10001},
    ],
)
def test_a_span_outside_is_bad(tmp_path: Path, clips: list[Path], span: dict[str, Any]) -> None:
    assert manifest(tmp_path, line(clips[0], span=span)).counts == {"bad span": 1}


# -- references --------------------------------------------------------------------------------------------------------


def test_a_reference_that_no_target_names_serves_its_speaker(tmp_path: Path, clips: list[Path]) -> None:
    voice = line(clips[0], id="voice", extras={"reference_only": True})
    spoilt = line(clips[1], id="spoilt", text=" ", extras={"references": ["its own"]})
    result = manifest(tmp_path, voice, spoilt, voice | {"id": "its own"}, line(clips[2], id="target"))
    assert [utterance.id for utterance in result.utterances] == ["voice", "target"]


def test_one_voice_taken_alone_keeps_the_references_of_others_that_it_names(tmp_path: Path, clips: list[Path]) -> None:
    voice = line(clips[0], id="voice", speaker="bela")
    lines = [voice, line(clips[1], extras={"references": ["voice"]}), line(clips[2], id="other", speaker="bela")]
    source = write_lines(tmp_path / "manifest.jsonl", lines)
    myna.import_dataset(source, tmp_path / "out", format="myna", only=["marta"])
    kept = {one.id: one for one in read_manifest(tmp_path / "out" / "manifest.jsonl")}
    assert set(kept) == {"a", "voice"} and kept["a"].is_target and not kept["voice"].is_target


def test_the_same_sound_under_another_name_is_no_reference(tmp_path: Path, clips: list[Path]) -> None:
    shutil.copy(clips[0], tmp_path / "copy.wav")
    voice = line("copy.wav", id="voice", extras={"reference_only": True})
    target = line(clips[0], extras={"references": ["voice"]})
    assert manifest(tmp_path, voice, target).counts == {"reference equals target": 1}
    elsewhere = target | {"span": {"start": 0.125, "end": None}}
    assert manifest(tmp_path, voice, elsewhere).counts == {}


def test_a_lost_reference_takes_its_targets_along(tmp_path: Path, clips: list[Path]) -> None:
    chain = [
        line(clips[0], id="third", extras={"references": ["second"]}),
        line(clips[1], id="second", extras={"references": ["first"]}),
        line("gone.wav", id="first"),
        line(clips[2], id="other"),
    ]
    result = manifest(tmp_path, *chain)
    assert [utterance.id for utterance in result.utterances] == ["other"]
    assert [(item.id, item.reason) for item in result.rejected] == [
        ("third", "missing reference"),
        ("second", "missing reference"),
        ("first", "missing file"),
    ]


def test_references_nobody_needs_are_dropped_without_a_word(tmp_path: Path, clips: list[Path]) -> None:
    voice = line(clips[0], id="voice", text="", extras={"reference_only": True})
    assert manifest(tmp_path, voice, line(clips[1])).utterances == manifest(tmp_path, line(clips[1])).utterances
    used = manifest(tmp_path, voice, line(clips[1], extras={"references": ["voice"]}))
    assert [utterance.id for utterance in used.utterances] == ["voice", "a"]
    assert used.rejected == []


# -- detection ---------------------------------------------------------------------------------------------------------


def test_a_name_on_the_hub_is_hf() -> None:
    for name in ("mozilla/common_voice", "google/fleurs/vi_vn:train", "a.b/c-d:train+test"):
        assert detect_format(name) == "hf"


@pytest.mark.parametrize("source", ["nowhere/at/all/here", "gone.jsonl", "data/gone.jsonl"])
def test_what_is_not_there_is_said_so(source: str) -> None:
    with pytest.raises(DataError, match="there is no such file or folder"):
        detect_format(source)


def test_a_misspelt_path_is_told_with_its_neighbour_and_not_with_all_layouts(tmp_path: Path) -> None:
    (tmp_path / "vi data").mkdir()
    for source in ("vi dta", "vi_data:train"):
        with pytest.raises(DataError, match="there is no such file or folder") as caught:
            detect_format(str(tmp_path / source))
        assert caught.value.hint == f"did you mean {tmp_path / 'vi data'}?" and "ljspeech" not in caught.value.what
    with pytest.raises(DataError, match="there is no such file or folder") as caught:
        import_source(str(tmp_path / "vi dta"), media=tmp_path, format="folder")
    assert "did you mean" in caught.value.hint


def test_a_misspelt_path_is_no_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="data/tinny: there is no such file or folder") as caught:
        detect_format("data/tinny")
    assert caught.value.hint == "did you mean data/tiny?"


def test_a_folder_around_a_source_says_what_to_give_instead(tmp_path: Path, clips: list[Path]) -> None:
    for part in ("train", "test"):
        (tmp_path / "speechocean762" / part).mkdir(parents=True)
        (tmp_path / "speechocean762" / part / "wav.scp").write_text("1 WAVE/1.wav\n")
    (tmp_path / "speechocean762" / "resource").mkdir()
    (tmp_path / "speechocean762" / "resource" / "scores.json").write_text("{}")
    with pytest.raises(DataError, match="but what lies in it is: test, train") as caught:
        detect_format(str(tmp_path / "speechocean762"))
    assert caught.value.hint == f"give one of them: {tmp_path / 'speechocean762' / 'test'}"
    (tmp_path / "boson").mkdir()
    shutil.copy(clips[0], tmp_path / "boson" / "a.wav")
    sources.chatml(tmp_path / "boson", [Utterance("a", clips[0], "hello", "lan", "en")])
    with pytest.raises(DataError, match=r"but what lies in it is: train\.json"):
        detect_format(str(tmp_path / "boson"))


def test_an_unknown_layout_lists_what_was_seen_and_what_we_know(tmp_path: Path) -> None:
    (tmp_path / "notes.docx").touch()
    with pytest.raises(DataError, match=r"it holds notes\.docx") as caught:
        detect_format(str(tmp_path))
    assert all(name in str(caught.value) for name in FORMATS) and "--format" in caught.value.hint
    with pytest.raises(DataError, match="it begins with b'PK'"):
        (tmp_path / "notes.docx").write_bytes(b"PK")
        detect_format(str(tmp_path / "notes.docx"))


@pytest.mark.parametrize("source", ["talk.m4a", ""])
def test_recordings_without_texts_are_for_curation(tmp_path: Path, source: str) -> None:
    for name in ("talk.m4a", "more/call.amr", ".DS_Store"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"audio")
    with pytest.raises(DataError, match="holds recordings without texts") as caught:
        detect_format(str(tmp_path / source))
    assert f"myna curate {tmp_path / source}" in caught.value.hint


def test_two_layouts_at_once_are_not_guessed(tmp_path: Path, clips: list[Path]) -> None:
    for number in range(2):
        shutil.copy(clips[number], tmp_path / f"{number}.wav")
        (tmp_path / f"{number}.txt").write_text("hello")
    (tmp_path / "data.csv").write_text("audio,text\n0.wav,hello\n")
    with pytest.raises(DataError, match="any of folder, table"):
        detect_format(str(tmp_path))
    assert len(import_source(str(tmp_path), media=tmp_path, format="folder").utterances) == 2
    assert len(import_source(str(tmp_path), media=tmp_path, format="table").utterances) == 1


def test_a_format_we_do_not_have_and_a_source_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no format `kaldi`") as caught:
        import_source(str(tmp_path), media=tmp_path, format="kaldi")
    assert "ljspeech" in caught.value.hint
    with pytest.raises(DataError, match="there is no"):
        import_source(str(tmp_path / "gone"), media=tmp_path, format="folder")


# -- what is accepted and may be wrong ---------------------------------------------------------------------------------


def test_recordings_of_a_telephone_are_accepted_with_a_note(tmp_path: Path, clips: list[Path]) -> None:
    soundfile.write(tmp_path / "wide.wav", np.sin(np.arange(8_000, dtype=np.float32)), 16_000)
    found = manifest(tmp_path, line(tmp_path / "wide.wav"), line(clips[0], id="b"), line(clips[1], id="c"))
    [note] = found.notes
    assert note.startswith("2 of 3 utterances have fewer than 16000 samples a second (8000 at the least)")
    assert manifest(tmp_path, line(tmp_path / "wide.wav")).notes == ()


def test_durations_of_chatml_that_are_wrong_are_accepted_with_a_note(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.sin(np.arange(48_000, dtype=np.float32)), 16_000)
    durations = {"right": 3.2, "wrong": 5.0, "none": None}
    written = [Utterance(id, tmp_path / "a.wav", "hi", "x", extras={"duration": s}) for id, s in durations.items()]
    found = import_source(str(sources.chatml(tmp_path, written)), media=tmp_path)
    assert len(found.utterances) == 3 and not found.rejected
    [note] = found.notes
    assert note.startswith("1 of 3 utterances have a `duration` more than 1 s off, wrong first")


# -- a folder that holds another source --------------------------------------------------------------------------------


def test_another_source_does_not_replace_a_manifest_without_a_word(tmp_path: Path, clips: list[Path]) -> None:
    for name, numbers in (("first", (0, 1)), ("second", (2,)), ("all", (0, 1, 2))):
        lines = [line(clips[number], id=f"u{number}") for number in numbers]
        write_lines(tmp_path / f"{name}.jsonl", lines)
    out = tmp_path / "out"
    myna.import_dataset(tmp_path / "first.jsonl", out)
    before = (out / "manifest.jsonl").read_bytes()
    with pytest.raises(
        DataError, match=r"out holds 2 utterances of .*first\.jsonl that .*second\.jsonl would replace"
    ) as caught:
        myna.import_dataset(tmp_path / "second.jsonl", out)
    assert "--out" in caught.value.hint and (out / "manifest.jsonl").read_bytes() == before
    myna.import_dataset(tmp_path / "all.jsonl", out)
    write_lines(tmp_path / "all.jsonl", [line(clips[2], id="u2")])
    assert myna.import_dataset(tmp_path / "all.jsonl", out).utterances == 1, "its own source may lose some"
    (out / "manifest.jsonl").unlink()
    assert myna.import_dataset(tmp_path / "first.jsonl", out).utterances == 2


def test_the_count_of_an_import_tells_targets_from_references(tmp_path: Path, clips: list[Path]) -> None:
    voice = line(clips[0], id="voice", extras={"reference_only": True})
    spoken = [line(clip, id=f"u{number}", extras={"references": ["voice"]}) for number, clip in enumerate(clips[1:4])]
    write_lines(tmp_path / "manifest.jsonl", [voice, *spoken])
    told = myna.import_dataset(tmp_path / "manifest.jsonl", tmp_path / "out").notes[0]
    assert told.startswith("4 utterances (3 targets, 1 references) from ")
    assert (
        "("
        not in myna.import_dataset(write_lines(tmp_path / "plain.jsonl", [line(clips[1])]), tmp_path / "o")
        .notes[0]
        .partition(" from ")[0]
    )


def test_descriptions_are_one_line() -> None:
    assert all(importer.read.__doc__ for importer in FORMATS.values())


def test_our_own_manifest_is_not_a_conversation(tmp_path: Path, clips: list[Path]) -> None:
    written = [Utterance("a", clips[0], 'the "messages" he left', "s")]
    assert detect_format(str(sources.myna(tmp_path, written))) == "myna"


# -- what is left on disk ----------------------------------------------------------------------------------------------


def some(folder: Path, clips: list[Path], *, bad: int) -> ImportResult:
    good = [line(clips[number], id=f"good{number}") for number in range(4)]
    gone = [line(f"đã mất {number}.wav", id=f"bad{number}") for number in range(bad)]
    return manifest(folder, *good, *gone)


def test_a_clean_import_leaves_both_files(tmp_path: Path, clips: list[Path]) -> None:
    result = some(tmp_path, clips, bad=0)
    write_import(result, tmp_path / "out")
    assert read_manifest(tmp_path / "out" / "manifest.jsonl") == result.utterances
    assert (tmp_path / "out" / "rejected.jsonl").read_text() == ""


def test_a_few_bad_items_pass_up_to_the_share_allowed(tmp_path: Path, clips: list[Path]) -> None:
    result = some(tmp_path, clips, bad=1)
    assert len(result.rejected) == 0.2 * (len(result.utterances) + len(result.rejected))
    write_import(result, tmp_path / "out", max_bad=0.2)
    assert len(read_manifest(tmp_path / "out" / "manifest.jsonl")) == 4
    (rejected,) = [json.loads(each) for each in (tmp_path / "out" / "rejected.jsonl").read_text("utf-8").splitlines()]
    expected = {"source": str(tmp_path / "manifest.jsonl"), "line": 5, "id": "bad0", "reason": "missing file"}
    assert rejected.items() >= expected.items()
    assert "đã mất" in (tmp_path / "out" / "rejected.jsonl").read_text("utf-8")


def test_above_the_share_nothing_old_is_lost(tmp_path: Path, clips: list[Path]) -> None:
    write_import(some(tmp_path, clips, bad=0), tmp_path / "out")
    with pytest.raises(DataError) as caught:
        write_import(some(tmp_path, clips, bad=8), tmp_path / "out", max_bad=0.5)
    assert "8 of 12 items cannot be used (66.7%, `max_bad` is 50.0%): 8 missing file" in caught.value.what
    assert "manifest.jsonl:5 (bad0) missing file" in caught.value.what and "and 3 more" in caught.value.what
    assert "rejected.jsonl" in caught.value.hint and "--max-bad 0.67" in caught.value.hint
    assert len(read_manifest(tmp_path / "out" / "manifest.jsonl")) == 4
    assert len((tmp_path / "out" / "rejected.jsonl").read_text().splitlines()) == 8


def test_nothing_at_all_is_an_error_whatever_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not one utterance"):
        write_import(ImportResult([], [], "myna"), tmp_path / "out", max_bad=1)
    with pytest.raises(DataError, match="1 missing file"):
        write_import(manifest(tmp_path, line("gone.wav")), tmp_path / "out", max_bad=1)
    assert not (tmp_path / "out" / "manifest.jsonl").exists()


def test_a_rejected_text_that_is_no_text_is_still_written(tmp_path: Path, clips: list[Path]) -> None:
    (tmp_path / "m.jsonl").write_text(json.dumps(line(clips[0], id="\ud83d")))
    result = import_source(str(tmp_path / "m.jsonl"), media=tmp_path)
    with pytest.raises(DataError, match="1 not UTF-8"):
        write_import(result, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "rejected.jsonl").read_text())["id"] == "\ud83d"


def test_progress_counts_to_the_end(tmp_path: Path, clips: list[Path]) -> None:
    calls: list[tuple[str, int, int | None]] = []
    write_lines(tmp_path / "m.jsonl", [line(clips[0], id=str(number)) for number in range(3)] + [line("gone.wav")])
    import_source(str(tmp_path / "m.jsonl"), media=tmp_path, progress=lambda *call: calls.append(call))
    assert calls == [("importing", done, 4) for done in (1, 2, 3, 4)]


def test_a_prepared_folder_is_read_by_its_manifest(tmp_path: Path) -> None:
    """A prepared folder holds Arrow files, like a dataset of Hugging Face, and must not be taken for one."""
    line = {"id": "a", "audio": "a.wav", "text": "a", "speaker": "", "language": ""}
    (tmp_path / "manifest.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "codes").mkdir()
    (tmp_path / "codes" / "00000.arrow").write_bytes(b"")
    assert detect_format(str(tmp_path)) == "myna"
