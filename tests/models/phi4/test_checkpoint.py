"""Weights: every key accounted for, the adapter for speech merged, and the vision encoder left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Phi4MultimodalForCausalLM

from myna.core.errors import CheckpointError, ModelError
from myna.models import open_family
from myna.models.phi4.family import Phi4
from myna.models.phi4.tiny import save_tiny

WEIGHTS = "model.safetensors"


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def change(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return open_family(str(folder)).load_model(dtype=dtype, device="cpu", text_head=False)


def test_weights_are_those_on_disk_without_the_vision_encoder(folder: Path) -> None:
    model, stored = load(folder), load_file(folder / WEIGHTS)
    state = model.state_dict()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in state.items())
    assert all("image_embed" in name or "vision_speech" in name for name in stored.keys() - state.keys())


def test_a_missing_or_strange_tensor_is_named(copied: Path) -> None:
    stored = load_file(copied / WEIGHTS)
    stored["model.layers.9.mlp.down_proj.weight"] = stored.pop("model.layers.1.mlp.down_proj.weight")
    save_file(stored, copied / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.1.*\n.*1 unexpected: model\.layers\.9"):
        open_family(str(copied)).check_weights()


def test_pickles_are_refused(copied: Path) -> None:
    (copied / WEIGHTS).rename(copied / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles"):
        load(copied)


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    model = load(save_tiny(tmp_path / "tied", tied=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_adapter_for_speech_is_merged(copied: Path) -> None:
    """The adapter is saved by PEFT in the folder of the released checkpoint."""
    plain = load(copied)
    base = Phi4MultimodalForCausalLM.from_pretrained(copied)
    adapter = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["qkv_proj", "down_proj"]))
    torch.manual_seed(1)
    for name, parameter in adapter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapter.save_pretrained(copied / "speech-lora")
    due, merged = adapter.merge_and_unload().state_dict(), load(copied).state_dict()
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, due[name])
    name = "model.layers.0.self_attn.qkv_proj.weight"
    assert not torch.allclose(merged[name], plain.state_dict()[name])
    assert "with an adapter for speech" in open_family(str(copied)).check_weights()

    file = copied / "speech-lora" / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.lost.lora_A.weight": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError, match="belong to no layer"):
        load(copied)


def test_a_saved_model_is_complete(family: Phi4, folder: Path, model: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    family.save_model(model, tmp_path / "saved")
    saved, before = load_file(tmp_path / "saved" / WEIGHTS), load_file(folder / WEIGHTS)
    assert saved.keys() == before.keys()
    assert {name for name in saved if not torch.equal(saved[name], before[name])} == {"lm_head.weight"}
    again = open_family(str(tmp_path / "saved"))
    assert again.load_encoder().revision == family.load_encoder().revision
    assert again.prompt_revision == family.prompt_revision


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"sliding_window": 16}, "sliding_window is 16"),
        ({"vocab_size": 9}, "audio_token_id is"),
    ],
)
def test_an_impossible_configuration_is_refused(copied: Path, settings: dict[str, Any], told: str) -> None:
    change(copied, **settings)
    with pytest.raises(ModelError, match=told):
        open_family(str(copied))


def test_the_true_size_is_known_without_a_download() -> None:
    family = open_family("phi-4-multimodal")
    model = family.load_model(dtype=torch.bfloat16, device="meta", text_head=True)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert not family.has_weights and 4.2e9 < count < 4.4e9, "5.6 billion less what sees and the two adapters"
