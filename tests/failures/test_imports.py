"""Samples that `import`, `prepare` and `split` must refuse, keep or read."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import myna
from myna.audio.files import read_audio, write_audio
from myna.core.config import DataSettings
from myna.core.errors import MynaError
from myna.data.dataset import PreparedDataset
from myna.data.importers import FORMATS, ImportResult, import_source
from myna.data.references import ReferenceSampler
from myna.data.split import TEXTS, TRAIN
from tests.audio.media import RATE, write_container
from tests.tone_corpus import SAMPLE_RATE, tone_speech

from .tiny_setup import record

SETTINGS = DataSettings(train=Path(), seconds=(0.04, 30.0), reference_seconds=(0.1, 30.0))


def sample(folder: Path, id: str, text: str, **fields: Any) -> dict[str, Any]:
    """A recording, its transcript, and its sample of a metadata.json."""
    write_audio(folder / f"{id}.wav", tone_speech(text, 200.0 + 10 * len(id)), SAMPLE_RATE)
    (folder / f"{id}.txt").write_text(text, encoding="utf-8")
    return {"id": id, "audio_file": f"{id}.wav", "transcript_file": f"{id}.txt", "speaker_id": "lan"} | fields


def reference(tag: int, name: str, text: str = "hello") -> dict[str, Any]:
    fields = {"speaker_tag": f"[SPEAKER{tag}]", "speaker_id": f"voice {name}", "ref_audio_file": f"{name}.wav"}
    return fields | {"ref_transcript": text}


def imported(folder: Path, *samples: dict[str, Any]) -> ImportResult:
    (folder / "metadata.json").write_text(json.dumps({"samples": samples}), encoding="utf-8")
    return import_source(str(folder), media=folder / "media")


def rejected(result: ImportResult) -> dict[str | None, str]:
    return {item.id: f"{item.reason}: {item.detail}" for item in result.rejected}


def prepare(source: Path, out: Path, workspace: Path, **options: Any) -> myna.DataFolder:
    return myna.prepare(source, out, model=str(workspace / "model"), device="cpu", **options)


@pytest.fixture
def source(workspace: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(workspace / "recordings", tmp_path / "source"))


# Dialogue as a reference


def test_a_dialogue_is_never_a_reference(workspace: Path, tmp_path: Path) -> None:
    both = {"task_type": "multi_speaker_smart_voice"}
    imported(
        tmp_path,
        sample(tmp_path, "alone", "good day to you"),
        sample(tmp_path, "other", "what a fine day"),
        sample(tmp_path, "tagged", "[SPEAKER0] hi there [SPEAKER1] hello to you"),
        sample(tmp_path, "untagged", "hi there hello to you", **both),
    )
    prepare(tmp_path, tmp_path / "prepared", workspace)
    sampler = ReferenceSampler(PreparedDataset.open(tmp_path / "prepared"), SETTINGS, seed=0)
    drawn = {
        target.id: {each.id for epoch in range(30) for each in sampler.references(target, epoch)}
        for target in sampler.targets
    }
    assert drawn == {"alone": {"other"}, "other": {"alone"}, "tagged": set(), "untagged": set()}


# Silent or cut recordings


def test_a_recording_cut_short_and_a_silent_one_are_named(source: Path, tmp_path: Path) -> None:
    robin = source / "robin"
    data = (robin / "who.wav").read_bytes()
    (robin / "who.wav").write_bytes(data[: len(data) // 2])
    write_audio(robin / "hi.wav", np.zeros(SAMPLE_RATE, np.float32), SAMPLE_RATE)
    report = myna.import_dataset(source, tmp_path / "out", max_bad=0.5)
    lines = (tmp_path / "out" / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
    reasons = {line["id"]: (line["reason"], line["detail"]) for line in map(json.loads, lines)}
    assert report.rejected == 2 and reasons.keys() == {"robin/who", "robin/hi"}
    assert reasons["robin/who"][0] == "cut short" and "ends after 0.12 of 0.24 s" in reasons["robin/who"][1]
    assert reasons["robin/hi"][0] == "silence" and "hi.wav" in reasons["robin/hi"][1]


def test_a_silent_part_of_a_recording_is_named(tmp_path: Path) -> None:
    speech = tone_speech("good morning", 200.0)
    write_audio(tmp_path / "tape.wav", np.concatenate([speech, np.zeros_like(speech)]), SAMPLE_RATE)
    half = len(speech) / SAMPLE_RATE
    rows = ["id,audio,text,start,end", f"spoken,tape.wav,good morning,0,{half}", f"silent,tape.wav,hi,{half + 0.02},"]
    (tmp_path / "data.csv").write_text("\n".join(rows))
    result = import_source(str(tmp_path / "data.csv"), media=tmp_path / "media")
    assert [utterance.id for utterance in result.utterances] == ["spoken"]
    assert [(item.id, item.reason) for item in result.rejected] == [("silent", "silence")]


# `split` drops named references


def test_held_out_targets_keep_their_named_references(workspace: Path, tmp_path: Path) -> None:
    voice = {"ref_audio_file": "voice.wav", "ref_transcript": "follow me", "task_type": "zero_shot_voice_cloning"}
    sample(tmp_path, "voice", "follow me")
    lines = ("good day", "what now", "so be it", "who is it", "yes")
    imported(tmp_path, *(sample(tmp_path, f"u{n}", text, **voice) for n, text in enumerate(lines)))
    prepare(tmp_path, tmp_path / "prepared", workspace)
    subsets = myna.split(tmp_path / "prepared", texts=2)
    whole = PreparedDataset.open(tmp_path / "prepared")
    for name, count in ((TEXTS, 2), (TRAIN, 3)):
        subset = PreparedDataset.open(subsets[name].folder)
        sampler = ReferenceSampler(subset, SETTINGS, seed=0)
        assert len(sampler.targets) == count
        for target in sampler.targets:
            (named,) = sampler.references(target, epoch=0)
            assert named.text == "follow me" and not named.is_target
            assert target.references == whole.by_id(target.id, wanted_by="").references == (named.id,)
            assert (subset.codes(named) == whole.codes(named)).all()


# Contradictory samples


def test_samples_that_contradict_themselves_are_named(tmp_path: Path) -> None:
    for name in ("a", "bb"):
        sample(tmp_path, name, "hello")
    dialogue, cloning = "[SPEAKER0] hi [SPEAKER1] hello", {"task_type": "multi_speaker_voice_cloning"}
    one = {"ref_audio_file": "a.wav", "ref_transcript": "hello"}
    result = imported(
        tmp_path,
        sample(tmp_path, "good", "good day", **one, task_type="zero_shot_voice_cloning", duration=0.5),
        sample(tmp_path, "dialogue", dialogue, ref_speakers=[reference(0, "a"), reference(1, "bb")], **cloning),
        sample(tmp_path, "misspelt", "good day", **one, task_type="zero_shot_voice_clonning"),
        sample(tmp_path, "empty", dialogue, ref_speakers=[], **cloning),
        sample(tmp_path, "one-of-two", dialogue, ref_speakers=[reference(0, "a")], **cloning),
        sample(tmp_path, "same-clip", dialogue, ref_speakers=[reference(0, "a"), reference(1, "a")], **cloning),
        sample(tmp_path, "same-tag", dialogue, ref_speakers=[reference(0, "a"), reference(0, "bb")], **cloning),
        sample(tmp_path, "other-tag", dialogue, ref_speakers=[reference(0, "a"), reference(7, "bb")], **cloning),
        sample(tmp_path, "one-voice", dialogue, **one),
        sample(tmp_path, "textless", "good day", ref_audio_file="a.wav", ref_transcript=" "),
        sample(tmp_path, "tagged-textless", dialogue, ref_speakers=[reference(0, "a"), reference(1, "bb", "")]),
        sample(tmp_path, "longer", "good day", duration=12.5),
        sample(tmp_path, "no-number", "good day", duration="long"),
    )
    assert {utterance.id for utterance in result.utterances if utterance.is_target} == {"good", "dialogue"}
    reasons = rejected(result)
    assert list(reasons) == [
        "misspelt", "empty", "one-of-two", "same-clip", "same-tag", "other-tag", "one-voice",
        "textless", "tagged-textless", "longer", "no-number",
    ]  # fmt: skip
    assert "zero_shot_voice_clonning" in reasons["misspelt"] and "zero_shot_voice_cloning" in reasons["misspelt"]
    assert "ref_speakers" in reasons["empty"] and reasons["empty"].startswith("missing reference")
    assert "[SPEAKER1]" in reasons["one-of-two"] and "[SPEAKER1]" in reasons["one-voice"]
    assert "a.wav" in reasons["same-clip"] and "[SPEAKER0]" in reasons["same-tag"]
    assert "[SPEAKER7]" in reasons["other-tag"]
    assert reasons["textless"].startswith("empty text") and reasons["tagged-textless"].startswith("empty text")
    assert reasons["longer"].startswith("wrong duration") and "12.5" in reasons["longer"]
    assert reasons["no-number"].startswith("malformed")


# Places that cannot be written to


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file may grow beyond `room` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_the_output_folder_is_checked_before_anything_is_decoded(
    source: Path, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("myna.data.importers.validate_utterances", lambda *_: pytest.fail("something was decoded"))
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "data", Path("/sys/data"), tmp_path / ("x" * 300)):
        with pytest.raises(MynaError, match=r"file|/sys|xxx") as caught:
            myna.import_dataset(source, out)
        assert caught.value.hint
        with pytest.raises(MynaError, match=r"file|/sys|xxx"):
            prepare(source, out, workspace)
    with full_disk(0), pytest.raises(MynaError, match="data"):
        myna.import_dataset(source, tmp_path / "data")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_disk_that_fills_up_during_the_work_is_named_and_nothing_is_lost(
    source: Path, workspace: Path, tmp_path: Path
) -> None:
    out = tmp_path / "data"
    prepare(source, out, workspace)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    record(source, {"wren": 190.0}, [f"line {number}" for number in range(8)])
    messages = set()
    for room in (100, 1_000, 3_000, 10_000):
        with full_disk(room):
            for call in (lambda: prepare(source, out, workspace), lambda: myna.split(out, texts=1)):
                try:
                    call()
                except MynaError as error:
                    messages.add(error.what)
                    assert error.hint
    assert any("data" in message for message in messages), messages
    assert not list(out.rglob("*.tmp")) and before.keys() <= set(out.rglob("*"))
    assert prepare(source, out, workspace).utterances == 14


# Texts that cannot be spoken


@pytest.mark.parametrize("model", ["model", None])
def test_a_text_with_a_control_token_is_rejected_before_anything_is_encoded(
    source: Path, workspace: Path, tmp_path: Path, model: str | None
) -> None:
    (source / "robin" / "hi.txt").write_text("hi <|eot_id|>")
    out = tmp_path / "out"
    if model:
        prepare(source, out, workspace, max_bad=0.5)
        assert len(PreparedDataset.open(out).utterances) == 5
    else:
        myna.import_dataset(source, out, max_bad=0.5)
    (line,) = map(json.loads, (out / "rejected.jsonl").read_text(encoding="utf-8").splitlines())
    assert line["id"] == "robin/hi" and line["reason"] == "control token" and "<|eot_id|>" in line["detail"]


def test_a_token_that_only_this_model_has_is_rejected_too(source: Path, workspace: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(workspace / "model", tmp_path / "model"))
    tree = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    added = tree["added_tokens"][-1] | {"id": tree["model"]["vocab"]["Q"], "content": "Q"}
    tree["added_tokens"] = [added, *tree["added_tokens"]]
    (model / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
    (source / "robin" / "hi.txt").write_text("Q hi")
    report = myna.prepare(source, tmp_path / "out", model=str(model), device="cpu", max_bad=0.5)
    assert (report.utterances, report.rejected) == (5, 1)
    assert "control token Q" in (tmp_path / "out" / "rejected.jsonl").read_text(encoding="utf-8")


def test_a_text_that_cannot_be_said_in_that_time_is_rejected(source: Path, tmp_path: Path) -> None:
    write_audio(source / "robin" / "hi.wav", tone_speech("x" * 33, 200.0), SAMPLE_RATE)
    (source / "robin" / "hi.txt").write_text("so many words " * 715)
    result = import_source(str(source), media=tmp_path)
    (item,) = result.rejected
    assert (item.id, item.reason) == ("robin/hi", "implausible pace")
    assert "10009 characters in 2.04 s" in item.detail


def test_the_fastest_speakers_of_every_language_pass(tmp_path: Path) -> None:
    """Texts and the seconds that a fast speaker needs for them."""
    quick = {
        "en": ("Peter Piper picked a peck of pickled peppers, a peck of pickled peppers Peter Piper picked.", 3.0),
        "vi": ("Nghiêng nghiêng chiếc nón, người phụ nữ đi thoăn thoắt trên con đường nghìn năm tuổi.", 2.8),
        "ar": ("وَمِنْ ثُمَّ قَالُوا إِنَّهُ لَا يُوجَدُ شَيْءٌ أَفْضَلُ مِنَ الْعَمَلِ الصَّالِحِ وَالْكَلِمَةِ الطَّيِّبَةِ.", 3.0),
        "zh": ("四是四，十是十，十四是十四，四十是四十。", 2.5),
        "de": ("Donaudampfschifffahrtsgesellschaftskapitänsmütze", 2.0),
        "none": ("Ah!", 0.05),
    }
    for name, (text, seconds) in quick.items():
        tone = tone_speech("x" * 100, 200.0)
        write_audio(tmp_path / f"{name}.wav", tone[2000 : 2000 + round(seconds * SAMPLE_RATE)], SAMPLE_RATE)
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    assert import_source(str(tmp_path), media=tmp_path).rejected == []


def test_the_model_is_looked_for_before_anything_is_decoded(
    source: Path, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("myna.data.importers.validate_utterances", lambda *_: pytest.fail("something was decoded"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "gpt2"}')
    codecless = tmp_path / "codecless"
    shutil.copytree(workspace / "model", codecless)
    for model, codec in ((tmp_path / "gone", None), (other, None), (codecless, str(tmp_path / "no codec"))):
        with pytest.raises(MynaError):
            myna.prepare(source, tmp_path / "out", model=str(model), codec=codec, device="cpu")
    assert not (tmp_path / "out").exists()


# Imports that cannot go on


@pytest.mark.parametrize("layout", ["folder", "hf"])
def test_a_prepared_folder_inside_its_source_works_again_and_again(
    source: Path, workspace: Path, tmp_path: Path, layout: str
) -> None:
    if layout == "hf":
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [
            {"id": path.stem, "text": path.stem, "speaker": "x", "audio": {"bytes": path.read_bytes(), "path": "a.wav"}}
            for path in sorted((source / "robin").glob("*.wav"))
        ]
        shutil.rmtree(source)
        source.mkdir()
        pq.write_table(pa.Table.from_pylist(rows), source / "part.parquet")
    first = prepare(source, source / "prepared", workspace)
    myna.split(source / "prepared", texts=1)
    for _ in range(2):
        again = prepare(source, source / "prepared", workspace)
        assert (again.utterances, again.rejected, again.encoded) == (first.utterances, 0, 0)
    other = prepare(source, source / "another", workspace)
    assert (other.utterances, other.rejected) == (first.utterances, 0)
    assert prepare(source / "prepared", tmp_path / "copy", workspace).utterances == first.utterances


@pytest.mark.parametrize("format", ["ljspeech", "table", "metadata_json", "chatml", "speechocean", "myna", "hf"])
def test_a_format_that_does_not_fit_lists_those_there_are(source: Path, tmp_path: Path, format: str) -> None:
    with pytest.raises(MynaError) as caught:
        myna.import_dataset(source, tmp_path / "out", format=format)
    message = f"{caught.value.what} {caught.value.hint}"
    assert "permission" not in message and "space" not in message
    assert format in message and all(name in message for name in FORMATS), message
    assert "looks like folder" in message or "--format folder" in message


@pytest.mark.parametrize("suffix", [".m4a", ".mp4", ".webm"])
def test_containers_of_phones_and_browsers_are_read(workspace: Path, tmp_path: Path, suffix: str) -> None:
    source, codec = tmp_path / "source", "libopus" if suffix == ".webm" else "aac"
    record(source, {"robin": 320.0}, ("good morning", "what a fine day"))
    for wav in list((source / "robin").glob("*.wav")):
        write_container(wav.with_suffix(suffix), read_audio(wav, sample_rate=RATE), codec)
        if wav.stem == "good-morning":
            wav.unlink()
    # Beside a recording of the same name, a container is the film that it was taken from.
    report = prepare(source, tmp_path / "out", workspace)
    assert (report.utterances, report.rejected) == (2, 0)
    names = {utterance.audio.name for utterance in PreparedDataset.open(tmp_path / "out").utterances}
    assert names == {f"good-morning{suffix}", "what-a-fine-day.wav"}
