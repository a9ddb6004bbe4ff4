"""Decoding of many windows: each as transformers decodes it alone, with zeros past its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from myna.models.higgs_v2 import codec as codec_module
from myna.models.higgs_v2 import tiny
from myna.models.higgs_v2.codec import FRAME_BUCKETS, BatchedDecoder, HiggsCodec, WindowDecoder
from myna.speak.streaming import CodeStream, decode_streams

FRAMES = (24, 1, 11, 84, 3, 60, FRAME_BUCKETS[-1] + 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_tiny_codec(tmp_path_factory.mktemp("codec"))


@pytest.fixture
def codec(folder: Path) -> HiggsCodec:
    return HiggsCodec.open(folder)


def windows(*frames: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 64, (count, 8)).astype(np.uint16) for count in frames or FRAMES]


@torch.inference_mode()
def test_windows_of_unequal_length_are_those_of_transformers(codec: HiggsCodec) -> None:
    model = codec._model.double()
    decoder, given = BatchedDecoder(model), windows()
    codes = torch.zeros(len(given), max(FRAMES), 8, dtype=torch.int64)
    for row, window in zip(codes, given, strict=True):
        row[: len(window)] = torch.from_numpy(window.astype(np.int64))
    waves = decoder(codes, torch.tensor(FRAMES))
    for wave, row, frames in zip(waves, codes, FRAMES, strict=True):
        alone = model.decode(row[None, :frames].transpose(1, 2)).audio_values[0, 0].clamp(-1, 1)
        torch.testing.assert_close(wave[: frames * 960], alone, atol=1e-9, rtol=0)


def test_windows_come_back_in_their_order(codec: HiggsCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    given = windows(*FRAMES * 3)
    alone = [codec._decode_window(window) for window in given]
    monkeypatch.setattr(codec_module, "supports_triton", lambda _weight: True)
    together = codec.decode_windows(given)()
    for one, other in zip(alone, together, strict=True):
        assert one.shape == other.shape and np.abs(one - other).max() < 1e-3


def test_tables_are_computed_in_full_precision(codec: HiggsCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that allows TF32 elsewhere must not change what the codec computes."""
    build, seen = BatchedDecoder.__init__, list[str]()

    def watch(self: BatchedDecoder, model: Any) -> None:
        seen.append(torch.get_float32_matmul_precision())
        build(self, model)

    monkeypatch.setattr(BatchedDecoder, "__init__", watch)
    monkeypatch.setattr(codec_module, "supports_triton", lambda _weight: True)
    monkeypatch.setattr(codec, "_window_decoder", None)
    torch.set_float32_matmul_precision("medium")
    try:
        codec.decode_windows(windows(5))
        assert seen == ["highest"] and torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_where_fp16_overflows_a_window_is_decoded_in_fp32(codec: HiggsCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    given = windows(5, 30, 6)
    alone = codec._decode_window(given[1])
    forward = BatchedDecoder.forward

    def overflow(self: BatchedDecoder, codes: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        waves = forward(self, codes, lengths)
        waves[lengths == 30, -1000:] = torch.nan
        waves[lengths == 30, :1000] = torch.inf
        return waves

    monkeypatch.setattr(BatchedDecoder, "forward", overflow)
    monkeypatch.setattr(codec_module, "supports_triton", lambda _weight: True)
    together = codec.decode_windows(given)()
    assert np.array_equal(together[1], alone) and all(np.isfinite(samples).all() for samples in together)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_window_does_not_depend_on_its_company(folder: Path, codec: HiggsCodec) -> None:
    there, given = HiggsCodec.open(folder, device="cuda"), windows(*FRAMES * 3)
    together = there.decode_windows(given)()
    assert isinstance(there._window_decoder, WindowDecoder)
    for window, samples in zip(given, together, strict=True):
        assert np.array_equal(samples, there.decode_windows([window])()[0])
        assert np.abs(samples - codec._decode_window(window)).max() < 1e-3
    for frames in (1, 13, 131, 400):
        (codes,) = windows(frames)
        whole, file = there.decode_windows([codes])()[0], there.decode(codes)
        stream = CodeStream(there)
        stream.push(codes)
        stream.end()
        assert np.array_equal(file, whole) and np.array_equal(file, decode_streams(there, [stream])()[0])
