"""Requirements of every codec of 24 kHz and 25 frames a second. Each test module gives its own as fixture `codec`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from myna.core.errors import AudioError, ModelError
from myna.data.codec import Codec
from myna.models.higgs_v2.codec import HiggsCodec

Tensors = dict[str, torch.Tensor]


def edit(folder: Path, change: Callable[[Tensors], Any]) -> Path:
    """Change the weights of the codec in a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def noise(clips: int, frames: int, seed: int = 0) -> Any:
    return (0.1 * np.random.default_rng(seed).standard_normal((clips, frames * 960))).astype(np.float32)


def tone(hertz: float, seconds: float = 1.0, level: float = 0.3) -> Any:
    return (level * np.sin(2 * np.pi * hertz * np.arange(int(24_000 * seconds)) / 24_000)).astype(np.float32)


def random_codes(frames: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 64, (frames, 8)).astype(np.uint16)


class CodecContract:
    def test_properties_of_the_codec(self, codec: Codec) -> None:
        numbers = (codec.sample_rate, codec.hop, codec.frame_rate, codec.codebooks, codec.codebook_size)
        assert numbers == (24_000, 960, 25.0, 8, 64)

    @pytest.mark.parametrize("frames", [1, 2, 3, 7, 26])
    def test_any_whole_number_of_frames_round_trips(self, codec: Codec, frames: int) -> None:
        clips = noise(2, frames)
        codes = codec.encode(clips)
        assert codes.shape == (2, frames, 8) and codes.dtype == np.uint16 and codes.max() < 64
        samples = codec.decode(codes[0])
        assert samples.shape == clips[0].shape and samples.dtype == np.float32
        assert np.isfinite(samples).all() and np.abs(samples).max() <= 1
        assert np.array_equal(samples, codec.decode(codes[0]))

    @pytest.mark.parametrize("frames", [1, 5, 30])
    def test_a_batch_is_its_clips(self, codec: Codec, frames: int) -> None:
        clips = noise(5, frames)
        assert np.array_equal(codec.encode(clips), np.concatenate([codec.encode(clip[None]) for clip in clips]))

    def test_codes_ignore_a_caller_in_half_precision_or_training(self, codec: Codec) -> None:
        clips = noise(1, 10)
        plain, sound = codec.encode(clips), codec.decode(codec.encode(clips)[0])
        torch.set_float32_matmul_precision("medium")
        try:
            with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
                assert np.array_equal(codec.encode(clips), plain)
                assert np.array_equal(codec.decode(plain[0]), sound)
            assert torch.get_float32_matmul_precision() == "medium"
        finally:
            torch.set_float32_matmul_precision("highest")

    @pytest.mark.parametrize("shape", [(1, 959), (1, 961), (1, 0), (0, 960), (960,)])
    def test_clips_not_in_whole_frames_are_refused(self, codec: Codec, shape: tuple[int, ...]) -> None:
        with pytest.raises(AudioError, match="960"):
            codec.encode(np.zeros(shape, np.float32))

    def test_samples_that_are_not_finite_are_refused(self, codec: Codec) -> None:
        clips = noise(1, 2)
        clips[0, 5] = np.nan
        with pytest.raises(AudioError, match="not finite"):
            codec.encode(clips)

    def test_a_frame_reaches_exactly_as_far_as_the_codec_says(self, codec: Codec) -> None:
        reach, codes = codec.decode_reach, random_codes(101)
        other = codes.copy()
        other[50] = (codes[50] + 1) % 64
        one, two = (codec.decode_windows([given])()[0].reshape(101, 960) for given in (codes, other))
        changed = np.flatnonzero((one != two).any(1)) - 50
        # Bits are compared: samples out of reach are computed by the same sums.
        assert (changed.min(), changed.max()) == (-reach, reach)

    @pytest.mark.parametrize("frames", [1, 2, 3, 7, 30, 130, 300])
    def test_windows_give_the_samples_of_one_piece(self, codec: Codec, frames: int) -> None:
        codes = random_codes(frames)
        if isinstance(codec, HiggsCodec):
            codec._model.double()  # untrained layers amplify the rounding of fp32 a thousandfold
        try:
            whole, windows = codec.decode_windows([codes])()[0], codec.decode(codes)
        finally:
            if isinstance(codec, HiggsCodec):
                codec._model.float()
        assert whole.shape == windows.shape == (frames * 960,) and np.abs(whole).max() > 0.01
        assert np.abs(whole - windows).max() < 1e-5

    def test_a_window_does_not_depend_on_its_company(self, codec: Codec) -> None:
        windows = [random_codes(frames, seed) for seed, frames in enumerate((16, 40, 16, 1, 40, 84, 3))]
        together = codec.decode_windows(windows)()
        for window, samples in zip(windows, together, strict=True):
            assert np.array_equal(samples, codec.decode_windows([window])()[0])
        assert codec.decode_windows([])() == []

    def test_codes_outside_the_codebooks_are_refused(self, codec: Codec) -> None:
        with pytest.raises(ModelError, match="0 to 63"):
            codec.decode(np.full((3, 8), 64, np.uint16))
        with pytest.raises(ModelError, match="shape"):
            codec.decode(np.zeros((3, 7), np.uint16))
        assert codec.decode(np.zeros((0, 8), np.uint16)).shape == (0,)
