"""Streaming: the samples are those of the file, in pieces of any size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import myna
from myna.audio.files import read_audio
from myna.data.codec import Codec, Codes, PendingSamples, Samples
from myna.models import SHIPPED, open_codec
from myna.models.codecs import FIRST_WINDOW, MAX_WINDOW, plan_windows, probe_window_independence
from myna.models.higgs_v2.tiny import save_tiny_codec
from myna.speak.engine import encode_clip
from myna.speak.streaming import CodeStream, decode_streams, warm_up

RECORDINGS = Path(myna.__file__).parent / "demo" / "recordings"
CODECS = ["fledgling", "higgs"]


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Codec]:
    """Codecs: that of fledgling, and a tiny one with the layout of Higgs."""
    tiny: Path = save_tiny_codec(tmp_path_factory.mktemp("codec"))
    return {"fledgling": open_codec(SHIPPED["fledgling"] / "codec"), "higgs": open_codec(tiny)}


@pytest.mark.parametrize(("name", "reach"), [("fledgling", 15), ("higgs", 10)])
def test_the_reach_is_measured(codecs: dict[str, Codec], name: str, reach: int) -> None:
    codec = codecs[name]
    codes = random_codes(codec, 61)
    other = codes.copy()
    other[30] = (codes[30] + 7) % codec.codebook_size
    one, two = (codec.decode_windows([given])()[0].reshape(61, -1) for given in (codes, other))
    changed = np.flatnonzero((one != two).any(1)) - 30
    assert codec.decode_reach == reach and (changed.min(), changed.max()) == (-reach, reach)


def random_codes(codec: Codec, frames: int, seed: int = 0) -> Codes:
    shape = (frames, codec.codebooks)
    return np.random.default_rng(seed).integers(0, codec.codebook_size, shape).astype(np.uint16)


def streamed(codec: Codec, codes: Codes, cuts: Sequence[int]) -> list[Samples]:
    stream, samples = CodeStream(codec), list[Samples]()
    for piece in np.split(codes, sorted(cuts)):
        stream.push(piece)
        samples += decode_streams(codec, [stream])()
    stream.end()
    return [*samples, *decode_streams(codec, [stream])()]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("frames", [0, 1, 2, 3, 12, 13, 17, 40])
def test_frame_by_frame_and_at_once_are_the_file(codecs: dict[str, Codec], name: str, frames: int) -> None:
    codec = codecs[name]
    codes = random_codes(codec, frames)
    file = codec.decode(codes)
    assert file.shape == (frames * codec.hop,)
    for pieces in (1, max(1, frames)):
        cuts = range(1, pieces)
        assert np.array_equal(np.concatenate(streamed(codec, codes, cuts)), file)


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_pieces_are_the_file(codecs: dict[str, Codec], name: str, data: st.DataObject) -> None:
    codec = codecs[name]
    frames = data.draw(st.integers(0, 160), "frames")
    cuts = data.draw(st.lists(st.integers(0, frames), max_size=20), "cuts")
    codes = random_codes(codec, frames, seed=frames)
    assert np.array_equal(np.concatenate(streamed(codec, codes, cuts)), codec.decode(codes))


@pytest.mark.parametrize("name", CODECS)
def test_windows_leave_no_step(codecs: dict[str, Codec], name: str) -> None:
    """Compare a stream with one window of all its frames, to a step of 16-bit audio."""
    codec = codecs[name]
    codes = random_codes(codec, 160)
    whole = codec.decode_windows([codes])()[0]
    joined = np.concatenate(streamed(codec, codes, range(1, 160)))
    assert np.abs(joined - whole).max() < 2**-15


def test_the_end_of_a_clip_has_no_hiss(codecs: dict[str, Codec]) -> None:
    """The decoder reads zeros after the end. With the last frame repeated there, the last 300 ms stay the same for a
    recording that ends in silence; in noise they become other noise that is no softer."""
    codec, tail = codecs["fledgling"], round(0.3 * 24_000)
    ends_in_silence = []
    for recording in sorted(RECORDINGS.glob("*.opus"))[:6]:
        original = read_audio(recording, sample_rate=codec.sample_rate)
        codes = encode_clip(codec, original)
        clip = codec.decode(codes)
        repeated = codec.decode(np.concatenate([codes, np.repeat(codes[-1:], codec.decode_reach, axis=0)]))[: len(clip)]
        assert decibels(clip[-tail:]) < decibels(repeated[-tail:]) + 1, recording.name
        ends_in_silence.append(decibels(original[len(clip) - tail : len(clip)]) < -50)
        if ends_in_silence[-1]:
            assert decibels((clip - repeated)[-tail:]) < -50, f"dB of full scale in {recording.name}"
    assert sum(ends_in_silence) >= 4


def decibels(samples: Samples) -> float:
    return float(10 * np.log10(np.mean(samples**2) + 1e-12))


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_streams_in_one_call_are_their_files(codecs: dict[str, Codec], name: str, data: st.DataObject) -> None:
    codec = codecs[name]
    lengths = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=4), "lengths")
    cancelled = data.draw(st.sampled_from([None, *range(len(lengths))]), "cancelled")
    codes = [random_codes(codec, frames, seed) for seed, frames in enumerate(lengths)]
    streams = [CodeStream(codec, streamed=number % 2 == 0) for number in range(len(codes))]
    samples = [np.zeros(0, np.float32) for _ in codes]
    while not all(stream.finished for stream in streams):
        running = [number for number, stream in enumerate(streams) if not stream.finished]
        for number in running:
            if cancelled == number and streams[number].frames > lengths[number] // 2:
                streams[number].end()
                codes[number] = codes[number][: streams[number].frames]
                continue
            size = data.draw(st.integers(0, 30), "frames that came")
            piece = codes[number][streams[number].frames :][:size]
            streams[number].push(piece)
            if streams[number].frames == lengths[number]:
                streams[number].end()
        for number, part in zip(running, decode_streams(codec, [streams[n] for n in running])(), strict=True):
            samples[number] = np.concatenate([samples[number], part])
    for own, made in zip(codes, samples, strict=True):
        assert np.array_equal(made, codec.decode(own))


def test_a_codec_with_other_sums_in_long_windows_decodes_files_in_short_ones(
    codecs: dict[str, Codec], monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, lengths = codecs["higgs"], list[int]()
    decode_windows = codec.decode_windows
    monkeypatch.setattr(codec, "_window_decoder", None)  # put back afterwards

    def spied(windows: Sequence[Codes]) -> PendingSamples:
        lengths.extend(len(window) for window in windows)
        return decode_windows(windows)

    codes = random_codes(codec, 45)
    monkeypatch.setattr(codec, "decode_windows", spied)
    monkeypatch.setattr(type(codec), "window_independent", False)
    plain = codec.decode(codes)
    assert lengths[:3] == [codec.decode_reach + known for known in (2, 6, 14)]
    lengths.clear()
    monkeypatch.setattr(type(codec), "window_independent", True)
    assert np.allclose(codec.decode(codes), plain, atol=1e-3) and lengths == [45]


def test_the_probe_sees_a_single_bit(codecs: dict[str, Codec], monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codecs["fledgling"]
    decode_windows = codec.decode_windows

    def rounded(windows: Sequence[Codes]) -> PendingSamples:
        decoded = decode_windows(windows)()
        shortest = min(decoded, key=len)
        shortest[0] = np.nextafter(shortest[0], np.float32(1))
        return lambda: decoded

    monkeypatch.setattr(codec, "decode_windows", rounded)
    assert not probe_window_independence(codec)


def test_the_first_sound_needs_two_frames_and_the_reach(codecs: dict[str, Codec]) -> None:
    codec = codecs["higgs"]
    stream, codes, needed = CodeStream(codec), random_codes(codec, 60), FIRST_WINDOW + codec.decode_reach
    stream.push(codes[: needed - 1])
    assert not len(decode_streams(codec, [stream])()[0])
    stream.push(codes[needed - 1 : needed])
    assert len(decode_streams(codec, [stream])()[0]) == FIRST_WINDOW * codec.hop


def test_warming_up_sees_every_window_of_a_stream(codecs: dict[str, Codec], monkeypatch: pytest.MonkeyPatch) -> None:
    codec, shapes = codecs["higgs"], set[tuple[int, int]]()

    def noted(windows: Sequence[Codes]) -> PendingSamples:
        shapes.add((len(windows), len(windows[0])))
        return lambda: [np.zeros(len(window) * codec.hop, np.float32) for window in windows]

    monkeypatch.setattr(codec, "decode_windows", noted)
    warm_up(codec, streams=5)
    assert {count for count, _ in shapes} == {1, 2, 4}
    assert {frames for _, frames in shapes} == {12, 16, 24, 36, 52, 84, 148}
    shapes.clear()
    warm_up(codec, streams=0)
    assert not shapes


def test_a_stream_keeps_no_more_than_a_window_and_its_context(codecs: dict[str, Codec]) -> None:
    codec = codecs["higgs"]
    stream, codes = CodeStream(codec), random_codes(codec, 2000)
    for frame in codes:
        stream.push(frame[None])
        stream.take_windows()
        assert len(stream._codes) <= MAX_WINDOW + 2 * codec.decode_reach
    assert stream.frames == 2000


@given(reach=st.integers(0, 20), frames=st.integers(0, 1000), pace=st.floats(2, 50))
def test_windows_cover_a_stream_once_and_playback_never_waits(reach: int, frames: int, pace: float) -> None:
    windows = list(plan_windows(reach, 0, frames, ended=True))
    assert [place for window in windows for place in range(window.first, window.last)] == list(range(frames))
    for window in windows:
        assert window.start == max(0, window.first - reach) and window.stop == min(frames, window.last + reach)
        assert window.last - window.first <= MAX_WINDOW
    # Frames are generated at `pace` times the rate of playback, which begins with the first window.
    for before, window in itertools.pairwise(windows):
        assert (window.stop - windows[0].stop) / pace <= before.last + 1e-9
