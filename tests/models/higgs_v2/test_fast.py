"""The folded layers must be the plain ones: the same losses, the same gradients, the same weights to save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from myna.config import AdaptSettings
from myna.models.adapting import load_adapter, save_adapter, wrap
from myna.models.higgs_v2.family import HiggsV2
from myna.models.higgs_v2.fast import FoldedLayer
from myna.models.higgs_v2.forward import SortedLayer, core_of

from .conftest import cloning


def adapted(family: HiggsV2, **settings: Any) -> nn.Module:
    """A tiny model with an adapter that does something."""
    model = family.load_model(dtype=torch.float32, device="cpu", text_head=True)
    torch.manual_seed(1)
    wrapped = wrap(model, family, AdaptSettings.model_validate({"rank": 4, **settings}))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return wrapped


def losses_and_gradients(family: HiggsV2, model: nn.Module, fast: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    objective = family.objective(model, fast=fast)
    kind = FoldedLayer if fast else SortedLayer
    assert all(isinstance(layer, kind) for layer in family.layers(objective))
    batch = family.collate([family.render(cloning("one")), family.render(cloning("two", target=11, seed=5))])
    model.zero_grad()
    sums = objective(batch).sums
    sums.sum().backward()
    return sums.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["comprehensive", "audio_focused", "attention_only"])
def test_folded_equals_plain(family: HiggsV2, mode: str) -> None:
    model = adapted(family, mode=mode, rslora=mode == "attention_only")
    plain, plain_gradients = losses_and_gradients(family, model, fast=False)
    fast, fast_gradients = losses_and_gradients(family, model, fast=True)
    assert torch.allclose(plain, fast, atol=1e-4, rtol=1e-5)
    assert plain_gradients.keys() == fast_gradients.keys()
    for name, gradient in plain_gradients.items():
        assert torch.allclose(gradient, fast_gradients[name], atol=1e-4, rtol=1e-4), name


def test_folding_follows_the_adapters(family: HiggsV2) -> None:
    """After an optimizer step the folded buffer must hold the new A and B."""
    model = adapted(family)
    objective = family.objective(model, fast=True)
    batch = family.collate([family.render(cloning("one"))])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        objective(batch).sums.sum().backward()
        optimizer.step()
    with torch.no_grad():
        assert torch.allclose(objective(batch).sums, family.objective(model)(batch).sums, rtol=1e-5)


def test_nothing_is_held_twice_and_checkpoints_stay_what_they_are(family: HiggsV2, tmp_path: Path) -> None:
    model = adapted(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objective = family.objective(model, fast=True)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    weight = core_of(model).model.layers[0].self_attn.q_proj.base_layer.weight
    first = family.layers(objective)[0]
    assert isinstance(first, FoldedLayer) and weight.data_ptr() == first.qkv.folded.data_ptr()
    assert not any("folded" in name for name, _ in objective.named_parameters())
    save_adapter(model, tmp_path / "adapter")
    again = load_adapter(family.load_model(dtype=torch.float32, device="cpu", text_head=True), tmp_path / "adapter")
    batch = family.collate([family.render(cloning("one"))])
    with torch.no_grad():
        assert torch.allclose(objective(batch).sums, family.objective(again)(batch).sums, rtol=1e-5)


@pytest.mark.parametrize("settings", [{"dropout": 0.1}, {"dora": True}, {"mode": "full"}])
def test_what_cannot_be_folded_is_left_as_it_is(family: HiggsV2, settings: dict[str, Any]) -> None:
    objective = family.objective(adapted(family, **settings), fast=True)
    assert all(isinstance(layer, SortedLayer) for layer in family.layers(objective))


@pytest.mark.gpu
def test_compiled_folded_layers_equal_plain_ones_on_a_card(family: HiggsV2) -> None:
    plain_model, fast_model = (adapted(family).to("cuda", torch.bfloat16) for _ in range(2))
    for model in (plain_model, fast_model):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    batch = family.collate([family.render(cloning("one")), family.render(cloning("two", target=11, seed=5))])
    batch = batch.to(torch.device("cuda"))
    results = []
    for model, fast in ((plain_model, False), (fast_model, True)):
        with torch.autocast("cuda", torch.bfloat16):
            sums = family.objective(model, fast=fast)(batch).sums
        sums.sum().backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        results.append((sums.detach(), norm))
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-2)
    assert torch.allclose(results[0][1], results[1][1], rtol=2e-2)
