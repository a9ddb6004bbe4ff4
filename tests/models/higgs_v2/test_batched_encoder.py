"""The batched encoder gives transformers' results for any batch, and is as accurate as fp32 on tensor cores."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from myna.models.higgs_v2.batched_encoder import Activation, BatchedEncoder, FusedConv, WaveformConv, unsupported_reason
from myna.models.higgs_v2.codec import HiggsCodec, sinc_resample
from myna.models.higgs_v2.tiny import save_tiny_codec


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return HiggsCodec.open(save_tiny_codec(tmp_path_factory.mktemp("codec")))._model


def noise(*frames: int) -> torch.Tensor:
    """Return clips of these numbers of frames, each followed by silence up to the longest."""
    generator = torch.Generator().manual_seed(0)
    waves = torch.zeros(len(frames), 960 * max(frames))
    for wave, count in zip(waves, frames, strict=True):
        wave[: 960 * count] = 0.1 * torch.randn(960 * count, generator=generator)
    return waves


def encoded_by_transformers(model: Any, wave: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of the quantizer for one clip, and the codes."""
    encoded: list[torch.Tensor] = []
    hook = model.fc.register_forward_hook(lambda _module, _inputs, out: encoded.append(out[0]))
    with torch.inference_mode():
        codes = model.encode(wave[None, None]).audio_codes[0].T
    hook.remove()
    return encoded[0], codes


@pytest.mark.parametrize("frames", [(1,), (25, 25), (30, 17, 1, 25), (9, 8, 7)])
def test_the_batched_encoder_equals_transformers(model: Any, frames: tuple[int, ...]) -> None:
    waves = noise(*frames)
    lengths = torch.tensor(frames) if len(set(frames)) > 1 else None
    with torch.inference_mode():
        encoded = BatchedEncoder(model, sinc_resample)(waves, lengths)
    for clip, wave, count in zip(encoded, waves, frames, strict=True):
        due, _ = encoded_by_transformers(model, wave[: 960 * count])
        torch.testing.assert_close(clip[:count], due, atol=1e-4 * float(due.abs().max()), rtol=0)


def test_padding_after_a_clip_does_not_matter(model: Any) -> None:
    encoder, lengths = BatchedEncoder(model, sinc_resample), torch.tensor([20, 13])
    silent, loud = noise(20, 13), noise(20, 20)
    loud[1, : 13 * 960] = silent[1, : 13 * 960]
    assert loud[1, 13 * 960 :].abs().max() > 0.1
    with torch.inference_mode():
        assert encoder(silent, lengths)[1, :13].equal(encoder(loud, lengths)[1, :13])


def test_another_form_of_hubert_is_named(model: Any) -> None:
    assert unsupported_reason(model) is None
    config = model.config.semantic_model_config
    before = config.feat_extract_norm
    config.feat_extract_norm = "layer"
    try:
        assert "HuBERT" in str(unsupported_reason(model))
    finally:
        config.feat_extract_norm = before


def test_the_model_stays_as_it_was(tmp_path: Path) -> None:
    codec = HiggsCodec.open(save_tiny_codec(tmp_path))
    before = {name: tensor.clone() for name, tensor in codec._model.state_dict().items()}
    with torch.inference_mode():
        BatchedEncoder(codec._model, sinc_resample)(noise(3))
    after = codec._model.state_dict()
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("activation_name", ["snake", "gelu", "elu", None])
@pytest.mark.parametrize(
    ("channels", "outputs", "kernel", "stride", "padding", "dilation", "groups"),
    [
        (64, 64, 7, 1, 27, 9, 1),
        (64, 128, 16, 8, 4, 1, 1),
        (512, 512, 3, 2, 0, 1, 1),
        (96, 96, 128, 1, 64, 1, 2),
        (2048, 256, 3, 1, 1, 1, 1),
        (40, 24, 1, 1, 0, 1, 1),
    ],
)
def test_a_product_on_tensor_cores_is_as_good_as_fp32(
    channels: int,
    outputs: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    groups: int,
    activation_name: Any,
    has_residual: bool,
) -> None:
    torch.manual_seed(0)
    conv = torch.nn.Conv1d(channels, outputs, kernel, stride, padding, dilation, groups).double().requires_grad_(False)
    x, ends = torch.randn(3, 1000, channels), torch.tensor([1000, 517, 1])
    activation: Activation = 0.1 + torch.rand(outputs) if activation_name == "snake" else activation_name
    reference = FusedConv.from_conv(conv)
    residual = torch.randn(3, min(reference.length(1000), 1000), outputs) if has_residual else None
    true = reference.with_sum(x.double(), ends, residual=residual, activation=activation)
    cuda_activation = activation.cuda() if isinstance(activation, torch.Tensor) else activation
    cuda_residual = None if residual is None else residual.cuda()
    fused = FusedConv.from_conv(conv.float().cuda())
    found = fused.with_sum(x.cuda(), ends.cuda(), residual=cuda_residual, activation=cuda_activation)
    for mine, due in zip(found, true, strict=True):
        assert relative(mine.cpu(), due) < 5e-7
    assert fused(x.cuda(), ends.cuda(), residual=cuda_residual, activation=cuda_activation).equal(found[1])


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [False, True])
def test_the_product_over_samples_is_the_same_on_a_gpu(normed: bool) -> None:
    torch.manual_seed(0)
    conv = torch.nn.Conv1d(1, 80, 10, 5, 0 if normed else 3).requires_grad_(False)
    norm = torch.nn.GroupNorm(80, 80).requires_grad_(False) if normed else None
    waves, ends, activation = torch.randn(3, 4003), torch.tensor([4003, 2000, 30]), 0.5 + torch.rand(80)
    reference = WaveformConv(conv)(waves, ends, norm=norm, activation=activation, keep=True)
    on_card = WaveformConv(conv.cuda())
    fused = on_card(
        waves.cuda(), ends.cuda(), norm=None if norm is None else norm.cuda(), activation=activation.cuda(), keep=True
    )
    for mine, due in zip(fused, reference, strict=True):
        torch.testing.assert_close(mine.cpu(), due, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_the_batched_encoder_equals_transformers(model: Any) -> None:
    frames = (30, 17, 1, 25)
    waves, on_card = noise(*frames), copy.deepcopy(model).cuda()
    with torch.inference_mode():
        encoded = BatchedEncoder(on_card, sinc_resample)(waves.cuda(), torch.tensor(frames).cuda()).cpu()
    for clip, wave, count in zip(encoded, waves, frames, strict=True):
        due, _ = encoded_by_transformers(model, wave[: 960 * count])
        torch.testing.assert_close(clip[:count], due, atol=1e-4 * float(due.abs().max()), rtol=0)
