"""The fast encoder: transformers' own results, whatever shares a batch, and as accurate as fp32 on tensor cores."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from myna.models.higgs_v2.batched_encoder import FastEncoder, FirstProduct, Product, Then, why_not
from myna.models.higgs_v2.codec import HiggsCodec, resample
from myna.models.higgs_v2.tiny import save_tiny_codec


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return HiggsCodec.open(save_tiny_codec(tmp_path_factory.mktemp("codec")))._model


def noise(*frames: int) -> torch.Tensor:
    """Clips of so many frames, each with silence behind it up to the longest."""
    generator = torch.Generator().manual_seed(0)
    waves = torch.zeros(len(frames), 960 * max(frames))
    for wave, count in zip(waves, frames, strict=True):
        wave[: 960 * count] = 0.1 * torch.randn(960 * count, generator=generator)
    return waves


def heard_by_transformers(model: Any, wave: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the quantiser is given of one clip, and the codes."""
    heard: list[torch.Tensor] = []
    hook = model.fc.register_forward_hook(lambda _module, _inputs, out: heard.append(out[0]))
    with torch.inference_mode():
        codes = model.encode(wave[None, None]).audio_codes[0].T
    hook.remove()
    return heard[0], codes


@pytest.mark.parametrize("frames", [(1,), (25, 25), (30, 17, 1, 25), (9, 8, 7)])
def test_it_hears_what_transformers_hears(model: Any, frames: tuple[int, ...]) -> None:
    waves = noise(*frames)
    lengths = torch.tensor(frames) if len(set(frames)) > 1 else None
    with torch.inference_mode():
        heard = FastEncoder(model, resample)(waves, lengths)
    for clip, wave, count in zip(heard, waves, frames, strict=True):
        due, _ = heard_by_transformers(model, wave[: 960 * count])
        torch.testing.assert_close(clip[:count], due, atol=1e-4 * float(due.abs().max()), rtol=0)


def test_what_lies_behind_a_clip_does_not_matter(model: Any) -> None:
    encoder, lengths = FastEncoder(model, resample), torch.tensor([20, 13])
    silent, loud = noise(20, 13), noise(20, 20)
    loud[1, : 13 * 960] = silent[1, : 13 * 960]
    assert loud[1, 13 * 960 :].abs().max() > 0.1
    with torch.inference_mode():
        assert encoder(silent, lengths)[1, :13].equal(encoder(loud, lengths)[1, :13])


def test_another_form_of_hubert_is_named(model: Any) -> None:
    assert why_not(model) is None
    config = model.config.semantic_model_config
    before = config.feat_extract_norm
    config.feat_extract_norm = "layer"
    try:
        assert "HuBERT" in str(why_not(model))
    finally:
        config.feat_extract_norm = before


def test_the_model_stays_as_it_was(tmp_path: Path) -> None:
    codec = HiggsCodec.open(save_tiny_codec(tmp_path))
    before = {name: tensor.clone() for name, tensor in codec._model.state_dict().items()}
    with torch.inference_mode():
        FastEncoder(codec._model, resample)(noise(3))
    after = codec._model.state_dict()
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("then", ["snake", "gelu", "elu", None])
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
    then: Any,
    add: bool,
) -> None:
    torch.manual_seed(0)
    conv = torch.nn.Conv1d(channels, outputs, kernel, stride, padding, dilation, groups).double().requires_grad_(False)
    x, ends = torch.randn(3, 1000, channels), torch.tensor([1000, 517, 1])
    bend: Then = 0.1 + torch.rand(outputs) if then == "snake" else then
    slow = Product.of(conv)
    more = torch.randn(3, min(slow.length(1000), 1000), outputs) if add else None
    true = slow.both(x.double(), ends, add=more, then=bend)
    card_bend = bend.cuda() if isinstance(bend, torch.Tensor) else bend
    card_more = None if more is None else more.cuda()
    fast = Product.of(conv.float().cuda())
    found = fast.both(x.cuda(), ends.cuda(), add=card_more, then=card_bend)
    for mine, due in zip(found, true, strict=True):
        assert relative(mine.cpu(), due) < 5e-7
    assert fast(x.cuda(), ends.cuda(), add=card_more, then=card_bend).equal(found[1])


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [False, True])
def test_the_product_over_samples_is_the_same_on_a_card(normed: bool) -> None:
    torch.manual_seed(0)
    conv = torch.nn.Conv1d(1, 80, 10, 5, 0 if normed else 3).requires_grad_(False)
    norm = torch.nn.GroupNorm(80, 80).requires_grad_(False) if normed else None
    waves, ends, bend = torch.randn(3, 4003), torch.tensor([4003, 2000, 30]), 0.5 + torch.rand(80)
    slow = FirstProduct(conv)(waves, ends, norm=norm, then=bend, keep=True)
    on_card = FirstProduct(conv.cuda())
    fast = on_card(waves.cuda(), ends.cuda(), norm=None if norm is None else norm.cuda(), then=bend.cuda(), keep=True)
    for mine, due in zip(fast, slow, strict=True):
        torch.testing.assert_close(mine.cpu(), due, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_on_a_card_it_hears_what_transformers_hears(model: Any) -> None:
    frames = (30, 17, 1, 25)
    waves, on_card = noise(*frames), copy.deepcopy(model).cuda()
    with torch.inference_mode():
        heard = FastEncoder(on_card, resample)(waves.cuda(), torch.tensor(frames).cuda()).cpu()
    for clip, wave, count in zip(heard, waves, frames, strict=True):
        due, _ = heard_by_transformers(model, wave[: 960 * count])
        torch.testing.assert_close(clip[:count], due, atol=1e-4 * float(due.abs().max()), rtol=0)
