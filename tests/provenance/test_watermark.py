"""The watermark: numbers of the package it comes from, streams that equal files, and what it is to survive."""

from __future__ import annotations

from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from myna.audio.files import Samples, read_audio
from myna.core.errors import AudioError, MynaError
from myna.provenance import watermark as watermark_module
from myna.provenance.credentials import check_installed
from myna.provenance.watermark import (
    EARLY_HOPS,
    FIRST_BLOCKS,
    MARK_THRESHOLD,
    StreamWatermark,
    detect_spans,
    mark_streams,
    watermark,
    watermark_score,
)

PACKAGE = Path(__file__).with_name("perth_package.npz")
RECORDINGS = Path(watermark_module.__file__).parents[1] / "demo" / "recordings"
MARKED_FROM = 20_000
"""First of the kept samples of tools/watermark_fixture.py: behind the blocks that look less far ahead."""


def vowel(sample_rate: int, seconds: float) -> Samples:
    """Return a synthetic vowel, as in tools/watermark_fixture.py."""
    time = np.arange(round(sample_rate * seconds)) / sample_rate
    phase = 2 * np.pi * np.cumsum(120 + 30 * np.sin(2 * np.pi * 1.3 * time)) / sample_rate
    tone = sum(np.sin(harmonic * phase) / harmonic for harmonic in range(1, 30))
    noise = np.random.default_rng(0).standard_normal(len(time))
    signal: npt.NDArray[np.float64] = 0.1 * tone * (1 + 0.5 * np.sin(2 * np.pi * 3 * time)) + 0.005 * noise
    return signal.astype(np.float32)


def test_numbers_of_the_package() -> None:
    package, signal = np.load(PACKAGE), vowel(32_000, 1.6)
    marked = watermark(signal, 32_000)
    expected = package["marked"]
    difference = np.abs(marked[MARKED_FROM : MARKED_FROM + len(expected)] - expected).max()
    mark = np.abs(expected - signal[MARKED_FROM : MARKED_FROM + len(expected)]).max()
    assert difference < 2e-6 < mark / 1000
    assert watermark_score(signal, 32_000) == pytest.approx(package["scores"][0], abs=1e-4)
    assert watermark_score(marked, 32_000) == pytest.approx(package["scores"][1], abs=1e-4)
    for part, score in zip((0.3, 0.4, 0.5), package["halves"], strict=True):
        # Blocks of the first second do not look ahead: the score differs, but little.
        assert watermark_score(signal + np.float32(part) * (marked - signal), 32_000) == pytest.approx(score, abs=0.03)


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(0, 40_000),
    cuts=st.lists(st.integers(0, 40_000), max_size=12),
    sample_rate=st.sampled_from([8_000, 22_050, 24_000, 44_100]),
    seed=st.integers(0, 100),
)
def test_streams_have_the_bits_of_files(length: int, cuts: list[int], sample_rate: int, seed: int) -> None:
    samples = (0.2 * np.random.default_rng(seed).standard_normal(length)).astype(np.float32)
    whole, stream = watermark(samples, sample_rate), StreamWatermark(sample_rate)
    edges = [0, *sorted(cut for cut in cuts if cut < length), length]
    pieces = [stream.push(samples[first:last]) for first, last in pairwise(edges)]
    streamed = np.concatenate([*pieces, stream.finish()])
    assert len(whole) == length
    assert whole.dtype == np.float32
    assert np.array_equal(streamed, whole)


def test_little_is_held_back_of_a_codecs_windows() -> None:
    """Windows of 2, 4, 8 ... frames of 40 ms: a stream at three times the pace of its playback never waits."""
    stream, known, given = StreamWatermark(24_000), 0.0, 0.0
    for frames in (2, 4, 8, 16, 32, 64, 128, 128):
        window = 0.04 * frames
        assert frames == 2 or (known + window - 0.08) / 3 < given, "the next window comes in time"
        known += window
        given += len(stream.push(vowel(24_000, window))) / 24_000
        assert known - given < (0.021 if known < 1.3 else 0.213)


def test_blocks_that_do_not_look_ahead_leave_no_step() -> None:
    samples = read_audio(sorted(RECORDINGS.glob("*.opus"))[0], sample_rate=24_000)
    steps = np.abs(np.diff(watermark(samples, 24_000) - samples))
    edges = [round((end - 1 + EARLY_HOPS) * 0.01 * 24_000) for end in FIRST_BLOCKS]
    assert max(steps[edge - 2 : edge + 2].max() for edge in edges) < np.quantile(steps, 0.999)


@pytest.mark.parametrize("size", [2, 64])
def test_streams_marked_together_are_those_marked_alone(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stack blocks of several streams and lengths in one call as on a GPU: results differ by rounding only."""
    monkeypatch.setitem(watermark_module.STACKED_BLOCKS, "cpu", size)
    clip = np.tile(vowel(24_000, 3.0), 2)
    lengths = [9_000, 100, 30_000, 0, 144_000, 77_777]
    clips = [clip[start * 500 :][:length] for start, length in enumerate(lengths)]
    streams, pieces = [StreamWatermark(24_000) for _ in clips], [[np.zeros(0, np.float32)] for _ in clips]
    for first in range(0, 144_000, 12_000):
        for stream, one in zip(streams, clips, strict=True):
            stream.add(one[first : first + 12_000], last=first == 132_000)
        for own, marked in zip(pieces, mark_streams(streams), strict=True):
            own.append(marked)
    monkeypatch.undo()
    for one, own in zip(clips, pieces, strict=True):
        assert np.abs(np.concatenate(own) - watermark(one, 24_000)).max(initial=0.0) < 2e-6


@pytest.mark.parametrize("sample_rate", [16_000, 22_050, 24_000, 44_100, 48_000])
def test_detected_in_speech_at_any_rate(sample_rate: int) -> None:
    samples = read_audio(sorted(RECORDINGS.glob("*.opus"))[0], sample_rate=sample_rate)
    marked = watermark(samples, sample_rate)
    assert watermark_score(samples, sample_rate) < 0.2
    assert watermark_score(marked, sample_rate) > 0.9
    assert 20 * np.log10(np.std(marked - samples) / np.std(samples)) < -12


def test_only_the_band_below_2_khz_is_changed() -> None:
    samples = read_audio(sorted(RECORDINGS.glob("*.opus"))[1], sample_rate=24_000)
    mark = watermark(samples, 24_000) - samples

    def share_above(part: npt.NDArray[np.float32]) -> float:
        power = np.square(np.abs(np.fft.rfft(part * np.hanning(len(part)))))
        return float(power[round(2_200 / 12_000 * len(power)) :].sum() / power.sum())

    assert share_above(mark[36_000:]) < 1e-9
    assert share_above(mark[:36_000]) < 5e-6, "the blocks of the first second do not look ahead"


def test_silence_is_left_alone() -> None:
    silence = np.zeros(24_000, np.float32)
    assert np.array_equal(watermark(silence, 24_000), silence)
    assert watermark_score(silence, 24_000) <= MARK_THRESHOLD
    assert watermark_score(silence[:100], 24_000) == 0.0


def test_marked_part_of_a_long_recording_is_found() -> None:
    clip = read_audio(sorted(RECORDINGS.glob("*.opus"))[0], sample_rate=24_000)
    plain = np.resize(clip, 24_000 * 20)
    spans = detect_spans(np.concatenate([plain, watermark(plain, 24_000)]), 24_000)
    assert [span.score > MARK_THRESHOLD for span in spans] == [False, False, True, True]
    assert (spans[0].start, spans[-1].end) == (0.0, 40.0)


@pytest.mark.gpu
def test_the_same_on_a_gpu() -> None:
    samples = read_audio(sorted(RECORDINGS.glob("*.opus"))[0], sample_rate=24_000)
    marked, stream = watermark(samples, 24_000, device="cuda"), StreamWatermark(24_000, device="cuda")
    pieces = [stream.push(samples[first : first + 997]) for first in range(0, len(samples), 997)]
    assert np.abs(np.concatenate([*pieces, stream.finish()]) - marked).max() < 1e-5
    assert np.abs(marked - watermark(samples, 24_000)).max() < 1e-4
    assert watermark_score(marked, 24_000, device="cuda") == pytest.approx(watermark_score(marked, 24_000), abs=0.05)


def test_rates_too_low_are_refused() -> None:
    with pytest.raises(AudioError, match="4000 Hz"):
        StreamWatermark(4_000)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> NoReturn:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(MynaError) as error:
        check_installed()
    assert 'pip install "myna[mark]"' in error.value.hint
    assert "--no-watermark" in error.value.hint


def test_other_weights_are_not_unpickled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "weights.pth.tar"
    other.write_bytes(b"not the file")
    monkeypatch.setattr(watermark_module, "perth_checkpoint", lambda: other)
    with pytest.raises(MynaError, match="sha256"):
        watermark_module.load_perth.__wrapped__(torch.device("cpu"))
