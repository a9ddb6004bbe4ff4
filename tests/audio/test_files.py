from pathlib import Path

import numpy as np
import pytest
import soundfile

from myna.audio.files import (
    AudioFileError,
    AudioInfo,
    check_audio,
    check_not_silent,
    probe,
    read_audio,
    stream_audio,
    write_audio,
)
from myna.core.errors import AudioError
from tests.audio.media import peak_hertz, sine

SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a")
LOSSLESS = (".wav", ".flac")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_comes_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"tone{suffix}"
    write_audio(path, sine(1.0, 24_000), 24_000)
    assert check_audio(path) == probe(path) == AudioInfo(1.0, 24_000, 1)
    samples = read_audio(path)
    assert samples.dtype == np.float32 and samples.shape == (24_000,)
    assert peak_hertz(samples, 24_000) == pytest.approx(440, abs=1)
    assert np.sqrt(np.mean(samples**2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.05)


@pytest.mark.parametrize("suffix", [".ogg", ".opus"])
def test_a_chain_of_ogg_streams_is_refused(tmp_path: Path, suffix: str) -> None:
    """libsndfile reads the first of them, and nothing says that there are more."""
    first, second, chain = (tmp_path / f"{name}{suffix}" for name in ("first", "second", "chain"))
    write_audio(first, sine(1.0, 24_000), 24_000)
    write_audio(second, sine(2.0, 24_000, hertz=880.0), 24_000)
    chain.write_bytes(first.read_bytes() + second.read_bytes())
    with pytest.raises(AudioFileError, match=f"chain{suffix}: unreadable audio: it is a chain of Ogg streams"):
        read_audio(chain)
    with pytest.raises(AudioFileError, match="chain of Ogg streams"), stream_audio(chain):
        pass


@pytest.mark.parametrize("suffix", [".wav", ".flac", ".mp3", ".ogg"])
def test_stereo_of_another_rate_becomes_mono(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"stereo{suffix}"
    tone = sine(1.5, 44_100, hertz=1000)
    write_audio(path, np.stack([tone, tone * 0.5], axis=1), 44_100)
    assert probe(path) == AudioInfo(1.5, 44_100, 2)
    samples = read_audio(path, sample_rate=24_000)
    assert samples.shape == (36_000,)
    assert peak_hertz(samples, 24_000) == pytest.approx(1000, abs=1)
    assert np.sqrt(np.mean(samples**2)) == pytest.approx(0.75 * 0.5 / np.sqrt(2), rel=0.02)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_span_is_a_slice(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"noise{suffix}"
    write_audio(path, np.random.default_rng(0).uniform(-0.5, 0.5, 48_000).astype(np.float32), 24_000)
    whole = read_audio(path, sample_rate=24_000)
    tolerance = 0 if suffix in LOSSLESS else 1e-3
    for start, end in [(0.0, 0.5), (0.25, 0.75), (0.5, None), (1.25, 1.5), (0.0, 2.0)]:
        part = read_audio(path, sample_rate=24_000, span=(start, end))
        expected = whole[round(start * 24_000) : None if end is None else round(end * 24_000)]
        assert part.shape == expected.shape
        assert np.abs(part - expected).max() <= tolerance


def test_a_span_resampled_matches_the_whole_resampled(tmp_path: Path) -> None:
    path = tmp_path / "tone.wav"
    write_audio(path, sine(1.0, 44_100), 44_100)
    part, whole = read_audio(path, span=(0.25, 0.75)), read_audio(path)
    assert part.shape == (12_000,)
    assert np.abs(part - whole[6_000:18_000])[1_000:-1_000].max() < 1e-3


@pytest.mark.parametrize(
    "span", [(0.5, 1.5), (1.0, None), (0.4, 0.4), (0.6, 0.2), (-0.1, 0.5), (2.0, 3.0), (0.5, np.inf), (np.nan, None)]
)
def test_a_span_outside_the_recording_is_refused(tmp_path: Path, span: tuple[float, float | None]) -> None:
    path = tmp_path / "tone.wav"
    write_audio(path, sine(1.0, 8_000), 8_000)
    with pytest.raises(AudioError, match=r"tone\.wav: bad span") as caught:
        read_audio(path, span=span)
    assert caught.value.hint


def broken(folder: Path) -> dict[str, tuple[Path, str]]:
    """A file for each flaw."""
    files = {
        name: folder / name
        for name in (
            "garbage.wav",
            "empty.wav",
            "no-frames.wav",
            "nan.wav",
            "inf.wav",
            "cut.flac",
            "cut.mp3",
            "no-length.flac",
        )
    }
    files["garbage.wav"].write_bytes(b"this is not a recording" * 9)
    files["empty.wav"].write_bytes(b"")
    soundfile.write(files["no-frames.wav"], np.zeros(0, np.float32), 8_000)
    for name, value in (("nan.wav", np.nan), ("inf.wav", np.inf)):
        soundfile.write(files[name], np.array([0.0, value, 0.0], np.float32), 8_000, subtype="FLOAT")
    for name in ("cut.flac", "cut.mp3"):
        write_audio(files[name], sine(2.0, 24_000), 24_000)
        data = files[name].read_bytes()
        files[name].write_bytes(data[: len(data) // 2])
    write_audio(files["no-length.flac"], sine(1.0, 24_000), 24_000)
    streamed = bytearray(files["no-length.flac"].read_bytes())
    streamed[21] &= 0xF0  # the count of samples in the header, as an encoder leaves it that writes to a pipe
    streamed[22:26] = bytes(4)
    files["no-length.flac"].write_bytes(streamed)
    flaws = ["unreadable audio", "zero length", "zero length", "NaN samples", "NaN samples"]
    flaws += ["unreadable audio", "cut short", "unreadable audio"]
    return {path.name: (path, flaw) for path, flaw in zip(files.values(), flaws, strict=True)}


def test_each_flaw_is_named_with_the_file(tmp_path: Path) -> None:
    for name, (path, flaw) in broken(tmp_path).items():
        for open_it in (read_audio, check_audio):
            with pytest.raises(AudioFileError, match=f"{name}: {flaw}") as caught:
                open_it(path)
            assert caught.value.defect == flaw and caught.value.hint


@pytest.mark.parametrize(
    ("kind", "subtype"),
    [
        *[("WAV", subtype) for subtype in ("PCM_16", "PCM_24", "FLOAT", "ULAW", "IMA_ADPCM")],
        *[(kind, "PCM_16") for kind in ("WAVEX", "RF64", "W64", "AIFF", "AU", "SVX")],
    ],
)
def test_a_header_that_promises_more_than_the_file_holds_is_named(tmp_path: Path, kind: str, subtype: str) -> None:
    path = tmp_path / f"cut.{kind.lower()}"
    soundfile.write(path, sine(2.0, 24_000), 24_000, format=kind, subtype=subtype)
    whole = path.read_bytes()
    assert probe(path).seconds == pytest.approx(2, abs=0.1)
    path.write_bytes(whole[: len(whole) * 9 // 10])
    for open_it in (probe, check_audio, read_audio):
        with pytest.raises(AudioFileError, match=r"cut short: ends after 1\.\d+ of 2\.\d+ s") as caught:
            open_it(path)
        assert caught.value.defect == "cut short" and caught.value.hint
    path.write_bytes(whole[:-2])
    assert check_audio(path).seconds == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize("size", [0xFFFF_FFFF, 0x7FFF_FFFF, 0x7FFF_F000, 0x7FFF_EFFE])
def test_a_wav_written_to_a_pipe_is_whole(tmp_path: Path, size: int) -> None:
    path = tmp_path / "streamed.wav"
    write_audio(path, sine(1.0, 24_000), 24_000)
    data = bytearray(path.read_bytes())
    data[4:8], data[40:44] = (min(size + 36, 0xFFFF_FFFF).to_bytes(4, "little"), size.to_bytes(4, "little"))
    path.write_bytes(data)
    assert check_audio(path) == probe(path) == AudioInfo(1.0, 24_000, 1)


def test_silence_is_told_from_quiet_speech_as_a_whole_and_in_parts(tmp_path: Path) -> None:
    silence, quiet = np.zeros(24_000, np.float32), sine(1.0, 24_000, level=0.003)
    hum = np.random.default_rng(0).uniform(-5e-4, 5e-4, 24_000).astype(np.float32)
    for name, samples, is_silent in [
        ("zeros", silence, True),
        ("noise floor", hum, True),
        ("constant", silence + 0.1, True),
        ("quiet", quiet, False),
        ("word", np.concatenate([silence, quiet[:1000]]), False),
        ("opposite", np.stack([quiet, -quiet], axis=1), True),
    ]:
        path = tmp_path / f"{name}.wav"
        write_audio(path, samples, 24_000)
        assert check_audio(path).is_silent() is is_silent, name
        if is_silent:
            with pytest.raises(AudioFileError, match=rf"{name}\.wav: silence: nothing in it is louder than -60 dB"):
                check_not_silent(path, read_audio(path))
        else:
            check_not_silent(path, read_audio(path))
    write_audio(path, np.concatenate([quiet, silence, quiet]), 24_000)
    info = check_audio(path)
    parts = [(0.0, 1.0), (1.0, 2.0), (1.5, 1.501), (2.0, None), (0.9, 1.1), (2.9999, None)]
    assert [info.is_silent(*part) for part in parts] == [False, True, True, False, False, False]


def test_what_is_too_long_is_refused_undecoded(tmp_path: Path) -> None:
    path = tmp_path / "hours.wav"
    write_audio(path, sine(1.0, 24_000), 24_000)
    header, size = bytearray(path.read_bytes()[:44]), 3 * 3600 * 24_000 * 2
    header[4:8], header[40:44] = (size + 36).to_bytes(4, "little"), size.to_bytes(4, "little")
    with path.open("wb") as file:
        file.write(header)
        file.truncate(44 + size)  # a file with holes: half a gigabyte that takes no room
    with pytest.raises(AudioError, match=r"hours\.wav: too long: 10800\.0 s, and at most 30 s are read") as caught:
        read_audio(path, max_seconds=30)
    assert "-t 30" in caught.value.hint
    assert len(read_audio(path, span=(9_000.0, 9_030.0), max_seconds=30)) == 30 * 24_000


@pytest.mark.parametrize("name", ["gone.wav", ".", "x" * 5_000])
def test_what_is_no_file_is_missing(tmp_path: Path, name: str) -> None:
    with pytest.raises(AudioError, match="missing file"):
        probe(tmp_path / name)


def test_wav_is_written_as_16_bit(tmp_path: Path) -> None:
    write_audio(tmp_path / "deep" / "a.wav", sine(0.1, 8_000), 8_000)
    assert soundfile.info(tmp_path / "deep" / "a.wav").subtype == "PCM_16"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.opus"
    write_audio(path, sine(0.1, 24_000), 24_000)
    before = path.read_bytes()
    with pytest.raises(soundfile.SoundFileError):
        write_audio(path, sine(0.1, 44_100), 44_100)  # a rate that Opus does not have
    with pytest.raises(AudioError, match="NaN"):
        write_audio(path, np.array([np.nan], np.float32), 24_000)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_unknown_suffix_is_refused_with_those_we_know(tmp_path: Path) -> None:
    with pytest.raises(AudioError, match=r"`\.aac`") as caught:
        write_audio(tmp_path / "a.aac", sine(0.1, 8_000), 8_000)
    assert ".flac" in caught.value.hint


def test_blocks_are_read_without_seeking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # After a seek, libsndfile decodes the frames before it again, and its MP3 decoder complains on the terminal.
    soundfile.write(tmp_path / "long.mp3", np.zeros(24_000 * 60), 24_000)
    moves = []
    seek = soundfile.SoundFile.seek

    def watched(file: soundfile.SoundFile, frames: int, whence: int = soundfile.SEEK_SET) -> int:
        moves.append(whence == soundfile.SEEK_SET)
        return int(seek(file, frames, whence))

    monkeypatch.setattr(soundfile.SoundFile, "seek", watched)
    with stream_audio(tmp_path / "long.mp3") as (_, blocks):
        assert len(list(blocks)) > 1
    assert moves and not any(moves)


def test_the_pages_of_a_long_recording_are_not_gone_through_for_every_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "long.opus"
    write_audio(path, sine(20, 24_000), 24_000)
    opened, real = [], Path.open
    monkeypatch.setattr(Path, "open", lambda self, *args, **rest: opened.append(self) or real(self, *args, **rest))  # type: ignore[func-returns-value]
    for start in range(10):
        read_audio(path, span=(start, start + 1))
    assert len(opened) == 1
