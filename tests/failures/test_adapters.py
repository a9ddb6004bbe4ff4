"""Wrapping, loading and training of adapters."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import HiggsAudioV2ForConditionalGeneration

from myna.core.config import AdaptSettings
from myna.core.errors import CheckpointError, ConfigError, ModelError
from myna.core.run_folder import Run
from myna.models import open_family
from myna.models.base import Family
from myna.models.lora import adapter_state_dict, load_adapter, make_trainable, merge_lora, save_adapter
from myna.models.ref import ModelRef
from myna.speak.engine import Engine
from myna.speak.loading import load_engine
from myna.speak.request import SpeechRequest

from .conftest import TrainWith
from .tiny_setup import cloning, load, stock_inputs

LORA = AdaptSettings(rank=4)


def keywords_of(model: Any, call: Any) -> set[str]:
    """Keyword arguments that reach the model during a call."""
    keywords: set[str] = set()
    handle = model.register_forward_pre_hook(lambda _, __, given: keywords.update(given), with_kwargs=True)
    call()
    handle.remove()
    return keywords


def test_a_wrapped_forward_gets_no_additional_labels(family: Family, tmp_path: Path) -> None:
    inputs = stock_inputs(family.render(cloning()))
    base = load(family)
    causal = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    assert "labels" in keywords_of(base, lambda: causal(**inputs)), "the cause: a task type adds keywords of its own"

    core = load(family)
    wrapped = make_trainable(core, family, LORA)
    assert keywords_of(core, lambda: wrapped(**inputs)) == inputs.keys()
    save_adapter(wrapped, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["task_type"] is None


def test_a_task_type_in_a_foreign_adapter_is_dropped(overfitted: Run, family: Family, tmp_path: Path) -> None:
    foreign = Path(shutil.copytree(overfitted.adapter, tmp_path / "adapter"))
    config = json.loads((foreign / "adapter_config.json").read_text())
    (foreign / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM"}))
    inputs = stock_inputs(family.render(cloning()))
    core = load(family)
    opened: Any = load_adapter(core, foreign)
    assert opened.peft_config["default"].task_type is None
    assert keywords_of(core, lambda: opened(**inputs)) == inputs.keys()


@pytest.mark.parametrize("dora", [False, True])
def test_the_contract_is_kept_by_calling_the_model_inside_the_wrapper(family: Family, dora: bool) -> None:
    wrapped = make_trainable(load(family), family, LORA.model_copy(update={"dora": dora}))
    names = inspect.signature(wrapped.forward).parameters
    assert "audio_input_ids" not in names, "the cause: whoever reads the wrapper's signature learns nothing"

    batch = family.collate([family.render(cloning())])
    sums = family.objective(wrapped)(batch).sums
    assert torch.allclose(sums, family.objective(load(family))(batch).sums, atol=1e-4), "as the bare model's"
    sums.sum().backward()
    gradients = [p.grad is not None for p in wrapped.parameters() if p.requires_grad]
    assert all(gradients) and len(gradients) >= 2 * 20


MISSING = "model.layers.1.audio_mlp.up_proj.weight"


def broken(workspace: Path, folder: Path, change: Any, part: str = "") -> Path:
    """A copy of the model with other tensors in its file, or in that of a part of it."""
    copy = Path(shutil.copytree(workspace / "model", folder / "model"))
    file = copy / part / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return copy


def test_a_missing_tensor_is_an_error_and_not_a_random_module(workspace: Path, tmp_path: Path) -> None:
    folder = broken(workspace, tmp_path, lambda tensors: {k: v for k, v in tensors.items() if k != MISSING})
    stock, sound = (
        HiggsAudioV2ForConditionalGeneration.from_pretrained(folder),
        load_file(workspace / "model/model.safetensors"),
    )
    silent = stock.get_parameter(MISSING)
    assert silent.isfinite().all() and not torch.equal(silent, sound[MISSING]), "the cause: it is made up"
    with pytest.raises(CheckpointError, match=rf"1 missing: {MISSING}"):
        load(open_family(str(folder)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t | {"model.layers.2.mlp.up_proj.weight": torch.ones(1)}, r"1 unexpected: model\.layers\.2"),
        (lambda t: t | {MISSING: t[MISSING][:-1].clone()}, r"1 of another shape: .*\(127, 64\) instead of \(128, 64\)"),
    ],
)
def test_tensors_that_have_no_place_are_an_error(workspace: Path, tmp_path: Path, change: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        load(open_family(str(broken(workspace, tmp_path, change))))


def test_a_missing_tensor_of_the_codec_is_an_error(workspace: Path, tmp_path: Path) -> None:
    folder = broken(workspace, tmp_path, lambda t: {k: v for k, v in t.items() if k != "fc2.weight"}, "codec")
    with pytest.raises(CheckpointError, match=r"1 missing: fc2\.weight"):
        open_family(str(folder)).load_encoder()


EVERYTHING = [
    "text_embedding",
    "audio_embedding",
    "attention",
    "text_ffn",
    "audio_ffn",
    "norms",
    "text_head",
    "audio_head",
]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "custom", "targets": ["self_attn.query"]}, r"no linear layer's name ends in `self_attn\.query`"),
        ({"mode": "custom", "targets": ["audio_lm_head"]}, "a head gets no LoRA"),
        ({"mode": "full", "freeze": EVERYTHING}, "nothing to train"),
    ],
)
def test_a_lora_that_meets_nothing_is_refused_before_the_first_step(
    train_with: TrainWith, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises((ModelError, ConfigError), match=said) as caught:
        train_with(adapt=settings)
    assert caught.value.hint


def test_the_trainable_parameters_are_reported_and_change(train_with: TrainWith) -> None:
    run, callback = train_with(train={"steps": 1})
    tensors = load_file(run.adapter / "adapter_model.safetensors")
    count = sum(tensor.numel() for tensor in tensors.values())
    assert any(line.startswith(f"{count:,} of ") and "parameters learn" in line for line in callback.messages)
    assert callback.rows[0]["loss"] > 1 and callback.rows[0]["gradient_norm"] > 0
    assert any(tensor.abs().max() > 0 for name, tensor in tensors.items() if "lora_B" in name)


def logits_of(model: Any, family: Family) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(**stock_inputs(family.render(cloning()))).logits
    return logits


def test_other_key_names_are_an_error_where_peft_only_warns(overfitted: Run, family: Family, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(overfitted.adapter, tmp_path / "adapter"))
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name.replace("model.layers", "layers"): tensor for name, tensor in tensors.items()}, file)

    with pytest.warns(UserWarning, match="missing adapter keys"):
        by_peft = PeftModel.from_pretrained(load(family), str(folder))
    untouched = [module for name, module in by_peft.named_parameters() if "lora_B" in name]
    assert untouched and not any(tensor.any() for tensor in untouched), "the cause: loaded, and nothing changes"
    with pytest.raises(CheckpointError, match=r"does not fit the model; \d+ missing: .*; \d+ unexpected: .*layers\.0"):
        load_adapter(load(family), folder)


def test_an_adapter_that_changes_nothing_is_refused(overfitted: Run, family: Family, tmp_path: Path) -> None:
    save_adapter(make_trainable(load(family), family, LORA), tmp_path)
    with pytest.raises(ModelError, match="changes nothing"):
        load_adapter(load(family), tmp_path)

    idle = Path(shutil.copytree(overfitted.folder, tmp_path / "run"))
    shutil.rmtree(idle / "adapter")
    save_adapter(make_trainable(load(family), family, overfitted.recipe.adapt), idle / "adapter")
    with pytest.raises(ModelError, match="changes nothing"):
        load_engine(ModelRef.find_trained(idle), device="cpu")


def test_a_loaded_adapter_differs_from_the_base_and_merges_to_itself(
    overfitted: Run, family: Family, engine: Engine
) -> None:
    base = logits_of(load(family), family)
    adapted = load_adapter(load(family), overfitted.adapter)
    stored = load_file(overfitted.adapter / "adapter_model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in adapter_state_dict(adapted).items())
    tuned = logits_of(adapted, family)
    assert (tuned - base).abs().max() > 1
    merged = merge_lora(adapted)
    assert type(merged) is HiggsAudioV2ForConditionalGeneration
    assert torch.allclose(logits_of(merged, family), tuned, atol=1e-3, rtol=1e-4)
    assert torch.equal(logits_of(engine.model, family), logits_of(merged, family)), "what `myna speak` opens"

    untuned = Engine(family, load(family), engine.codec)
    lines = [SpeechRequest("hi", temperature=0, max_seconds=0.4)]
    (before,), (after,) = (one.speak(lines) for one in (untuned, engine))
    assert before.codes.tolist() != after.codes.tolist()
