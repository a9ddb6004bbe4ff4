"""Modules of each LoRA mode, on the tiny model and at true size."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import HiggsAudioV2ForConditionalGeneration

from myna.core.errors import ModelError
from myna.models.higgs_v2.family import MODULES, builtin_config
from myna.models.higgs_v2.tiny import tiny_config


def on_meta(*, true_size: bool = False, text_head: bool = True) -> nn.Module:
    config = builtin_config() if true_size else tiny_config()
    with torch.device("meta"):
        model: nn.Module = HiggsAudioV2ForConditionalGeneration(config, use_text_head=text_head)
    return model


@pytest.mark.parametrize(
    ("mode", "selected", "adapted"),
    [("comprehensive", 282, 280), ("audio_focused", 141, 140), ("attention_only", 112, 112)],
)
def test_modes_on_the_true_size(mode: str, selected: int, adapted: int) -> None:
    targets = MODULES.lora_targets(on_meta(true_size=True), mode)
    assert (len(targets.selected), len(targets.adapted)) == (selected, adapted)
    assert set(targets.adapted) < set(targets.selected) or selected == adapted


def test_heads_are_selected_but_never_adapted() -> None:
    targets = MODULES.lora_targets(on_meta(), "comprehensive")
    assert set(targets.selected) - set(targets.adapted) == {"text_lm_head", "audio_lm_head"}
    targets = MODULES.lora_targets(on_meta(), "audio_focused")
    assert set(targets.selected) - set(targets.adapted) == {"audio_lm_head"}


def test_a_text_head_that_was_not_loaded_is_not_selected() -> None:
    assert "text_lm_head" not in MODULES.lora_targets(on_meta(text_head=False), "comprehensive").selected


def test_audio_focused_leaves_the_text_path_alone() -> None:
    adapted = MODULES.lora_targets(on_meta(), "audio_focused").adapted
    assert {name.split(".", 3)[3] for name in adapted} == {
        "self_attn.q_proj",
        "self_attn.v_proj",
        "audio_mlp.gate_proj",
        "audio_mlp.up_proj",
        "audio_mlp.down_proj",
    }


def test_custom_targets_match_whole_ends_of_names() -> None:
    assert MODULES.lora_targets(on_meta(), "custom", ["mlp.up_proj", "layers.1.self_attn.q_proj"]).adapted == (
        "model.layers.0.mlp.up_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    )


@pytest.mark.parametrize(
    ("ending", "nearest"),
    [
        ("qproj", "`q_proj`"),
        ("audio_mlp.gate", "`audio_mlp.gate_proj`"),
        ("c_attn_xyz", "`self_attn.q_proj`"),
        ("", "mlp"),
    ],
)
def test_a_custom_end_that_meets_nothing_is_refused_with_the_nearest(ending: str, nearest: str) -> None:
    with pytest.raises(ModelError) as caught:
        MODULES.lora_targets(on_meta(), "custom", ["self_attn.q_proj", ending])
    assert f"`{ending}`" in caught.value.what
    assert nearest in caught.value.hint


def test_a_custom_end_that_means_a_head_is_refused_with_the_way_to_train_it() -> None:
    with pytest.raises(ModelError, match=r"train_modules: \[audio_head\]"):
        MODULES.lora_targets(on_meta(), "custom", ["audio_lm_head"])


def test_every_parameter_belongs_to_one_part() -> None:
    model = on_meta()
    parts = MODULES.module_names(model)
    for name, _ in model.named_parameters():
        owners = [part for part, modules in parts.items() if any(name.startswith(f"{module}.") for module in modules)]
        assert len(owners) == 1, (name, owners)


def test_short_names() -> None:
    parts = MODULES.module_names(on_meta())
    assert parts["audio_embedding"] == ("model.embed_audio_tokens.embed_audio_tokens",)
    assert parts["text_head"] == ("text_lm_head",)
    assert parts["audio_head"] == ("audio_lm_head",)
    assert parts["attention"] == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert len(parts["norms"]) == 2 * 4 + 1
    assert MODULES.module_names(on_meta(text_head=False))["text_head"] == ()
