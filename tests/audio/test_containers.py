"""Containers that libsndfile does not read."""

from pathlib import Path
from unittest.mock import patch

import av
import numpy as np
import pytest

from myna.audio.files import AudioFileError, check_audio, probe, read_audio
from tests.audio.media import RATE, peak_hertz, sine, write_container

CONTAINERS = {"tone.m4a": "aac", "tone.mp4": "aac", "tone.mov": "alac", "tone.aac": "aac", "tone.webm": "libopus"}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_are_read_like_any_recording(tmp_path: Path, name: str) -> None:
    tone = sine(2.0, RATE, hertz=1000)
    path = write_container(tmp_path / name, np.stack([tone, tone * 0.5]), CONTAINERS[name])
    info = check_audio(path)
    assert (info.sample_rate, info.channels) == (RATE, 2)
    assert info.seconds == pytest.approx(2, abs=0.05) and probe(path).seconds == pytest.approx(2, abs=0.05)
    samples = read_audio(path, sample_rate=24_000)
    assert samples.dtype == np.float32 and len(samples) == pytest.approx(48_000, abs=1_200)
    assert peak_hertz(samples, 24_000) == pytest.approx(1000, abs=1)
    assert np.sqrt(np.mean(samples**2)) == pytest.approx(0.75 * 0.5 / np.sqrt(2), rel=0.05)


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_span_of_a_container_is_a_slice(tmp_path: Path, name: str) -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 20 * RATE).astype(np.float32)
    path = write_container(tmp_path / name, noise, CONTAINERS[name])
    whole = read_audio(path, sample_rate=RATE)
    for start, end in [(0.0, 0.5), (1.25, 1.5), (12.3456, 13.0), (19.5, None)]:
        part = read_audio(path, sample_rate=RATE, span=(start, end))
        expected = whole[round(start * RATE) : None if end is None else round(end * RATE)]
        assert part.shape == expected.shape
        assert np.abs(part - expected).max() < 1e-6


def test_lossless_audio_in_a_container_is_sample_exact(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(-(2**14), 2**14, RATE).astype(np.float32)
    noise /= 2**15
    assert np.array_equal(read_audio(write_container(tmp_path / "a.mov", noise, "alac"), sample_rate=RATE), noise)


def test_a_container_cut_short_is_named(tmp_path: Path) -> None:
    path = write_container(tmp_path / "whole.mov", sine(2.0, RATE), "alac", movflags="faststart")
    data = path.read_bytes()
    for share in (0.5, 0.9):
        cut = tmp_path / "cut.mov"
        cut.write_bytes(data[: round(len(data) * share)])
        for open_it in (check_audio, read_audio):
            with pytest.raises(AudioFileError, match=r"cut\.mov: (cut short|unreadable audio)"):
                open_it(cut)


def test_what_is_no_audio_is_unreadable(tmp_path: Path) -> None:
    playlist = tmp_path / "playlist.m4a"
    playlist.write_text("#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nwhole.mov\n#EXT-X-ENDLIST\n")
    write_container(tmp_path / "whole.mov", sine(1.0, RATE), "alac")
    with av.open(str(tmp_path / "silent.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10, width=16, height=16, pix_fmt="yuv420p")
        for part in (av.VideoFrame(16, 16, "yuv420p"), None):
            container.mux(stream.encode(part))
    for name, reason in [("playlist.m4a", "unreadable audio"), ("silent.mp4", "it holds no audio")]:
        with pytest.raises(AudioFileError, match=reason):
            read_audio(tmp_path / name)


def test_without_pyav_the_error_says_what_to_type(tmp_path: Path) -> None:
    path = write_container(tmp_path / "tone.m4a", sine(0.5, RATE), "aac")
    with patch.dict("sys.modules", {"av": None}), pytest.raises(AudioFileError, match="pip install av"):
        read_audio(path)


def test_a_container_whose_channels_change_is_unreadable(tmp_path: Path) -> None:
    tone = sine(1.0, RATE)
    two = write_container(tmp_path / "two.ts", np.stack([tone, tone]), "aac").read_bytes()
    one = write_container(tmp_path / "one.ts", tone, "aac").read_bytes()
    path = tmp_path / "joined.ts"
    path.write_bytes(two + one)
    for open_it in (check_audio, read_audio):
        with pytest.raises(AudioFileError, match=r"joined\.ts: .*its channels change from 2 to 1") as caught:
            open_it(path)
        assert "ffmpeg" in caught.value.hint
