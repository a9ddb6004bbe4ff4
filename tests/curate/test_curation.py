"""Curation end to end with scripted models: what is kept and reported, resuming, and deciding again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import myna
from myna.audio.files import Samples, probe, read_audio, write_audio
from myna.core.errors import ConfigError, DataError, ModelError
from myna.curate.curation import CurationResult, run_curation
from myna.curate.models import CurationModels, OpenModels
from myna.curate.recordings import CURATION_RATE
from myna.curate.settings import CurateSettings, load_curate_settings
from myna.data.corrections import ClipDrop, SpeakerMerge, TextCorrection, append_correction
from myna.data.manifest import read_manifest
from myna.text.wer import character_errors
from tests.curate.scripted import SpokenSentence, scripted_models, write_recording

SETTINGS = ("keep.min_bandwidth_hz=0", "listen.part_minutes=0.4")
"""Settings for short recordings: Opus has a narrow band at this bit rate, and a minute has several parts."""


def curate(sources: Sequence[Path], out: Path, models: OpenModels, *settings: str, **options: Any) -> CurationResult:
    options = {"workers": 1} | options
    return run_curation(sources, out, load_curate_settings(out, [*SETTINGS, *settings]), open_models=models, **options)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Path, list[SpokenSentence]]]:
    """Folder with a recording of two voices, a copy of it, a file that is no audio, and a short one."""
    folder = tmp_path_factory.mktemp("raw")
    truth = {folder / "b talk.wav": write_recording(folder / "b talk.wav", 12)}
    truth[folder / "d memo.flac"] = write_recording(folder / "d memo.flac", 3, seed=1, first=20)
    shutil.copyfile(folder / "b talk.wav", folder / "c copy.wav")
    (folder / "a broken.mp3").write_text("no sound")
    return folder, truth


@pytest.fixture(scope="module")
def curated(
    source: tuple[Path, dict[Path, list[SpokenSentence]]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[CurationResult, OpenModels]:
    folder, truth = source
    models = scripted_models(truth)
    return curate([folder], tmp_path_factory.mktemp("curated") / "out", models), models


def columns(folder: Path, *names: str) -> list[tuple[Any, ...]]:
    table = pq.read_table(folder / "segments.parquet")
    return list(zip(*(table[name].to_pylist() for name in names), strict=True))


def test_every_millisecond_is_in_one_row(
    curated: tuple[CurationResult, OpenModels], source: tuple[Path, dict[Path, list[SpokenSentence]]]
) -> None:
    result, _ = curated
    ends: dict[str, int] = {}
    for name, start, end in columns(result.folder, "recording", "start_ms", "end_ms"):
        assert start == ends.get(name, 0)
        ends[name] = end
    lengths = {path.name: -(-round(probe(path).seconds * CURATION_RATE) // 24) for path in source[1]}
    assert ends == lengths | {"c copy.wav": lengths["b talk.wav"], "a broken.mp3": 0}
    assert result.kept_seconds + sum(result.dropped.values()) == pytest.approx(sum(ends.values()) / 1000, abs=1e-9)
    assert set(result.dropped) == {"duplicate", "no speech", "unreadable"}
    assert any("a broken.mp3" in note for note in result.notes)


def test_kept_clips_are_whole_sentences_with_their_words(
    curated: tuple[CurationResult, OpenModels], source: tuple[Path, dict[Path, list[SpokenSentence]]]
) -> None:
    result, _ = curated
    said = {path.name: sentences for path, sentences in source[1].items()}
    utterances = read_manifest(result.folder / "manifest.jsonl")
    assert len(utterances) == result.clips >= 6
    for utterance in utterances:
        start, end = utterance.extras["start_ms"] / 1000, utterance.extras["end_ms"] / 1000
        inside = [one for one in said[utterance.extras["recording"]] if one.start < end and start < one.end]
        assert all(start <= one.start and one.end <= end for one in inside), "no sentence is cut"
        assert character_errors(" ".join(one.text for one in inside), utterance.text).rate == 0
        assert probe(utterance.audio).seconds == pytest.approx(end - start)
        assert 1 <= end - start <= 20
    texts = " ".join(utterance.text for utterance in utterances)
    assert all(one.text in texts for sentences in said.values() for one in sentences), "nothing good is lost"


def test_loudness_is_one_gain_for_each_speaker_and_recording(curated: tuple[CurationResult, OpenModels]) -> None:
    result, _ = curated
    rows = columns(result.folder, "status", "speaker", "recording", "gain_db", "clip", "audio", "audio_start_ms")
    gains: dict[tuple[str, str], set[float]] = {}
    for status, speaker, recording, gain, clip, audio, start in rows:
        if status == "kept":
            gains.setdefault((speaker, recording), set()).add(gain)
            samples = read_audio(result.folder / clip)
            original = read_audio(result.folder / audio)[24 * start :][: len(samples)]
            assert np.abs(samples - original * 10 ** (gain / 20)).max() < 1e-4
    assert gains and all(len(group) == 1 for group in gains.values())


def test_again_nothing_is_listened_to(curated: tuple[CurationResult, OpenModels], source: tuple[Path, Any]) -> None:
    result, _ = curated
    before = {path: path.stat().st_mtime_ns for path in result.folder.rglob("*.flac")}
    table = (result.folder / "segments.parquet").read_bytes()

    def refuse(*_: Any) -> Any:
        raise AssertionError("a model is opened")

    class Named:
        """Models that only have names."""

        names = scripted_models(source[1])(CurateSettings().listen, 0).names

        def find_speech(self, *_: Any) -> Any:
            refuse()

    again = curate([source[0]], result.folder, lambda *_: Named())  # type: ignore[arg-type]
    assert again.kept_seconds == result.kept_seconds
    assert {path: path.stat().st_mtime_ns for path in result.folder.rglob("*.flac")} == before
    assert (result.folder / "segments.parquet").read_bytes() == table
    assert curate([], result.folder, refuse).kept_seconds == result.kept_seconds


def test_other_thresholds_decide_again_without_sources(
    curated: tuple[CurationResult, OpenModels], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(curated[0].folder, folder)
    strict = curate([], folder, curated[1], "keep.seconds=[5, 20]")
    assert 0 < strict.clips < curated[0].clips and "too short" in strict.dropped
    assert strict.seconds == curated[0].seconds
    wanted = {clip for clip, status in columns(folder, "clip", "status") if status == "kept"}
    assert wanted < {path.relative_to(folder).as_posix() for path in (folder / "clips").rglob("*.flac")}
    assert load_curate_settings(folder).keep.seconds == (5, 20), "the folder remembers its settings"
    assert [note for note in strict.notes if "myna curate" in note] == list(strict.notes) and len(strict.notes) == 1
    shutil.rmtree(folder / "clips")  # as the note says
    assert not curate([], folder, curated[1]).notes
    assert {path.relative_to(folder).as_posix() for path in (folder / "clips").rglob("*.flac")} == wanted
    nothing = curate([], folder, curated[1], "keep.min_bandwidth_hz=99000")
    assert not nothing.clips
    assert nothing.notes[-1].endswith(f"myna curate --out {folder} --set keep.min_bandwidth_hz=VALUE")
    with pytest.raises(ConfigError, match="listened to again"):
        curate([], folder, curated[1], "cut.min_gap=0.3")
    with pytest.raises(ConfigError, match="keep"):
        load_curate_settings(folder, ["keep.snr=3"])


def test_clips_stay_and_keep_their_names_when_labels_change(
    curated: tuple[CurationResult, OpenModels], tmp_path: Path
) -> None:
    """A dataset that was prepared before still finds its clips, and a clip can be given as an enrolment."""
    folder = tmp_path / "out"
    shutil.copytree(curated[0].folder, folder)
    before = {path: path.read_bytes() for path in (folder / "clips").rglob("*.flac")}
    kept = [
        (id, clip, speaker)
        for id, clip, speaker, status in columns(folder, "id", "clip", "speaker", "status")
        if status == "kept"
    ]
    assert not any(speaker in clip for _, clip, speaker in kept)
    append_correction(folder, SpeakerMerge(speaker=kept[0][2], into="anna", clips=(kept[0][0],)))
    curate([], folder, curated[1], "loudness.target_lufs=-30")
    assert {speaker for speaker, status in columns(folder, "speaker", "status") if status == "kept"} >= {"anna"}
    assert {path: path.read_bytes() for path in before} == before


def test_recordings_of_an_earlier_call_are_not_left_out_silently(tmp_path: Path) -> None:
    one, two = tmp_path / "one" / "talk.wav", tmp_path / "two" / "talk.wav"
    truth = {one: write_recording(one, 3), two: write_recording(two, 3, seed=1, first=20)}
    out, models = tmp_path / "out", scripted_models(truth)
    first = curate([one.parent], out, models)
    table = (out / "segments.parquet").read_bytes()
    with pytest.raises(DataError, match=r"out holds 1 recordings that are not among the sources: talk\.wav") as caught:
        curate([two.parent], out, models)
    assert "--out NEW" in caught.value.hint and f"rm {out / 'recordings.json'}" in caught.value.hint
    assert (out / "segments.parquet").read_bytes() == table
    joined = curate([one.parent, two.parent], out, models)
    assert joined.recordings == 2 and joined.clips > first.clips
    (out / "recordings.json").unlink()
    assert curate([two.parent], out, models).recordings == 1


def test_an_enrolled_speaker_without_an_encoder_is_told_before_anything_is_listened_to(
    curated: tuple[CurationResult, OpenModels], tmp_path: Path
) -> None:
    """Deciding ended in a ValueError of matmul."""
    folder = tmp_path / "out"
    enrol = ["speakers.enrolment=['anna=anna.wav']", f"listen.models={tmp_path / 'nowhere'}"]
    with pytest.raises(ModelError, match=r"the speaker encoder is missing.*nowhere") as caught:
        curate([tmp_path], folder, curated[1], *enrol)
    assert caught.value.hint == "myna setup curation" and not list(folder.rglob("*.flac"))
    with pytest.raises(DataError, match=r"enrolled speaker anna is not there: .*anna\.wav") as missing:
        curate([], folder, lambda *_: CurationModels(speaker_encoder=Level()), *enrol)
    assert "speakers.enrolment=[]" in missing.value.hint
    write_audio(tmp_path / "anna.wav", np.ones(CURATION_RATE, np.float32), CURATION_RATE)
    shutil.copytree(curated[0].folder, folder, dirs_exist_ok=True)
    with pytest.raises(DataError, match="listened to without the speaker encoder"):
        curate(
            [],
            folder,
            lambda *_: CurationModels(speaker_encoder=Level()),
            *enrol[1:],
            f"speakers.enrolment=['anna={tmp_path / 'anna.wav'}']",
        )


def test_an_enrolled_clip_is_not_lost(source: tuple[Path, Any], tmp_path: Path) -> None:
    """The clip that was given was deleted, and every later decision ended in `missing file`."""
    folder = tmp_path / "out"
    known = scripted_models(source[1])

    def models(*words: Any) -> CurationModels:
        return replace(known(*words), speaker_encoder=Level())

    curate([source[0]], folder, models)
    clip = next((folder / "clips").rglob("*.flac"))
    content = clip.read_bytes()
    assert set(curate([], folder, models, f"speakers.enrolment=['anna={clip}']").speakers) == {"anna"}
    assert clip.read_bytes() == content
    shutil.rmtree(folder / "clips")
    assert set(curate([], folder, models).speakers) == {"anna"}


class Level:
    """Speaker encoder that hears the level."""

    name = "level"

    def embed(self, samples: Samples, sample_rate: int) -> np.ndarray:  # noqa: ARG002
        return np.array([1, samples.mean(), 0], np.float32)


def test_corrections_are_respected(curated: tuple[CurationResult, OpenModels], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(curated[0].folder, folder)
    first, second, *_ = [id for id, status in columns(folder, "id", "status") if status == "kept"]
    append_correction(folder, ClipDrop(clip=first))
    append_correction(folder, TextCorrection(clip=second, text="Words by hand."))
    result = curate([], folder, curated[1])
    rows = {id: rest for id, *rest in columns(folder, "id", "status", "reason", "text", "text_source")}
    assert rows[first][:2] == ["dropped", "dropped by hand"] and rows[second] == [
        "kept",
        "",
        "Words by hand.",
        "corrected",
    ]
    assert "dropped by hand" in result.dropped


def test_a_script_beside_a_recording_is_preferred(tmp_path: Path) -> None:
    sentences = write_recording(tmp_path / "raw" / "talk.wav", 6)
    wrong = [SpokenSentence(one.text.replace("the", "thee"), one.voice, one.start, one.end) for one in sentences]
    (tmp_path / "raw" / "talk.srt").write_text(
        "".join(f"{n}\n00:00:00,000 --> 00:00:01,000\n{one.text}\n\n" for n, one in enumerate(sentences, 1)), "utf-8"
    )
    models = scripted_models({tmp_path / "raw" / "talk.wav": wrong})
    result = curate([tmp_path / "raw"], tmp_path / "out", models, "keep.max_cer=0.3", "keep.max_edge_cer=1")
    texts = " ".join(one.text for one in read_manifest(tmp_path / "out" / "manifest.jsonl"))
    assert "thee" not in texts and all(one.text in texts for one in sentences)
    assert {source for source, status in columns(result.folder, "text_source", "status") if status == "kept"} == {
        "script"
    }


def test_a_repeated_passage_is_kept_once(tmp_path: Path) -> None:
    """The copy is another file, louder, and begins elsewhere."""
    sentences = write_recording(tmp_path / "raw" / "a.wav", 4)
    samples = read_audio(tmp_path / "raw" / "a.wav")
    shifted = np.concatenate([np.zeros(12_345, np.float32), 0.5 * samples])
    write_audio(tmp_path / "raw" / "b.wav", shifted, CURATION_RATE)
    moved = [
        SpokenSentence(one.text, one.voice, one.start + 12_345 / CURATION_RATE, one.end + 12_345 / CURATION_RATE)
        for one in sentences
    ]
    models = scripted_models({tmp_path / "raw" / "a.wav": sentences, tmp_path / "raw" / "b.wav": moved})
    curate([tmp_path / "raw"], tmp_path / "out", models)
    for recording, kind, reason in columns(tmp_path / "out", "recording", "kind", "reason"):
        if kind == "clip":
            assert reason == ("" if recording == "a.wav" else "duplicate")


def test_folders_of_others_are_not_written_to(tmp_path: Path, source: tuple[Path, Any]) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(myna.MynaError, match="not empty"):
        myna.curate(source[0], tmp_path)
    with pytest.raises(DataError, match="no curated folder"):
        myna.curate([], tmp_path / "new")
    with pytest.raises(DataError, match="there is no"):
        myna.curate(tmp_path / "nowhere", tmp_path / "new")


def test_prepare_reads_the_manifest(curated: tuple[CurationResult, OpenModels], tmp_path: Path) -> None:
    data = myna.import_dataset(curated[0], tmp_path / "imported")
    assert data.utterances == curated[0].clips and not data.rejected
    assert json.loads((curated[0].folder / "recordings.json").read_text())["recordings"]


def test_one_of_two_voices_can_be_taken_alone(curated: tuple[CurationResult, OpenModels], tmp_path: Path) -> None:
    utterances = read_manifest(curated[0].folder / "manifest.jsonl")
    data = myna.import_dataset(curated[0], tmp_path / "one", only=["d memo"])
    assert data.utterances == sum(one.speaker == "d memo" for one in utterances) < len(utterances)
    assert {one.speaker for one in read_manifest(tmp_path / "one" / "manifest.jsonl")} == {"d memo"}
    with pytest.raises(DataError, match="has no speaker speaker-9") as caught:
        myna.import_dataset(curated[0], tmp_path / "two", only=["speaker-9"])
    assert "b talk, d memo" in caught.value.hint
