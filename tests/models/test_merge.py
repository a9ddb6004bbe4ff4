"""Merged models, the hash of a base model, and the folders of adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from myna.core.config import AdaptSettings, Quantization
from myna.core.errors import CheckpointError, ModelError
from myna.models import open_family, save_tiny_model
from myna.models.base import Family
from myna.models.files import METADATA_FILE, WeightsMetadata, adapter_base, find_adapter, read_metadata, save_metadata
from myna.models.lora import (
    base_model_hash,
    frozen_linear_names,
    load_adapter,
    make_trainable,
    save_adapter,
    trains_text_head,
    weights_hash,
)
from myna.models.merge import merge_adapter, probe_logits, verify_written
from myna.models.quantized import quantize, quantized_linears
from tests.models.helpers import load_model, random_adapter


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return open_family(str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", ["none", "fp8", "int8", "nf4"])
@pytest.mark.parametrize("text_head", [False, True])
def test_a_base_model_has_the_hash_that_its_training_has(
    family: Family, tmp_path: Path, dtype: torch.dtype, quantization: Quantization, text_head: bool
) -> None:
    settings = AdaptSettings(rank=4, train_modules=("audio_head", "text_head") if text_head else ("audio_head",))
    model = load_model(family, dtype, text_head=text_head)
    quantize(model, quantization, frozen_linear_names(model, family, settings), "cpu")
    model = make_trainable(model, family, settings)
    family.objective(model, fused_lora=True)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    expected = weights_hash([*frozen, *(layer.weight_sample() for layer in quantized_linears(model))])
    save_adapter(model, tmp_path)
    usage: dict[str, Any] = {"dtype": dtype, "quantization": quantization, "text_head": text_head}
    for loaded in (load_model(family, dtype, text_head=True), load_model(family, text_head=True)):
        assert base_model_hash(loaded, family, tmp_path, **usage) == expected
        loaded.audio_lm_head.weight.data[0, 0] += 1
        assert base_model_hash(loaded, family, tmp_path, **usage) != expected
    assert trains_text_head(tmp_path, family) == text_head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_merge_check_describes_the_comparison(family: Family, tmp_path: Path, dtype: torch.dtype) -> None:
    adapter = random_adapter(family, tmp_path / "adapter", 0.1)
    model = load_adapter(load_model(family, dtype, text_head=True), adapter)
    check = merge_adapter(family, model, tmp_path / "merged")
    merged = open_family(str(tmp_path / "merged"))
    assert {tensor.dtype for tensor in load_model(merged, None, text_head=True).parameters()} == {dtype}
    assert check.logits == len(probe_logits(merged, load_model(merged, None, text_head=True)))
    assert check.dtype == str(dtype).removeprefix("torch.")
    assert 0 <= check.largest_difference <= 0.05 * check.largest_logit and check.lost_share < 0.5


def test_a_wrong_merge_is_found(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = random_adapter(family, tmp_path / "adapter")
    model = load_adapter(load_model(family), adapter)
    # One layer is left out.
    monkeypatch.setattr("myna.models.lora._merge_layer", lambda layer: layer.merged_adapters.append("default"))
    with pytest.raises(ModelError, match="more than rounding to float32 explains"):
        merge_adapter(family, model, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_changed_file_is_found(family: Family, tmp_path: Path) -> None:
    tensors = dict(family.save_model(load_model(family), tmp_path / "saved"))
    verify_written(tmp_path / "saved", tensors)
    file = tmp_path / "saved" / "model.safetensors"
    stored = load_file(file)
    name = sorted(stored)[0]
    changed = stored[name].clone()
    changed.view(-1).view(torch.uint8)[0] ^= 1
    save_file(stored | {name: changed}, file)
    with pytest.raises(CheckpointError, match="was read back otherwise than it was written"):
        verify_written(tmp_path / "saved", tensors)
    save_file({key: tensor for key, tensor in stored.items() if key != name}, file)
    with pytest.raises(CheckpointError, match="was written with other tensors"):
        verify_written(tmp_path / "saved", tensors)


def test_an_adapter_is_found_in_a_run(family: Family, tmp_path: Path) -> None:
    adapter = random_adapter(family, tmp_path / "run" / "adapter")
    assert find_adapter(tmp_path / "run") == find_adapter(str(adapter)) == adapter
    assert adapter_base(adapter) == (family.source, None)
    with pytest.raises(ModelError, match=r"is no adapter: it has no adapter_config\.json"):
        find_adapter(family.source)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").touch()
    with pytest.raises(ModelError, match="is a run that is not finished"):
        find_adapter(tmp_path / "begun")
    (tmp_path / "begun" / "model").mkdir()
    with pytest.raises(ModelError, match="was trained in full, and has no LoRA"):
        find_adapter(tmp_path / "begun")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": None}))
    with pytest.raises(CheckpointError, match="does not name its base model"):
        adapter_base(adapter)


def test_metadata_is_read_as_it_was_written_or_refused(tmp_path: Path) -> None:
    assert read_metadata(tmp_path) is None
    metadata = WeightsMetadata(source="owner/name", scene="A cave.", inputs={"codec": "c0de"})
    save_metadata(tmp_path, metadata)
    assert read_metadata(tmp_path) == metadata
    (tmp_path / METADATA_FILE).write_text('{"of_a_later_version": 1}')
    assert read_metadata(tmp_path) == WeightsMetadata()
    (tmp_path / METADATA_FILE).write_text('{"reference_placement": "anywhere"}')
    with pytest.raises(ModelError, match="`reference_placement`"):
        read_metadata(tmp_path)
