"""Modules of each LoRA mode; parts cover every parameter once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from myna.core.errors import ModelError
from myna.models.phi4.family import Phi4


@pytest.mark.parametrize(("mode", "count"), [("comprehensive", 8), ("attention_only", 4), ("audio_focused", 18)])
def test_modes(family: Phi4, model: Any, mode: str, count: int) -> None:
    targets = family.lora_targets(model, mode)
    assert len(targets.adapted) == count and "lm_head" not in targets.adapted
    hears = ["audio_embed" in name for name in targets.adapted]
    assert all(hears) if mode == "audio_focused" else not any(hears)


def test_every_parameter_belongs_to_one_part(family: Phi4, model: Any) -> None:
    owners: Counter[str] = Counter()
    for names in family.module_names(model).values():
        for name in names:
            owners.update(f"{name}.{inner}" for inner, _ in model.get_submodule(name).named_parameters())
    assert owners == Counter(name for name, _ in model.named_parameters())


def test_a_custom_ending_must_meet_a_layer_and_no_head(family: Phi4, model: Any) -> None:
    assert len(family.lora_targets(model, "custom", ["self_attn.qkv_proj"]).adapted) == 2
    with pytest.raises(ModelError, match=r"ends in `qkv`"):
        family.lora_targets(model, "custom", ["qkv"])
    with pytest.raises(ModelError, match="a head gets no LoRA"):
        family.lora_targets(model, "custom", ["lm_head"])
