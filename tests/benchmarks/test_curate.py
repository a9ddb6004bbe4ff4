"""The measures of benchmarks/curate.py on a table whose faults are known, and the recordings of planted_faults.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from benchmarks.curate import Truth, diarization_error, measure_curation
from benchmarks.planted_faults import (
    SAMPLE_RATE,
    Corpus,
    PlantedRecording,
    SpokenClip,
    TrueUtterance,
    clipped_stretch,
    encode,
    jingle,
    narrow_stretch,
    podcast,
    read_track,
    repeated,
    write_long,
)

from myna.audio.files import read_audio
from myna.audio.signal_measures import bandwidth_hz, clipped_share
from tests.listen.signals import babble


def voices(count: int, clips: int) -> list[list[SpokenClip]]:
    return [
        [
            SpokenClip(f"voice{voice}", f"line {number}", babble(3, 10 * voice + number), True, ((0.0, 3.0),))
            for number in range(clips)
        ]
        for voice in range(count)
    ]


@pytest.fixture
def episode() -> PlantedRecording:
    return podcast(voices(3, 6), np.random.default_rng(0))


def test_a_podcast_has_every_clip_where_its_truth_says(episode: PlantedRecording) -> None:
    assert sorted(one.text for one in episode.utterances) == sorted(f"line {n}" for n in range(6) for _ in range(3))
    spoken = sum(one.end - one.start for one in episode.utterances)
    overlapped = sum(one.end - one.start for one in episode.faults)
    assert 0.02 < overlapped / spoken < 0.08
    for fault in episode.faults:
        active = [one for one in episode.utterances if one.start < fault.end - 1e-6 and one.end > fault.start + 1e-6]
        assert len({one.speaker for one in active}) == 2
    quiet = np.ones(len(episode.samples), np.bool_)
    for one in episode.utterances:
        quiet[round(one.start * SAMPLE_RATE) : round(one.end * SAMPLE_RATE)] = False
    assert np.abs(episode.samples[quiet]).max() < 0.01


def test_faults_are_in_their_stretch_and_nowhere_else(episode: PlantedRecording) -> None:
    narrow = narrow_stretch(episode)
    [fault] = [one for one in narrow.faults if one.kind == "narrow band"]
    inside = slice(round(fault.start * SAMPLE_RATE), round(fault.end * SAMPLE_RATE))
    assert bandwidth_hz(narrow.samples[inside], SAMPLE_RATE) < 4_200
    assert np.array_equal(narrow.samples[: inside.start], episode.samples[: inside.start])
    clipped = clipped_stretch(episode)
    assert clipped_share(clipped.samples[inside]) > 0.001
    joined = episode.after(jingle(babble(30, 99)))
    assert joined.utterances[0].start == pytest.approx(episode.utterances[0].start + 20)
    again = repeated(episode)
    first = again.utterances[0]
    original = next(one for one in episode.utterances if (one.speaker, one.text) == (first.speaker, first.text))
    assert first.end - first.start == pytest.approx(original.end - original.start)
    assert again.faults[-1].kind == "duplicate"


@pytest.mark.parametrize("samples", range(300_000, 300_009))
def test_a_stretch_of_any_length_can_be_narrow(samples: int) -> None:
    """Resampled there and back, it may be a sample shorter."""
    narrow = narrow_stretch(PlantedRecording(babble(13, 1)[:samples]))
    assert len(narrow.samples) == samples


def test_planted_music_begins_with_its_first_sound(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "late.flac", np.concatenate([np.zeros(2 * SAMPLE_RATE), babble(88, 1)]), SAMPLE_RATE)
    assert len(read_track(tmp_path / "late.flac")) / SAMPLE_RATE == pytest.approx(88, abs=0.1)


def test_a_long_recording_that_says_it_all_again_marks_the_repeats(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clips = {one[0].speaker: one for one in voices(6, 2)}
    monkeypatch.setattr(Corpus, "_decoded", lambda _, speaker: clips[speaker])
    natural, real = (Corpus({name: [] for name in sorted(clips)[half]}, True) for half in (slice(3), slice(3, None)))
    write_long(tmp_path, natural, real, [babble(30, 1)], 100 / 3600)
    truth = json.loads((tmp_path / "long/truth.json").read_text())["long.mp3"]
    said = sorted(truth["utterances"], key=lambda one: one["start"])
    repeats = sorted(one["start"] for one in truth["faults"] if one["kind"] == "duplicate")
    assert len(said) > 12
    assert repeats == [one["start"] for one in said[12:]]


@pytest.mark.parametrize(
    ("name", "codec", "rate"),
    [("x.m4a", "aac", SAMPLE_RATE), ("x.webm", "libopus", 48_000), ("x.amr", "libopencore_amrnb", 8_000)],
)
def test_containers_can_be_read_again(tmp_path: Path, name: str, codec: str, rate: int) -> None:
    encode(tmp_path / name, babble(3, 1), codec, 12_200 if rate == 8_000 else 64_000, rate)
    assert len(read_audio(tmp_path / name)) / 24_000 == pytest.approx(3, abs=0.1)


def test_the_diarization_error_is_the_best_mapping_outside_the_collar() -> None:
    first = np.zeros(1000, np.bool_)
    first[:500] = True
    reference = {"a": first, "b": ~first}
    error, spoken = diarization_error(reference, np.stack([~first, first], 1))
    assert error == 0
    assert spoken == pytest.approx(9.5, abs=0.02)
    late = np.roll(first, 20)  # 0.2 s, within the collar but for the other end
    error, _ = diarization_error(reference, np.stack([late, ~late], 1))
    assert error == pytest.approx(0.2, abs=0.02)
    one = np.ones((1000, 1), np.bool_)
    error, spoken = diarization_error(reference, one)
    assert error / spoken == pytest.approx(0.5, abs=0.01)


def row(
    start: float,
    end: float,
    reason: str = "",
    text: str = "",
    speaker: str = "s1",
    kind: str = "clip",
    edge_cer: float = 0.0,
) -> dict[str, Any]:
    return {
        "recording": "a.wav",
        "start_ms": round(1000 * start),
        "end_ms": round(1000 * end),
        "status": "dropped" if reason else "kept",
        "reason": reason,
        "kind": kind,
        "speaker": speaker,
        "text": text,
        "check_text": text,
        "edge_cer": edge_cer,
    }


def test_recall_precision_purity_cuts_and_text_of_a_table(tmp_path: Path) -> None:
    utterances = [
        TrueUtterance(0.0, 4.0, "ann", "the quick brown fox jumps", True, ((0.0, 4.0),)),
        TrueUtterance(5.0, 9.0, "bob", "over the lazy dog again", False, ((5.0, 9.0),)),
        TrueUtterance(10.0, 14.0, "ann", "nobody hears the music", True, ((10.0, 14.0),)),
    ]
    truth = Truth(1500, [vars(one) for one in utterances], [{"kind": "music", "start": 10.0, "end": 14.0}])
    (tmp_path / "audio").mkdir()
    soundfile.write(tmp_path / "audio" / "a.wav", babble(15, 3), SAMPLE_RATE)
    table = [
        row(0, 4.5, text="the quick brown fox jumps"),
        row(4.5, 7, reason="music"),
        row(7, 9.5, text="lazy dog"),
        row(9.5, 12, reason="music"),
        row(12, 15, text="music", edge_cer=0.4),
    ]
    report = measure_curation(tmp_path, {"a.wav": truth}, table)
    assert report["faults"]["music"]["planted_s"] == pytest.approx(4)
    assert report["faults"]["music"]["recall"] == pytest.approx(0.5)
    assert report["reasons"]["music"]["precision"] == pytest.approx(0.5)
    assert report["good_seconds_kept"] == pytest.approx(6 / 8)
    assert report["synthetic_good_seconds_kept"] == 1
    assert report["clip_purity"] == 1
    assert report["label_purity"] == pytest.approx(6 / 8)
    assert (report["speakers_found"], report["speakers_true"]) == (1, 2)
    assert report["kept_cer"] == 0
    assert report["text_clips"] == 1
    assert report["cuts_checked"] == 6
    assert report["cuts_within_an_utterance"] == 2
    assert report["cuts_where_transcriptions_differ"] == 2
    assert report["dropped_seconds"] == {"music": pytest.approx(5)}
