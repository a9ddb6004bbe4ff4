"""Extraction of a LoRA from full training: exact if possible, else the nearest of its rank, and all losses reported."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import HiggsAudioV2ForConditionalGeneration

from myna.core.config import AdaptSettings
from myna.core.errors import CheckpointError, ConfigError, OutputError
from myna.models import merge as merge_module
from myna.models import open_family
from myna.models.higgs_v2.family import MODULES, HiggsV2
from myna.models.higgs_v2.tiny import save_tiny, tiny_config
from myna.models.lora import load_adapter, merge_lora
from myna.models.merge import extract_adapter, fit_lora

CONFIG = tiny_config()


FAMILY = HiggsV2("someone/tiny-higgs", CONFIG, None)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = HiggsAudioV2ForConditionalGeneration(CONFIG, use_text_head=False)
    return model.to(dtype).eval()


@torch.no_grad()
def tuned_from(base: nn.Module, *, rank: int | None, others: tuple[str, ...] = ()) -> nn.Module:
    """Return a model whose projections have an update of a rank, or of full rank; `others` are parameters that change
    too."""
    tuned, dice = copy.deepcopy(base), torch.Generator().manual_seed(1)
    for name in MODULES.lora_targets(base, "comprehensive").adapted:
        weight = tuned.get_parameter(f"{name}.weight")
        rows, columns = weight.shape
        inner = rank or columns
        left, right = torch.randn(rows, inner, generator=dice), torch.randn(inner, columns, generator=dice)
        weight.add_(0.02 * (left if rank is None else left @ right))
    for name in others:
        parameter = tuned.get_parameter(name)
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=dice))
    return tuned


def settings(rank: int, **changes: Any) -> AdaptSettings:
    return AdaptSettings(rank=rank, **changes)


@torch.no_grad()
def distance(one: nn.Module, other: nn.Module) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("changes", [{}, {"alpha": 3.0}, {"rslora": True}], ids=["plain", "alpha", "rslora"])
@pytest.mark.parametrize("rank", [4, 7])
def test_an_update_of_a_rank_is_recovered(rank: int, changes: dict[str, Any]) -> None:
    base = make_model()
    tuned = tuned_from(base, rank=4)
    model, report = fit_lora(copy.deepcopy(base), tuned, FAMILY, settings(rank, **changes))
    assert isinstance(model, PeftModel)
    assert report.error < 1e-5 and max(report.modules.values()) < 1e-5
    assert set(report.modules) == set(MODULES.lora_targets(base, "comprehensive").adapted)
    assert report.left == {} and report.copied == ()
    assert distance(base, tuned) > 0.01
    assert distance(merge_lora(model), tuned) < 1e-5


@torch.no_grad()
def test_the_error_falls_with_the_rank_as_far_as_the_singular_values_say() -> None:
    base = make_model()
    tuned = tuned_from(base, rank=None)
    errors, name = [], "model.layers.1.audio_mlp.up_proj"
    values = torch.linalg.svdvals(tuned.get_parameter(f"{name}.weight") - base.get_parameter(f"{name}.weight"))
    for rank in (1, 4, 16, 48):
        _, report = fit_lora(copy.deepcopy(base), tuned, FAMILY, settings(rank))
        best = float(values[rank:].norm() / values.norm())
        assert report.modules[name] == pytest.approx(best, abs=1e-4), "no update of that rank is nearer"
        errors.append(report.error)
    assert errors == sorted(errors, reverse=True) and errors[0] > 0.9 and errors[-1] < 0.3
    _, report = fit_lora(copy.deepcopy(base), tuned, FAMILY, settings(128))
    assert report.error < 1e-5, "with all ranks there is nothing to miss"


def test_few_singular_values_of_a_large_weight_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    decaying = torch.randn(400, 300) @ torch.diag(torch.logspace(0, -2, 300)) @ torch.randn(300, 300)
    exact = merge_module._low_rank_factors(decaying, 8)
    monkeypatch.setattr(merge_module, "MAX_EXACT_SVD_SIZE", 0)
    state = torch.get_rng_state()
    quick, again = merge_module._low_rank_factors(decaying, 8), merge_module._low_rank_factors(decaying, 8)
    assert torch.equal(torch.get_rng_state(), state), "the dice of the caller stay where they are"
    assert all(torch.equal(one, other) for one, other in zip(quick, again, strict=True))
    sizes = [float((decaying - left @ right).norm()) for left, right in (exact, quick)]
    assert sizes[1] == pytest.approx(sizes[0], rel=1e-3)


def test_changes_outside_of_a_lora_are_copied_or_reported() -> None:
    base = make_model()
    others = ("audio_lm_head.weight", "model.layers.0.input_layernorm.weight")
    tuned = tuned_from(base, rank=2, others=others)
    _, report = fit_lora(copy.deepcopy(base), tuned, FAMILY, settings(2))
    assert report.left.keys() == set(others) and all(change > 0.01 for change in report.left.values())
    assert report.error > 0.01 and max(report.modules.values()) < 1e-5

    chosen = settings(2, train_modules=("audio_head", "norms"))
    model, report = fit_lora(copy.deepcopy(base), tuned, FAMILY, chosen)
    assert report.left == {} and report.error < 1e-5
    assert "audio_lm_head" in report.copied and "model.norm" in report.copied
    assert distance(merge_lora(model), tuned) < 1e-5


def test_changes_outside_the_mode_are_reported() -> None:
    base = make_model()
    _, report = fit_lora(copy.deepcopy(base), tuned_from(base, rank=2), FAMILY, settings(2, mode="attention_only"))
    assert all("self_attn" in name for name in report.modules)
    assert len(report.left) == 2 * 6 and all("mlp" in name for name in report.left)
    assert 0.1 < report.error < 1


def test_models_that_are_equal_have_nothing_to_extract() -> None:
    base = make_model()
    model, report = fit_lora(copy.deepcopy(base), base, FAMILY, settings(2))
    assert report.error == 0 and set(report.modules.values()) == {0.0}
    assert distance(merge_lora(model), base) == 0


def test_half_precision_models_are_compared_in_full() -> None:
    base = make_model(torch.bfloat16)
    tuned = tuned_from(base, rank=None)
    model, report = fit_lora(copy.deepcopy(base), tuned, FAMILY, settings(64))
    assert report.error < 1e-5
    assert {p.dtype for name, p in model.named_parameters() if "lora_" in name} == {torch.float32}
    assert distance(merge_lora(model).float(), tuned.float()) < 2e-3, "but for the last bit of bf16"


def test_unsupported_extractions_are_refused() -> None:
    base = make_model()
    with pytest.raises(ConfigError, match=r"adapt\.dora"):
        fit_lora(base, base, FAMILY, settings(2, dora=True))
    with pytest.raises(ConfigError, match=r"adapt\.mode: full"):
        fit_lora(base, base, FAMILY, settings(2, mode="full"))
    narrow: nn.Module = HiggsAudioV2ForConditionalGeneration(tiny_config(hidden=32), use_text_head=False)
    with pytest.raises(CheckpointError, match=r"not of one shape: .* is \(\d+, 64\) and \(\d+, 32\)"):
        fit_lora(base, narrow, FAMILY, settings(2))


# From folder to folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a checkpoint and of a full training of it."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "base")
    family = open_family(str(folder / "base"))
    base = family.load_model(dtype=torch.float32, device="cpu", text_head=False)
    others = ("audio_lm_head.weight", "model.norm.weight", "model.embed_tokens.weight")
    family.save_model(tuned_from(base, rank=3, others=others), folder / "tuned")
    return folder


def test_an_adapter_is_written_that_any_peft_program_opens(folders: Path, tmp_path: Path) -> None:
    report = extract_adapter(str(folders / "base"), str(folders / "tuned"), tmp_path / "adapter", 3)
    assert report["error"] < 1e-5 and report["left"] == {} and report["rank"] == 3
    assert {"audio_lm_head", "model.norm", "model.embed_tokens"} <= set(report["copied"]), "found by itself"
    family = open_family(str(folders / "base"))
    tuned = open_family(str(folders / "tuned")).load_model(dtype=torch.float32, device="cpu", text_head=False)

    def base() -> nn.Module:
        return family.load_model(dtype=torch.float32, device="cpu", text_head=False)

    assert distance(merge_lora(load_adapter(base(), tmp_path / "adapter")), tuned) < 1e-5
    by_peft = PeftModel.from_pretrained(base(), str(tmp_path / "adapter")).merge_and_unload()
    assert distance(by_peft, tuned) < 1e-5


def test_nothing_is_overwritten(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        extract_adapter(str(folders / "base"), str(folders / "tuned"), tmp_path, 3)
