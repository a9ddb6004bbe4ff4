"""Recordings: found, decoded from any container in bounded memory, and cut at pauses; damage is reported."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import soxr  # type: ignore[import-untyped]

from myna.audio.files import Samples, write_audio
from myna.audio.signal_measures import speech_spans
from myna.core.errors import DataError
from myna.curate.recordings import CURATION_RATE, DecodedRecording, decode_recording, find_recordings, resample_pcm
from myna.curate.settings import ListenSettings
from tests.audio.media import RATE, write_container


def decode(path: Path, folder: Path, **settings: float) -> DecodedRecording:
    return decode_recording(path, folder, ListenSettings.model_validate(settings), speech_spans)


def bursts(seconds: float, rate: int = RATE) -> Samples:
    """Make noise in bursts of a second, with pauses of 0.6 s."""
    time = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(0).normal(size=len(time))
    return (0.1 * noise * (time % 1.6 < 1.0)).astype(np.float32)


def test_a_long_recording_is_cut_at_pauses_into_parts_that_tile_it(tmp_path: Path) -> None:
    path = tmp_path / "tape.wav"
    write_audio(path, bursts(65.0013), RATE)
    decoded = decode(path, tmp_path / "out", part_minutes=0.25)
    edges = [0, *(part.end_ms for part in decoded.parts)]
    assert [part.start_ms for part in decoded.parts] == edges[:-1] and len(decoded.parts) >= 5
    assert decoded.duration_ms == edges[-1] == 65_002 and not decoded.problem
    for part in decoded.parts:
        info = soundfile.info(tmp_path / "out" / part.audio)
        assert info.frames == 24 * (part.end_ms - part.start_ms) and info.samplerate == CURATION_RATE
    for cut in edges[1:-1]:
        assert 1.1 < cut / 1000 % 1.6 < 1.5, "a cut lies in a pause"
    modified = (tmp_path / "out" / decoded.parts[0].audio).stat().st_mtime_ns
    assert decode(path, tmp_path / "out", part_minutes=0.25) == decoded
    assert (tmp_path / "out" / decoded.parts[0].audio).stat().st_mtime_ns == modified, "decoded once"


@pytest.mark.parametrize(
    ("name", "codec"),
    [("a.m4a", "aac"), ("a.mp4", "aac"), ("a.mka", "pcm_s16le"), ("a.webm", "libopus"), ("a.mov", "alac")],
)
def test_containers(tmp_path: Path, name: str, codec: str) -> None:
    decoded = decode(write_container(tmp_path / name, bursts(3.0), codec), tmp_path / "out")
    assert not decoded.problem and decoded.duration_ms == pytest.approx(3000, abs=120)


def test_the_same_sound_in_other_files_is_one_recording(tmp_path: Path) -> None:
    write_audio(tmp_path / "a.wav", bursts(2.0), RATE)
    pcm, _ = soundfile.read(tmp_path / "a.wav", dtype="int16")
    soundfile.write(tmp_path / "a.flac", pcm, RATE)
    first, second = (decode(tmp_path / name, tmp_path / "out") for name in ("a.wav", "a.flac"))
    assert first.recording_hash == second.recording_hash and first.file_hash != second.file_hash


def test_damaged_files_give_what_can_be_read_and_the_rest_is_counted(tmp_path: Path) -> None:
    write_audio(tmp_path / "whole.wav", bursts(10.0), RATE)
    content = (tmp_path / "whole.wav").read_bytes()
    (tmp_path / "cut.wav").write_bytes(content[: len(content) // 2])
    decoded = decode(tmp_path / "cut.wav", tmp_path / "out")
    assert "cut short" in decoded.problem
    assert decoded.parts[-1].end_ms == pytest.approx(5000, abs=5)
    assert decoded.duration_ms == pytest.approx(10_000, abs=5)
    write_container(tmp_path / "whole.m4a", bursts(10.0), "aac")
    content = (tmp_path / "whole.m4a").read_bytes()
    (tmp_path / "cut.m4a").write_bytes(content[: len(content) // 2])  # the index was at the end
    (tmp_path / "text.mp3").write_text("no sound at all")
    with av.open(str(tmp_path / "film.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10, width=16, height=16, pix_fmt="yuv420p")
        for frame in (av.VideoFrame(16, 16, "yuv420p"), None):
            container.mux(stream.encode(frame))
    for name in ("cut.m4a", "text.mp3", "film.mp4"):
        broken = decode(tmp_path / name, tmp_path / "out")
        assert broken.problem and not broken.parts and broken.duration_ms == 0, name


def test_channels_are_mixed_unless_one_is_silent_or_they_cancel(tmp_path: Path) -> None:
    samples = bursts(2.0)
    peaks = {}
    for name, channels in {
        "both": (samples, samples),
        "one": (samples, 0 * samples),
        "inverted": (samples, -samples),
        "mono": (samples,),
    }.items():
        soundfile.write(tmp_path / f"{name}.wav", np.stack(channels, 1), RATE)
        part = decode(tmp_path / f"{name}.wav", tmp_path / "out").parts[0]
        peaks[name] = np.abs(soundfile.read(tmp_path / "out" / part.audio)[0]).max()
    assert all(peak == pytest.approx(peaks["mono"], rel=0.01) for peak in peaks.values()), peaks


def test_clipping_is_counted_before_resampling(tmp_path: Path) -> None:
    samples = bursts(4.0)
    samples[RATE : 2 * RATE] = (8 * samples[:RATE]).clip(-0.5, 0.5)
    write_audio(tmp_path / "a.wav", samples, RATE)
    clipped = decode(tmp_path / "a.wav", tmp_path / "out").parts[0].clipped
    assert set(clipped) == {"1"} and clipped["1"] > 0.05


def test_files_are_found_by_suffix_and_named_relative_to_their_folder(tmp_path: Path) -> None:
    for name in (
        "a/one.MP3",
        "a/two.m4a",
        "a/notes.txt",
        "a/one.txt",
        "b/one.mp3",
        "a/out/parts/x.flac",
        "a/.hidden/x.wav",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    files = find_recordings([tmp_path / "a"], out=tmp_path / "a" / "out")
    assert [file.name for file in files] == ["one.MP3", "two.m4a"]
    assert files[0].script == tmp_path / "a" / "one.txt" and files[1].script is None
    both = find_recordings([tmp_path / "a", tmp_path / "b"], out=tmp_path / "a" / "out")
    assert [file.name for file in both] == ["a/one.MP3", "a/two.m4a", "b/one.mp3"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no recording"):
        find_recordings([tmp_path / "empty"], out=tmp_path / "out")


@pytest.mark.parametrize("samples", [0, 1, 60 * 24_000, 60 * 24_000 + 7, 150 * 24_000])
def test_a_part_is_resampled_minute_by_minute_as_if_at_once(samples: int) -> None:
    pcm = np.random.default_rng(1).integers(-9000, 9000, samples).astype(np.int16)
    resampled = resample_pcm(pcm, 16_000)
    expected = soxr.resample(pcm.astype(np.float32) / np.float32(32767), CURATION_RATE, 16_000, quality="VHQ")
    assert resampled.dtype == np.float32 and len(resampled) == len(expected)
    assert np.allclose(resampled, expected, atol=1e-6)
