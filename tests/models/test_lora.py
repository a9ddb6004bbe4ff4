"""Adapters on the tiny model: added, trained for a step, saved, opened, merged, and refused when they are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import HiggsAudioV2ForConditionalGeneration

from myna.core.config import AdaptSettings
from myna.core.errors import CheckpointError, ConfigError, ModelError, TrainingError
from myna.models import lora
from myna.models.higgs_v2.family import MODULES, HiggsV2
from myna.models.higgs_v2.tiny import tiny_config
from myna.models.lora import count_parameters, load_adapter, make_trainable, merge_lora, save_adapter

CONFIG = tiny_config()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread: matrices this small lose more to waiting threads than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


FAMILY = HiggsV2("someone/tiny-higgs", CONFIG, None)


def make_model(*, text_head: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = HiggsAudioV2ForConditionalGeneration(CONFIG, use_text_head=text_head)
    return model.to(dtype).eval()


def make_inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 256, (1, 12), generator=generator)
    ids[0, 5:10] = CONFIG.audio_token_id
    return {
        "input_ids": ids,
        "audio_input_ids": torch.randint(0, 64, (1, 5, 8), generator=generator),
        "audio_input_ids_mask": torch.ones(1, 5, dtype=torch.bool),
    }


@torch.no_grad()
def logits_of(model: nn.Module) -> torch.Tensor:
    logits: torch.Tensor = model.eval()(**make_inputs()).logits
    return logits


def train(model: nn.Module, steps: int = 3) -> nn.Module:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    for _ in range(steps):
        output = model.train()(**make_inputs())
        loss = output.logits.float().logsumexp(-1).sum() / 100
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


HEADS = ("audio_head", "audio_embedding")
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "lora_with_heads": {"train_modules": HEADS},
    "rslora_with_heads": {"rslora": True, "train_modules": HEADS, "mode": "audio_focused"},
    "dora_with_heads": {"dora": True, "train_modules": HEADS, "dropout": 0.1},
    "lora_with_norms_and_text_embedding": {"train_modules": ("norms", "text_embedding")},
    "custom": {"mode": "custom", "targets": ("layers.1.audio_mlp.up_proj",), "train_modules": ("audio_head",)},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def adapted(kind: str, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    return make_trainable(make_model(dtype=dtype), FAMILY, AdaptSettings(rank=4, **KINDS[kind]))


@every_kind
def test_a_fresh_adapter_changes_nothing_and_needs_no_labels(kind: str) -> None:
    torch.testing.assert_close(logits_of(adapted(kind)), logits_of(make_model()), atol=1e-5, rtol=1e-5)


@every_kind
def test_a_step_changes_only_trainable_parameters(kind: str) -> None:
    model = adapted(kind)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == trainable
    assert all("lora_" in name or "modules_to_save" in name for name in trainable)


@every_kind
def test_a_saved_adapter_gives_the_same_logits(kind: str, tmp_path: Path) -> None:
    model = train(adapted(kind))
    save_adapter(model, tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    expected = logits_of(model)
    assert not torch.allclose(expected, logits_of(make_model()), atol=1e-3)

    opened = load_adapter(make_model(), tmp_path / "adapter")
    assert torch.equal(logits_of(opened), expected)
    assert not any(parameter.requires_grad for parameter in opened.parameters())
    by_peft = PeftModel.from_pretrained(make_model(), tmp_path / "adapter")
    assert torch.equal(logits_of(by_peft), expected)


@every_kind
def test_a_merged_adapter_gives_the_same_logits(kind: str) -> None:
    model = train(adapted(kind))
    expected = logits_of(model)
    merged = merge_lora(model)
    assert type(merged) is HiggsAudioV2ForConditionalGeneration
    assert {name for name, _ in merged.named_parameters()} == {name for name, _ in make_model().named_parameters()}
    torch.testing.assert_close(logits_of(merged), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "lora_with_heads"])
def test_a_scaled_adapter_lies_between_base_and_tuned(kind: str) -> None:
    base, whole = make_model().state_dict(), merge_lora(train(adapted(kind))).state_dict()
    for strength in (0.0, 0.25, 1.0):
        merged = merge_lora(train(adapted(kind)), strength).state_dict()
        for name, weight in merged.items():
            torch.testing.assert_close(weight, torch.lerp(base[name], whole[name], strength), atol=1e-6, rtol=1e-5)
    assert any(not torch.equal(base[name], whole[name]) for name in base)


def test_a_dora_cannot_be_scaled() -> None:
    with pytest.raises(ModelError, match="applied as a whole"):
        merge_lora(train(adapted("dora")), 0.5)


@pytest.mark.parametrize("kind", ["lora_with_heads", "dora_with_heads"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trainables_are_fp32_on_a_half_precision_base(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = adapted(kind, dtype=dtype)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else dtype), name
    save_adapter(model, tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "adapter_model.safetensors").values()} == {torch.float32}


def test_full_training_is_fp32_but_for_what_is_frozen() -> None:
    settings = AdaptSettings(mode="full", freeze=("text_embedding", "text_ffn"))
    model = make_trainable(make_model(dtype=torch.bfloat16), FAMILY, settings)
    assert type(model) is HiggsAudioV2ForConditionalGeneration
    for name, parameter in model.named_parameters():
        frozen = "embed_tokens" in name or ".mlp." in name
        assert parameter.requires_grad is not frozen, name
        assert parameter.dtype == (torch.bfloat16 if frozen else torch.float32), name


def test_full_training_steps() -> None:
    model = make_trainable(
        make_model(text_head=False), FAMILY, AdaptSettings(mode="full", freeze=("norms", "text_head"))
    )
    before = logits_of(model)
    assert not torch.equal(logits_of(train(model)), before)


@pytest.mark.parametrize("kind", ["lora_with_heads", "dora_with_heads"])
def test_opened_on_a_bf16_base_it_runs_without_autocast(kind: str, tmp_path: Path) -> None:
    save_adapter(train(adapted(kind)), tmp_path)
    opened = load_adapter(make_model(dtype=torch.bfloat16), tmp_path)
    types = {("lora_" in name, parameter.dtype) for name, parameter in opened.named_parameters()}
    assert types == {(False, torch.bfloat16), (True, torch.float32)}, "a LoRA is rounded once, when it is merged"
    expected = logits_of(load_adapter(make_model(), tmp_path))
    assert (logits_of(opened).float() - expected).abs().max() < 0.05 * expected.abs().max()


def test_a_bf16_model_merges_into_bf16() -> None:
    merged = merge_lora(adapted("lora_with_heads", dtype=torch.bfloat16))
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in merged.parameters())


def test_merged_weights_are_rounded_once(tmp_path: Path) -> None:
    save_adapter(train(adapted("lora_with_heads")), tmp_path)
    exact = merge_lora(load_adapter(make_model(dtype=torch.bfloat16).float(), tmp_path)).state_dict()
    merged = merge_lora(load_adapter(make_model(dtype=torch.bfloat16), tmp_path)).state_dict()
    assert all(torch.equal(merged[name], tensor.bfloat16()) for name, tensor in exact.items())


def test_the_saved_configuration_is_plain_and_stable(tmp_path: Path) -> None:
    save_adapter(adapted("lora_with_heads"), tmp_path / "a")
    save_adapter(adapted("lora_with_heads"), tmp_path / "b")
    config = (tmp_path / "a" / "adapter_config.json").read_text()
    assert config == (tmp_path / "b" / "adapter_config.json").read_text()
    found = json.loads(config)
    assert found["base_model_name_or_path"] == "someone/tiny-higgs"
    assert found["task_type"] is None
    assert found["inference_mode"] is True
    assert found["modules_to_save"] == ["audio_lm_head", "model.embed_audio_tokens.embed_audio_tokens"]


def test_a_save_that_fails_leaves_the_last_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = train(adapted("lora"))
    save_adapter(model, tmp_path)
    expected = logits_of(model)

    def fill_the_disk(_: object, path: Path, **__: object) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(lora, "save_file", fill_the_disk)
    with pytest.raises(OSError, match="No space"):
        save_adapter(train(model), tmp_path)
    assert torch.equal(logits_of(load_adapter(make_model(), tmp_path)), expected)


def test_counts() -> None:
    base = count_parameters(make_model())
    counts = count_parameters(adapted("lora_with_heads"))
    copies = 2 * 64 * 8 * 66
    assert base.lora == 0
    assert counts.trainable == counts.lora + copies
    assert counts.total == base.total + counts.lora + copies


# Refusals


@pytest.mark.parametrize("key", ["train_modules", "freeze"])
def test_an_unknown_part_is_refused_with_the_nearest(key: str) -> None:
    settings = AdaptSettings.model_validate(
        {"mode": "full" if key == "freeze" else "attention_only", key: ["audio_hed"]}
    )
    with pytest.raises(ConfigError) as caught:
        make_trainable(make_model(), FAMILY, settings)
    assert f"`adapt.{key}`" in caught.value.what
    assert "`audio_head`" in caught.value.hint


def test_an_unknown_name_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"known: text_embedding, .*audio_head"):
        make_trainable(make_model(), FAMILY, AdaptSettings(train_modules=("zzz",)))


def test_a_text_head_that_was_not_loaded_cannot_be_trained() -> None:
    with pytest.raises(ConfigError, match=r"loss\.text_weight above 0"):
        make_trainable(make_model(text_head=False), FAMILY, AdaptSettings(train_modules=("text_head",)))


def test_a_part_is_trained_in_full_or_with_a_lora() -> None:
    with pytest.raises(ConfigError, match=r"`model\.layers\.0\.self_attn\.q_proj`"):
        make_trainable(make_model(), FAMILY, AdaptSettings(mode="attention_only", train_modules=("attention",)))


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to train"):
        make_trainable(
            make_model(), FAMILY, AdaptSettings(mode="full", freeze=tuple(MODULES.module_names(make_model())))
        )


def test_a_target_without_a_layer_is_refused() -> None:
    with pytest.raises(ModelError, match=r"`self_attn\.q_proj`"):
        make_trainable(make_model(), FAMILY, AdaptSettings(mode="custom", targets=("self_attn.q_porj",)))


@pytest.mark.parametrize("kind", ["lora", "dora", "lora_with_heads", "dora_with_heads"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_that_changes_nothing_is_refused(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_adapter(adapted(kind, dtype=dtype), tmp_path)
    with pytest.raises(ModelError, match="changes nothing"):
        load_adapter(make_model(dtype=dtype), tmp_path)


def test_a_trained_head_counts_as_an_effect(tmp_path: Path) -> None:
    model = adapted("lora_with_heads")
    with torch.no_grad():
        model.get_parameter("base_model.model.audio_lm_head.modules_to_save.default.weight")[0, 0] += 1
    save_adapter(model, tmp_path)
    load_adapter(make_model(), tmp_path)


def tampered(folder: Path, change: Any) -> Path:
    save_adapter(train(adapted("lora_with_heads"), steps=1), folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(change(tensors), folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: {name.replace("base_model.model.", ""): value for name, value in t.items()}, "missing.*unexpected"),
        (
            lambda t: {name: value for name, value in t.items() if "audio_lm_head" not in name},
            "missing: .*audio_lm_head",
        ),
        (lambda t: t | {"base_model.model.model.layers.9.x": torch.ones(1)}, "unexpected: .*layers.9"),
        (lambda t: {name: value[:2] if "lora_A" in name else value for name, value in t.items()}, "another shape"),
        (lambda t: {name: value * float("nan") for name, value in t.items()}, "not finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        load_adapter(make_model(), tampered(tmp_path, change))


def test_an_adapter_with_a_text_head_needs_one(tmp_path: Path) -> None:
    model = make_trainable(make_model(), FAMILY, AdaptSettings(train_modules=("text_head",)))
    save_adapter(model, tmp_path)
    with pytest.raises(CheckpointError, match="text_lm_head"):
        load_adapter(make_model(text_head=False), tmp_path)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    save_adapter(train(adapted("lora")), tmp_path)
    with pytest.raises(CheckpointError, match="someone/tiny-higgs"):
        load_adapter(nn.Sequential(nn.Linear(4, 4)), tmp_path)


def test_files_without_an_adapter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        load_adapter(make_model(), tmp_path / "nowhere")
    save_adapter(adapted("lora"), tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match="damaged"):
        load_adapter(make_model(), tmp_path)
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="pickle"):
        load_adapter(make_model(), tmp_path)
    save_adapter(adapted("lora"), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "IA3", "target_modules": config["target_modules"]})
    )
    with pytest.raises(ModelError, match="IA3"):
        load_adapter(make_model(), tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        load_adapter(make_model(), tmp_path)


def test_a_model_without_an_adapter_has_none_to_save_or_merge(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no adapter"):
        save_adapter(make_model(), tmp_path)
    with pytest.raises(ModelError, match="no adapter"):
        merge_lora(make_model())


def test_a_foreign_adapter_with_a_task_type_injects_no_labels(tmp_path: Path) -> None:
    model = train(adapted("lora"))
    save_adapter(model, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task_type": "CAUSAL_LM"}))
    opened = load_adapter(make_model(), tmp_path)
    assert type(opened) is PeftModel
    assert torch.equal(logits_of(opened), logits_of(model))
