"""Encoding of many clips: each clip gets its own codes, and the batched encoder is only used where it gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from myna.core.errors import AudioError
from myna.data.codec import Samples
from myna.models.higgs_v2 import batched_encoder, tiny
from myna.models.higgs_v2 import codec as codec_module
from myna.models.higgs_v2.batched_encoder import BatchedCodec, BatchedEncoder, synthetic_speech
from myna.models.higgs_v2.codec import HiggsCodec, codec_classes

FRAMES = (7, 25, 7, 1, 40, 13, 25)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_tiny_codec(tmp_path_factory.mktemp("codec"))


@pytest.fixture
def codec(folder: Path) -> HiggsCodec:
    return HiggsCodec.open(folder)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a codec take its device for a GPU with kernels. The batched encoder itself does not, and works in torch."""
    monkeypatch.setattr(codec_module, "supports_triton", lambda _weight: True)
    monkeypatch.setattr(batched_encoder, "PROBE_SECONDS", (3.0, 2.0, 1.0))
    monkeypatch.setattr(batched_encoder, "PROBE_BATCH_SECONDS", 6.0)


def clips(*frames: int) -> list[Samples]:
    return synthetic_speech([960 * count for count in frames or FRAMES], 24_000, seed=1)


def encoded(codec: HiggsCodec, given: list[Samples], seconds: float = 2.0) -> tuple[dict[int, Any], list[str]]:
    said: list[str] = []
    codes: dict[int, Any] = {}
    for places, batch in codec.encode_batches(given, seconds, said.append):
        assert codes.keys().isdisjoint(places)
        codes |= zip(places, batch, strict=True)
    return codes, said


def assert_exact(codec: HiggsCodec, given: list[Samples], codes: dict[int, Any]) -> None:
    assert codes.keys() == set(range(len(given)))
    for place, clip in enumerate(given):
        assert codes[place].dtype == np.uint16
        assert np.array_equal(codes[place], codec.encode(clip[None])[0]), place


def spied(codec: HiggsCodec, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the shapes that are encoded in plain fp32."""
    shapes: list[tuple[int, ...]] = []
    exact = codec.encode

    def encode(given: Any) -> Any:
        shapes.append((given.shape[0], given.shape[1] // 960))
        return exact(given)

    monkeypatch.setattr(codec, "encode", encode)
    return shapes


def test_without_a_gpu_equal_lengths_share_a_batch_without_a_notice(
    codec: HiggsCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_module, "BatchedCodec", None)
    shapes = spied(codec, monkeypatch)
    codes, said = encoded(codec, clips())
    assert shapes == [(1, 40), (2, 25), (1, 13), (2, 7), (1, 1)] and not said
    assert_exact(codec, clips(), codes)


@pytest.mark.usefixtures("card")
def test_unequal_lengths_share_a_batch_and_get_the_same_codes(
    codec: HiggsCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded(codec, clips(1))  # the probe
    shapes = spied(codec, monkeypatch)
    codes, said = encoded(codec, clips(), seconds=4.0)
    assert not shapes and not said
    assert_exact(codec, clips(), codes)


@pytest.mark.usefixtures("card")
def test_batches_follow_from_lengths_alone(codec: HiggsCodec) -> None:
    many = codec._batched_codec(print)
    assert many is not None
    lengths = [960 * count for count in FRAMES]
    assert list(many.batches(lengths, 3.2)) == [[4, 1], [6, 5, 0], [2, 3]]
    assert list(many.batches(lengths, 0.1)) == [[4], [1], [6], [5], [0], [2], [3]]
    assert list(many.batches([], 1.0)) == []


@pytest.mark.usefixtures("card")
def test_the_probe_runs_once(codec: HiggsCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(BatchedCodec, "mismatch_reason", lambda _self, _codec: tried.append(1))
    assert encoded(codec, clips())[0].keys() == encoded(codec, clips())[0].keys()
    assert len(tried) == 1


def spoil(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    forward = BatchedEncoder.forward
    monkeypatch.setattr(
        BatchedEncoder, "forward", lambda self, waves, frames: change(waves, forward(self, waves, frames))
    )


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _waves, heard: heard * 1.05, "of a probe's codes"),
        (lambda _waves, heard: heard * torch.inf, "beyond fp16"),
        (lambda _waves, heard: heard.no_such_kernel, "do not work here (AttributeError"),
    ],
)
def test_a_failed_probe_gives_plain_fp32_and_a_notice(
    codec: HiggsCodec, monkeypatch: pytest.MonkeyPatch, change: Any, reason: str
) -> None:
    spoil(monkeypatch, change)
    codes, said = encoded(codec, clips())
    assert len(said) == 1 and reason in said[0] and "plain fp32" in said[0]
    assert_exact(codec, clips(), codes)
    assert encoded(codec, clips())[1] == []


@pytest.mark.usefixtures("card")
def test_missing_gpu_memory_does_not_change_the_encoder(codec: HiggsCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(_waves: Any, _heard: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    spoil(monkeypatch, out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        encoded(codec, clips())


@pytest.mark.usefixtures("card")
def test_another_form_of_codec_is_encoded_in_plain_fp32(codec: HiggsCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_encoder, "unsupported_reason", lambda _model: "it is of another make")
    monkeypatch.setattr(codec_module, "BatchedCodec", None)
    codes, said = encoded(codec, clips())
    assert "another make" in said[0]
    assert_exact(codec, clips(), codes)


@pytest.mark.usefixtures("card")
def test_clips_that_overflow_fp16_are_encoded_again_and_counted(
    codec: HiggsCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded(codec, clips(1))
    given = clips()
    given[5][100] = 3.0
    spoil(monkeypatch, lambda waves, heard: heard * (torch.inf if waves.max() > 2 else 1.0))
    shapes = spied(codec, monkeypatch)
    codes, said = encoded(codec, given, seconds=3.2)
    # In its batch are one clip of 25 frames and one of 7.
    assert shapes == [(1, 25), (1, 13), (1, 7)]
    assert len(said) == 1 and said[0].startswith("3 clips")
    assert_exact(codec, given, codes)


@pytest.mark.usefixtures("card")
def test_a_clip_too_long_for_the_kernels_is_encoded_in_plain_fp32(
    codec: HiggsCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded(codec, clips(1))
    monkeypatch.setattr(BatchedCodec, "max_samples", property(lambda _self: 30 * 960))
    shapes = spied(codec, monkeypatch)
    codes, _ = encoded(codec, clips())
    assert shapes == [(1, 40)]
    assert_exact(codec, clips(), codes)


@pytest.mark.usefixtures("card")
def test_bad_clips_are_refused_by_both_encoders(codec: HiggsCodec) -> None:
    with pytest.raises(AudioError, match="960"):
        encoded(codec, [np.zeros(961, np.float32)])
    with pytest.raises(AudioError, match="not finite"):
        encoded(codec, [np.full(960, np.nan, np.float32)])


@pytest.mark.usefixtures("card")
def test_no_torch_mode_is_left_on_between_batches(codec: HiggsCodec) -> None:
    for _ in codec.encode_batches(clips(), 1.0, print):
        assert not torch.is_inference_mode_enabled()


def small_config() -> Any:
    """Return a quarter of the true widths and a layer or two: products large enough for every tile."""
    return codec_classes()[0](
        target_bandwidths=[2],
        acoustic_model_config={
            "model_type": "dac",
            "encoder_hidden_size": 16,
            "downsampling_ratios": [8, 5, 4, 2, 3],
            "decoder_hidden_size": 64,
            "upsampling_ratios": [8, 5, 4, 2, 3],
            "hidden_size": 256,
        },
        semantic_model_config={
            "model_type": "hubert",
            "num_hidden_layers": 2,
            "intermediate_size": 1024,
            "conv_dim": [128] * 7,
            "mask_time_prob": 0.0,
        },
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_many_clips_get_the_codes_of_a_cpu() -> None:
    torch.manual_seed(0)
    model = codec_classes()[1](small_config()).eval()
    tiny._calibrate(model)
    here = HiggsCodec(model, "small", torch.device("cpu"))
    given = clips(260, 25, 130, 7, 1, 90, 200, 26, 260, 13)
    due = [here.encode(clip[None])[0] for clip in given]
    there = HiggsCodec(model, "small", torch.device("cuda"))
    codes, said = encoded(there, given, seconds=20.0)
    assert not said and there._batched is not None
    equal = np.concatenate([(codes[place] == own).ravel() for place, own in enumerate(due)])
    assert equal.size == 8 * 1012 and equal.mean() >= 0.999
    again, _ = encoded(there, given, seconds=20.0)
    assert all(np.array_equal(again[place], codes[place]) for place in codes)
