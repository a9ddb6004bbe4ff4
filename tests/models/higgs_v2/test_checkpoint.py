"""Checkpoints in two layouts: every key is accounted for, and both give the same logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration

from myna.core.errors import CheckpointError, ModelError, OutputError
from myna.models import open_family
from myna.models.base import Sampling, require_speaking
from myna.models.files import load_tokenizer, resolve_checkpoint
from myna.models.higgs_v2.checkpoint import (
    TEXT_HEAD_WEIGHT,
    Layout,
    check_tokenizer,
    convert_layout,
    load_weights,
    meta_model,
    read_config,
    read_sampling,
    save_checkpoint,
)
from myna.models.higgs_v2.tiny import tiny_config, tiny_tokenizer

FIXTURES = Path(__file__).parent / "fixtures"
HEADS = ("audio_lm_head", "text_lm_head")


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """Checkpoint saved by the original implementation (fixtures/make_original.py), with the tokenizer of its ids."""
    folder = Path(shutil.copytree(FIXTURES / "original", tmp_path / "original"))
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(checkpoint: Path, tmp_path: Path) -> Path:
    """Tiny checkpoint in the transformers layout, for tests that damage it."""
    return Path(shutil.copytree(checkpoint, tmp_path / "tiny"))


def load(folder: Path, **how: Any) -> HiggsAudioV2ForConditionalGeneration:
    return load_weights(folder, read_config(folder), **{"dtype": None, "device": "cpu", "text_head": True} | how)


def edit_config(folder: Path, name: str = "config.json", **settings: Any) -> None:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@torch.inference_mode()
def logits(model: Any, ids: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return text logits of every position and audio logits of every frame."""
    core = model.base_model.model if isinstance(model, PeftModel) else model
    here = torch.ones(1, len(codes), dtype=torch.bool)
    hidden = core.model(input_ids=ids, audio_input_ids=codes[None], audio_input_ids_mask=here).last_hidden_state
    audio = core.audio_lm_head(hidden[ids == core.config.audio_token_id])
    return core.text_lm_head(hidden), audio.unflatten(-1, (core.config.num_codebooks, -1))


def probe() -> tuple[torch.Tensor, torch.Tensor]:
    golden = load_file(FIXTURES / "original_forward.safetensors")
    return golden["ids"], golden["codes"]


def same_logits(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(logits(one, *probe()), logits(other, *probe()), strict=True))


class TestGolden:
    def test_original_weights_give_the_original_logits(self, original: Path) -> None:
        """The logits are equal bit for bit where the reference was made (torch 2.13, sdpa); kernels of another CPU may
        differ in the last bits. For comparison: eager instead of sdpa attention differs by 4e-6, swapped norms by 4."""
        golden = load_file(FIXTURES / "original_forward.safetensors")
        text, audio = logits(load(original), golden["ids"], golden["codes"])
        torch.testing.assert_close(text, golden["text_logits"], rtol=0, atol=1e-5)
        torch.testing.assert_close(audio, golden["audio_logits"], rtol=0, atol=1e-5)

    def test_conversion_round_trip(self, original: Path, tmp_path: Path) -> None:
        convert_layout(original, tmp_path / "ours", "transformers")
        convert_layout(tmp_path / "ours", tmp_path / "back", "original")
        before, after = (load_file(folder / "model.safetensors") for folder in (original, tmp_path / "back"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert read_config(tmp_path / "back").to_dict() == read_config(original).to_dict()
        assert same_logits(load(original), load(tmp_path / "back"))

    def test_exported_config_is_the_original_one(self, original: Path, tmp_path: Path) -> None:
        """Every setting that Myna writes has the value that the original implementation wrote."""
        convert_layout(original, tmp_path / "back", "original")
        before, after = (json.loads((folder / "config.json").read_text()) for folder in (original, tmp_path / "back"))
        before_text, after_text = before.pop("text_config"), after.pop("text_config")
        assert after.pop("hidden_size") == 32  # only the released file has it, and its CUDA graphs read it
        assert after == {name: before[name] for name in after}
        assert after_text == {name: before_text[name] for name in after_text}

    def test_split_tensors_are_joined(self, original: Path) -> None:
        whole = load(original)

        def split(tensors: dict[str, torch.Tensor]) -> None:
            for name, kind in (("embed_tokens", "embedding"), ("audio_decoder_proj.text_lm_head", "linear")):
                rows = tensors.pop(f"{name}.weight")
                tensors[f"{name}.{kind}_frozen.weight"] = rows[:200].clone()
                tensors[f"{name}.{kind}_trainable.weight"] = rows[200:].clone()

        edit_tensors(original, split)
        assert same_logits(load(original), whole)
        edit_tensors(original, lambda tensors: tensors.pop("embed_tokens.embedding_trainable.weight"))
        with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight \(200, 32\) instead of \(270, 32\)"):
            load(original)


class TestLoad:
    def test_equals_from_pretrained(self, checkpoint: Path) -> None:
        theirs = HiggsAudioV2ForConditionalGeneration.from_pretrained(checkpoint, use_text_head=True)
        ours = load(checkpoint)
        assert same_logits(ours, theirs.eval())
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        buffers = dict(theirs.named_buffers())
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in ours.named_buffers())
        assert not ours.training
        assert ours.config._attn_implementation == "sdpa"

    def test_saved_in_shards(self, checkpoint: Path, tiny: Path) -> None:
        whole = load(checkpoint)
        (tiny / "model.safetensors").unlink()
        whole.save_pretrained(tiny, max_shard_size="200KB")
        assert len(list(tiny.glob("model-*.safetensors"))) > 1
        assert same_logits(load(tiny), whole)
        next(tiny.glob("model-*.safetensors")).unlink()
        with pytest.raises(CheckpointError, match="lacks files that its index names: model-0"):
            load(tiny)

    def test_dtype(self, tiny: Path) -> None:
        def halve(tensors: dict[str, torch.Tensor]) -> None:
            tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.bfloat16)

        edit_tensors(tiny, halve)
        cast = load(tiny, dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in cast.parameters()} == {torch.bfloat16}
        assert cast.model.rotary_emb.inv_freq.dtype == torch.float32
        assert cast.config.dtype == torch.bfloat16
        kept = load(tiny)
        assert kept.model.norm.weight.dtype == torch.bfloat16
        assert kept.audio_lm_head.weight.dtype == torch.float32

    def test_weights_do_not_depend_on_the_open_file(self, tiny: Path) -> None:
        model = load(tiny)
        before = model.audio_lm_head.weight.clone()
        (tiny / "model.safetensors").write_bytes(b"")
        assert torch.equal(model.audio_lm_head.weight, before)

    def test_meta_reads_nothing(self, tiny: Path) -> None:
        (tiny / "model.safetensors").unlink()
        model = load(tiny, device="meta", dtype=torch.bfloat16, text_head=False)
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        assert model.text_lm_head is None

    def test_text_head(self, tiny: Path) -> None:
        assert load(tiny, text_head=False).text_lm_head is None
        edit_tensors(tiny, lambda tensors: tensors.pop(TEXT_HEAD_WEIGHT))
        assert load(tiny, text_head=False).text_lm_head is None
        with pytest.raises(CheckpointError, match="has no text head"):
            load(tiny)

    def test_missing_unexpected_and_misshapen(self, tiny: Path) -> None:
        def spoil(tensors: dict[str, torch.Tensor]) -> None:
            for name in [name for name in tensors if ".1." in name]:
                del tensors[name]
            tensors["model.layers.7.mlp.gate_proj.weight"] = torch.zeros(2, 2)
            tensors["audio_tower.conv1.bias"] = torch.zeros(2)
            tensors["model.norm.weight"] = torch.zeros(3)

        edit_tensors(tiny, spoil)
        with pytest.raises(CheckpointError) as caught:
            load(tiny)
        lines = caught.value.what.splitlines()
        assert lines[1].startswith("  14 missing: ") and lines[1].endswith(" and 4 more")
        assert lines[2] == "  2 unexpected: audio_tower.conv1.bias, model.layers.7.mlp.gate_proj.weight"
        assert lines[3] == "  1 of another shape: model.norm.weight (3,) instead of (64,)"

    def test_computed_tensors_and_copies_are_accepted(self, tiny: Path) -> None:
        model = load(tiny)

        def add(tensors: dict[str, torch.Tensor]) -> None:
            tensors["rotary_emb.inv_freq"] = torch.zeros(3)
            tensors["audio_codebook_weights"] = torch.zeros(3)
            tensors["audio_decoder_proj.audio_lm_head.weight"] = tensors["audio_lm_head.weight"].clone()

        edit_tensors(tiny, add)
        assert same_logits(load(tiny), model)
        edit_tensors(tiny, lambda tensors: tensors["audio_decoder_proj.audio_lm_head.weight"].add_(1))
        with pytest.raises(CheckpointError, match=r"audio_lm_head.weight more than once, with different values"):
            load(tiny)

    def test_pickles_are_refused(self, tiny: Path) -> None:
        (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="pickles") as caught:
            load(tiny)
        assert "convert them to safetensors" in caught.value.hint

    def test_no_weights_and_damaged_weights(self, tiny: Path) -> None:
        file = tiny / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
        with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
            load(tiny)
        file.unlink()
        with pytest.raises(CheckpointError, match=r"has no model.safetensors"):
            load(tiny)


class TestConfig:
    def test_released_original(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Config with the numbers of the released checkpoint, and the other settings that transformers 4.46 writes."""
        text = {
            **{"model_type": "llama", "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192},
            **{"num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128},
            **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "hidden_act": "silu"},
            **{"bos_token_id": 128000, "eos_token_id": 128001, "pad_token_id": None, "tie_word_embeddings": True},
            **{"torch_dtype": "bfloat16", "top_k": 50, "max_length": 20, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}},
            "rope_scaling": {
                **{"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"},
                "original_max_position_embeddings": 8192,
            },
        }
        stored = {
            **{"model_type": "higgs_audio", "audio_adapter_type": "dual_ffn_fast_forward", "text_config": text},
            **{"audio_dual_ffn_layers": list(range(28)), "audio_num_codebooks": 8, "audio_codebook_size": 1024},
            **{"audio_stream_bos_id": 1024, "audio_stream_eos_id": 1025, "audio_out_token_idx": 128016},
            **{"audio_out_bos_token_id": 128013, "pad_token_id": 128001, "skip_audio_tower": True},
            **{"use_delay_pattern": True, "use_rq_transformer": False, "use_audio_out_self_attention": 0},
        }
        (tmp_path / "config.json").write_text(json.dumps(stored))
        released = {"<|reserved_special_token_6|>": 128014, "<|eot_id|>": 128009}
        tokenizer = type("Released", (), {"get_vocab": lambda _: released})()
        monkeypatch.setattr("myna.models.higgs_v2.checkpoint.load_tokenizer", lambda _: tokenizer)
        config = read_config(tmp_path)
        assert (config.codebook_size, config.eos_token_id, config.audio_delay_token_id) == (1026, 128009, 128014)
        with_head, without = (meta_model(config, text_head=text_head) for text_head in (True, False))
        assert sum(parameter.numel() for parameter in with_head.parameters()) == 5_771_283_456
        assert sum(parameter.numel() for parameter in without.parameters()) == 5_377_281_024
        assert len(with_head.state_dict()) == 397
        # transformers' own conversion writes other numbers for the same rotation.
        theirs = HiggsAudioV2Config(codebook_size=1026)
        rotary = type(with_head.model.rotary_emb)
        assert torch.equal(rotary(config).inv_freq, rotary(theirs).inv_freq)

    @pytest.mark.parametrize(
        "settings",
        [
            {"audio_dual_ffn_layers": [0]},
            {"audio_adapter_type": "stack"},
            {"use_delay_pattern": False},
            {"use_rq_transformer": True},
            {"skip_audio_tower": False},
            {"audio_embed_avg": True},
            {"audio_decoder_proj_num_layers": 2},
            {"use_audio_out_embed_projector": True},
            {"use_audio_out_self_attention": True},
        ],
        ids=lambda settings: next(iter(settings)),
    )
    def test_what_transformers_cannot_express(self, original: Path, settings: dict[str, Any]) -> None:
        edit_config(original, **settings)
        with pytest.raises(ModelError, match=f"{next(iter(settings))} is .*can only express"):
            read_config(original)

    def test_codebook_size_trap(self, tiny: Path) -> None:
        edit_config(tiny, codebook_size=64)
        with pytest.raises(ModelError, match="codebook_size is 64, which leaves no room") as caught:
            read_config(tiny)
        assert "set codebook_size to 66" in caught.value.hint
        shutil.rmtree(tiny)
        HiggsAudioV2Config().save_pretrained(tiny)
        with pytest.raises(ModelError, match="codebook_size is 1024"):
            read_config(tiny)

    @pytest.mark.parametrize(
        ("settings", "told"),
        [
            ({"model_type": "llama"}, "model_type is 'llama'"),
            ({"hidden_size": "wide"}, "hidden_size"),
            ({"hidden_size": 65}, "not a multiple"),
            ({"audio_token_id": 9999}, "audio_token_id is 9999, but vocab_size is 270"),
        ],
    )
    def test_impossible_settings_are_refused(self, tiny: Path, settings: dict[str, Any], told: str) -> None:
        edit_config(tiny, **settings)
        with pytest.raises(ModelError, match=told):
            read_config(tiny)

    def test_unreadable(self, tiny: Path) -> None:
        (tiny / "config.json").write_text("{")
        with pytest.raises(ModelError, match=r"config.json cannot be read"):
            read_config(tiny)


class TestTokenizer:
    def test_fits(self, checkpoint: Path) -> None:
        check_tokenizer(read_config(checkpoint), load_tokenizer(checkpoint))

    def test_released_tokenizer_has_no_pad_and_another_end(self) -> None:
        """The released tokenizer's `eos_token` is <|end_of_text|>, while the configuration ends on <|eot_id|>; a wrong
        bos is harmless."""
        tokenizer = tiny_tokenizer()
        tokenizer.pad_token, tokenizer.eos_token = None, "<|end_of_text|>"
        config = tiny_config()
        config.bos_token_id = 1
        check_tokenizer(config, tokenizer)

    @pytest.mark.parametrize(
        ("setting", "token"),
        [
            ("audio_token_id", "<|AUDIO_OUT|>"),
            ("audio_bos_token_id", "<|audio_out_bos|>"),
            ("audio_delay_token_id", "<|reserved_special_token_6|>"),
            ("eos_token_id", "<|eot_id|>"),
        ],
    )
    def test_mismatched_id(self, setting: str, token: str) -> None:
        config = tiny_config()
        setattr(config, setting, 3)
        with pytest.raises(ModelError) as caught:
            check_tokenizer(config, tiny_tokenizer())
        assert f"{setting} is 3, but {token} is {tiny_tokenizer().convert_tokens_to_ids(token)}" in caught.value.what

    def test_too_small_a_vocabulary(self) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens(["<|more|>"])
        with pytest.raises(ModelError, match="the tokenizer has 271 tokens, but vocab_size is 270"):
            check_tokenizer(tiny_config(), tokenizer)

    def test_token_that_is_split(self, tiny: Path) -> None:
        file = tiny / "tokenizer.json"
        file.write_text(file.read_text().replace("<|eom_id|>", "<|eom|>"))
        with pytest.raises(ModelError, match=r"no single token <\|eom_id\|>"):
            check_tokenizer(read_config(tiny), load_tokenizer(tiny))

    @pytest.mark.parametrize("text", ["", "{", "{}", "[1]", '{"model": 3}'])
    def test_damaged(self, tiny: Path, text: str) -> None:
        (tiny / "tokenizer.json").write_text(text)
        with pytest.raises(ModelError, match=r"tokenizer.json cannot be read"):
            load_tokenizer(tiny)

    def test_missing(self, tiny: Path) -> None:
        (tiny / "tokenizer.json").unlink()
        with pytest.raises(ModelError, match=r"tokenizer.json is missing"):
            load_tokenizer(tiny)


class TestSave:
    def test_round_trip(self, checkpoint: Path, tmp_path: Path) -> None:
        model, tokenizer = load(checkpoint), load_tokenizer(checkpoint)
        save_checkpoint(model, tmp_path / "original", tokenizer, layout="original")
        save_checkpoint(load(tmp_path / "original"), tmp_path / "ours", load_tokenizer(tmp_path / "original"))
        before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "ours"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert same_logits(model, load(tmp_path / "ours"))
        again = HiggsAudioV2ForConditionalGeneration.from_pretrained(tmp_path / "ours", use_text_head=True)
        assert same_logits(model, again)
        assert again.generation_config.ras_win_len == 7
        text = "<|AUDIO_OUT|> tôi nói"
        assert load_tokenizer(tmp_path / "ours").encode(text) == tokenizer.encode(text)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["original", "ours"], "no temporary folder is left"

    @pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 20, 0.9, 5, 3), Sampling(0.0)])
    def test_sampling_settings_round_trip(self, checkpoint: Path, tmp_path: Path, sampling: Sampling) -> None:
        save_checkpoint(load(checkpoint), tmp_path / "saved", load_tokenizer(checkpoint), sampling)
        convert_layout(tmp_path / "saved", tmp_path / "again", "transformers")
        for folder in ("saved", "again"):
            assert require_speaking(open_family(str(tmp_path / folder))).sampling == sampling

    def test_missing_sampling_settings_have_defaults(self, checkpoint: Path) -> None:
        (checkpoint / "generation_config.json").write_text('{"top_k": 7}')
        assert read_sampling(checkpoint) == Sampling(top_k=7)
        (checkpoint / "generation_config.json").unlink()
        assert read_sampling(checkpoint) == Sampling()

    @pytest.mark.parametrize("value", ['"warm"', "true", "-1", "[1]"])
    def test_an_impossible_sampling_setting_is_named(self, tiny: Path, value: str) -> None:
        (tiny / "generation_config.json").write_text(f'{{"temperature": {value}}}')
        with pytest.raises(ModelError, match=r"generation_config.json: temperature is"):
            read_sampling(tiny)

    def test_convert_keeps_type_head_and_codec(self, checkpoint: Path, tmp_path: Path) -> None:
        model = load(checkpoint, dtype=torch.bfloat16, text_head=False)
        save_checkpoint(model, tmp_path / "half", load_tokenizer(checkpoint))
        (tmp_path / "half" / "codec").mkdir()
        (tmp_path / "half" / "codec" / "config.json").write_text("{}")
        convert_layout(tmp_path / "half", tmp_path / "out", "transformers")
        stored = load_file(tmp_path / "out" / "model.safetensors")
        assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
        assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
        assert TEXT_HEAD_WEIGHT not in stored
        assert (tmp_path / "out" / "codec" / "config.json").is_file()
        with pytest.raises(ModelError, match="always has a text head"):
            convert_layout(tmp_path / "half", tmp_path / "original", "original")
        assert not (tmp_path / "original").exists()
        model = load(checkpoint, dtype=torch.bfloat16)
        save_checkpoint(model, tmp_path / "original", load_tokenizer(checkpoint), layout="original")
        convert_layout(tmp_path / "original", tmp_path / "again", "original")
        assert json.loads((tmp_path / "again" / "config.json").read_text())["torch_dtype"] == "bfloat16"

    def test_refuses_to_overwrite(self, checkpoint: Path, tiny: Path, tmp_path: Path) -> None:
        model, tokenizer = load(checkpoint), load_tokenizer(checkpoint)
        (tmp_path / "empty").mkdir()
        save_checkpoint(model, tmp_path / "empty", tokenizer)
        layouts: tuple[Layout, ...] = ("transformers", "original")
        for layout in layouts:
            with pytest.raises(OutputError, match="exists and is not empty"):
                save_checkpoint(model, tiny, tokenizer, layout=layout)
        with pytest.raises(OutputError, match="exists and is not empty"):
            convert_layout(checkpoint, tiny, "original")

    def test_refuses_a_model_with_an_adapter(self, checkpoint: Path, tmp_path: Path) -> None:
        model = get_peft_model(load(checkpoint), LoraConfig(target_modules=["q_proj"])).base_model.model
        with pytest.raises(ModelError, match="carries an adapter"):
            save_checkpoint(model, tmp_path / "out", load_tokenizer(checkpoint))

    def test_unknown_layout(self, checkpoint: Path, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="there is no layout boson"):
            convert_layout(checkpoint, tmp_path / "out", "boson")


class TestAdapter:
    """Conversion of an adapter to the original names and back."""

    @pytest.fixture(
        params=[
            {"target_modules": ["q_proj", "down_proj"]},
            {"target_modules": r".*\.layers\.\d+\.(self_attn\.v_proj|audio_mlp\.up_proj)", "use_dora": True},
            {
                "target_modules": "all-linear",
                "layers_to_transform": None,
                "rank_pattern": {"model.layers.0.mlp.up_proj": 3},
            },
            {"target_modules": ["k_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        ],
        ids=["suffixes", "pattern and dora", "all linear", "one layer"],
    )
    def adapter(self, request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> tuple[Any, Path]:
        """Return the model with random values in all trainable tensors, and its adapter folder."""
        torch.manual_seed(0)
        whole = {"modules_to_save": ["embed_audio_tokens.embed_audio_tokens", *HEADS]}
        settings = request.param if request.param["target_modules"] == "all-linear" else request.param | whole
        model = get_peft_model(load(checkpoint), LoraConfig(r=4, **settings)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        return model, tmp_path / "adapter"

    def test_adapter_conversion_round_trip(self, adapter: tuple[Any, Path], checkpoint: Path, tmp_path: Path) -> None:
        model, folder = adapter
        edit_config(folder, "adapter_config.json", task_type="CAUSAL_LM")
        convert_layout(folder, tmp_path / "original", "original")
        convert_layout(tmp_path / "original", tmp_path / "back", "transformers")
        before, after = (load_file(path / "adapter_model.safetensors") for path in (folder, tmp_path / "back"))
        assert before.keys() == after.keys()
        assert json.loads((tmp_path / "back" / "adapter_config.json").read_text())["task_type"] is None
        loaded = PeftModel.from_pretrained(load(checkpoint), tmp_path / "back").eval()
        assert not same_logits(model, load(checkpoint))
        assert same_logits(model, loaded)

    def test_original_names_fit_the_original_modules(
        self, adapter: tuple[Any, Path], checkpoint: Path, tmp_path: Path
    ) -> None:
        """PEFT must find every module and get every tensor in a stand-in with the original's module tree."""
        _, folder = adapter
        convert_layout(folder, tmp_path / "original", "original")
        base = load(checkpoint)
        stand_in = torch.nn.Module()
        stand_in.embed_tokens, stand_in.layers, stand_in.norm = (
            base.model.embed_tokens,
            base.model.layers,
            base.model.norm,
        )
        stand_in.audio_codebook_embeddings = base.model.embed_audio_tokens.embed_audio_tokens
        stand_in.audio_decoder_proj = torch.nn.Module()
        stand_in.audio_decoder_proj.audio_lm_head, stand_in.audio_decoder_proj.text_lm_head = (
            getattr(base, head) for head in HEADS
        )
        loaded = PeftModel.from_pretrained(stand_in, tmp_path / "original")
        loaded.save_pretrained(tmp_path / "again", save_embedding_layers=False)
        before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("original", "again"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)

    @pytest.mark.parametrize("layout", ["transformers", "original"])
    def test_an_adapter_of_another_model_is_refused(self, tmp_path: Path, layout: Layout) -> None:
        (tmp_path / "adapter").mkdir()
        (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        save_file(
            {"base_model.model.encoder.q_proj.lora_A.weight": torch.zeros(2, 2)},
            tmp_path / "adapter" / "adapter_model.safetensors",
        )
        with pytest.raises(CheckpointError, match=r"no module of Higgs Audio v2: base_model.model.encoder"):
            convert_layout(tmp_path / "adapter", tmp_path / "out", layout)
        edit_config(tmp_path / "adapter", "adapter_config.json", trainable_token_indices=[1])
        with pytest.raises(ModelError, match="trainable_token_indices cannot be carried over"):
            convert_layout(tmp_path / "adapter", tmp_path / "out", layout)
        edit_config(tmp_path / "adapter", "adapter_config.json", trainable_token_indices=None, peft_type="IA3")
        with pytest.raises(ModelError, match="peft_type is IA3"):
            convert_layout(tmp_path / "adapter", tmp_path / "out", layout)


class TestResolve:
    def test_folder(self, checkpoint: Path) -> None:
        assert resolve_checkpoint(str(checkpoint), None) == checkpoint
        with pytest.raises(ModelError, match="has no revision main"):
            resolve_checkpoint(str(checkpoint), "main")

    @pytest.mark.parametrize("source", ["/no/such/folder", "./nothing", "~/no/such", "a/b/c", "../nothing", "nothing"])
    def test_path_that_does_not_exist(self, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModelError, match="there is no model folder") as caught:
            resolve_checkpoint(source, None)
        assert "owner/name" in caught.value.hint

    def test_file(self, checkpoint: Path) -> None:
        with pytest.raises(ModelError, match="is a file") as caught:
            resolve_checkpoint(str(checkpoint / "config.json"), None)
        assert str(checkpoint) in caught.value.hint

    def test_hub_out_of_reach(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # as HF_HUB_OFFLINE=1 at the start
        with pytest.raises(ModelError, match="someone/no-such-model at revision v1 is no folder here") as caught:
            resolve_checkpoint("someone/no-such-model", "v1")
        assert "`hf download someone/no-such-model`" in caught.value.hint
