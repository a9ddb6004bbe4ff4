"""Released checkpoints open: every check that can refuse one is run on what their files hold.

The files in `released/` say where their values come from. Weights are sparse files with a true header and no content.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast

from myna.core.errors import CheckpointError, ModelError
from myna.data.conversation import AudioClip, answer_conversation
from myna.models import open_codec, open_family
from myna.models.base import Sampling, require_answering, require_speaking
from myna.models.higgs_v2.batched_encoder import unsupported_reason
from myna.models.higgs_v2.codec import codec_classes, decode_reach
from myna.models.higgs_v2.family import HiggsV2
from myna.models.higgs_v2.tiny import save_tiny_codec
from myna.models.phi4.family import Phi4
from myna.models.phi4.tiny import save_tiny as save_tiny_phi4

HIGGS, PHI4 = 128_256, 200_029
"""Numbers of tokens of the two tokenizers."""
LORA_LAYERS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def released(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(__file__).parent / "released" / f"{name}.json").read_text())
    assert content.pop("source")
    return content


def write(folder: Path, **files: Mapping[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def save_tokenizer(folder: Path, special: Mapping[str, int], size: int, **tokens: str | None) -> None:
    """Save a tokenizer whose special tokens have their released ids; all other ids are words of no language."""
    first = min(special.values())
    core = Tokenizer(WordLevel({f"word{number}": number for number in range(first)}, unk_token="word0"))
    names = {id: name for name, id in special.items()}
    core.add_special_tokens([names.get(id, f"<|reserved {id}|>") for id in range(first, size)])
    PreTrainedTokenizerFast(tokenizer_object=core, **tokens).save_pretrained(folder)


def write_headers(file: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Write a safetensors file of bf16 tensors, which takes no room on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    content = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(len(content).to_bytes(8, "little") + content)
        opened.truncate(8 + len(content) + end)


def shapes_of(model: nn.Module) -> dict[str, Sequence[int]]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def original_shapes(content: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return the shapes by the names of the original release, which its index lists."""
    layers = [name.replace(".0.", f".{n}.", 1) for n in range(28) for name in content["tensors"]["layer 0 of 28"]]
    names = [*content["tensors"]["others"], *layers]
    assert len(names) == content["tensors"]["count"]
    heads = {f"audio_decoder_proj.{name}": name for name in ("audio_lm_head.weight", "text_lm_head.weight")}
    codebooks = {"audio_codebook_embeddings.weight": "model.embed_audio_tokens.embed_audio_tokens.weight"}
    return {name: shapes[(heads | codebooks).get(name, f"model.{name}")] for name in names}


def higgs_shapes() -> dict[str, Sequence[int]]:
    return shapes_of(open_family("higgs-v2").load_model(dtype=torch.bfloat16, device="meta", text_head=True))


def test_higgs_as_first_released(tmp_path: Path) -> None:
    content = released("higgs_v2_original")
    folder = write(tmp_path, config=content["config"], generation_config=content["generation_config"])
    tokens = {name: content["tokenizer_config"][name] for name in ("bos_token", "eos_token")}
    save_tokenizer(folder, content["special_tokens"], HIGGS, **tokens)
    write_headers(folder / "model.safetensors", original_shapes(content, higgs_shapes()))
    family = require_speaking(open_family(str(folder)))
    assert family.check_weights() == "all 397 tensors have their place, with a text head"
    assert family.sampling == Sampling()


@pytest.mark.parametrize("eos", ["<|end_of_text|>", "<|eot_id|>"])
def test_higgs_in_the_layout_of_transformers(tmp_path: Path, eos: str) -> None:
    """transformers' converter sets the pad token to the end. The repository also holds the shards of the first release,
    with their index, and heads may be stored under two names."""
    content, first = released("higgs_v2_transformers"), released("higgs_v2_original")
    folder = write(tmp_path, config=content["config"], generation_config=content["generation_config"])
    tokens = {"bos_token": "<|begin_of_text|>", "eos_token": eos, "pad_token": eos}
    save_tokenizer(folder, first["special_tokens"], HIGGS, **tokens)
    shapes = higgs_shapes()
    heads = {f"audio_decoder_proj.{name}": shape for name, shape in shapes.items() if name.endswith("lm_head.weight")}
    write_headers(folder / "model.safetensors", shapes | heads)
    shards = dict.fromkeys(original_shapes(first, shapes), "model-00001-of-00003.safetensors")
    write(folder, **{"model.safetensors.index": {"weight_map": shards}})
    family = require_speaking(open_family(str(folder)))
    assert family.check_weights() == "all 397 tensors have their place, with a text head"
    assert family.sampling == Sampling()
    assert family.accepts_codes(8, 1024, 25.0)


def test_the_codec_of_higgs_has_eight_codebooks_and_is_batched() -> None:
    content = released("higgs_v2_codec")
    config_class, model_class = codec_classes()
    config = config_class.from_dict(copy.deepcopy(content["config"]))
    with torch.device("meta"):
        model = model_class(config)
    shapes = shapes_of(model)
    assert len(shapes) == content["tensors"]
    assert {name: list(shapes[name]) for name in content["shapes"]} == content["shapes"]
    found = (config.num_quantizers, config.codebook_size, config.sample_rate / config.hop_length)
    assert found == (8, 1024, 25.0) and open_family("higgs-v2").accepts_codes(*found)
    assert unsupported_reason(model) is None
    assert decode_reach(model.acoustic_decoder, config.hop_length) <= 10, "what windows of a stream are planned for"


def test_a_codec_may_lack_what_only_its_training_read(tmp_path: Path) -> None:
    """HuBERT's weight norm has two names, by the version of torch that saved it."""
    file = save_tiny_codec(tmp_path / "codec") / "model.safetensors"
    stored = load_file(file)
    whole = open_codec(file.parent)
    codes = whole.encode(torch.linspace(-1, 1, 9600).numpy()[None])
    norms = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    trained = ("fc1.", "decoder_semantic.", "codebook.cluster_size", "codebook.embed_avg", "codebook.inited")
    less = {name: tensor for name, tensor in stored.items() if not any(part in name for part in trained)}
    assert len(less) < len(stored)
    for new, old in norms.items():
        less = {name.replace(new, old): tensor for name, tensor in less.items()}
    for tensors in (less, stored | {"fc1.more": torch.zeros(1)}):
        save_file(tensors, file, metadata={"format": "pt"})
        assert (open_codec(file.parent).encode(torch.linspace(-1, 1, 9600).numpy()[None]) == codes).all()
    save_file({name: tensor for name, tensor in stored.items() if name != "fc2.bias"}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 missing: fc2\.bias"):
        open_codec(file.parent)


def test_phi4_as_transformers_converts_it(tmp_path: Path) -> None:
    content = released("phi4_multimodal")
    folder = write(tmp_path, config=content["config"], generation_config=content["generation_config"])
    save_tokenizer(folder, content["special_tokens"], PHI4, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    write(folder, preprocessor_config={"audio_compression_rate": 8, "audio_downsample_rate": 1, "audio_feat_stride": 1})
    model = open_family("phi-4-multimodal").load_model(dtype=torch.bfloat16, device="meta", text_head=True)
    vision = {"model.embed_tokens_extend.image_embed.glb_GN": (1, 1, 1152)}
    shapes = shapes_of(model)
    write_headers(folder / "model.safetensors", {n: s for n, s in shapes.items() if n != "lm_head.weight"} | vision)
    family = open_family(str(folder))
    assert isinstance(family, Phi4)
    assert family.check_weights().startswith(f"all {len(shapes) - 1} tensors have their place")
    assert family.config.eos_token_id == [199999, 200020], "the end of a turn ends an answer too"
    assert family.renderer.max_positions == 4096 and family.load_encoder().codebooks == 80
    assert family.accepts_codes(80, 65536, 100.0)
    expected = family.load_model(dtype=torch.bfloat16, device="meta", text_head=True)
    assert shapes_of(expected) == shapes
    assert all(isinstance(expected.get_submodule(f"model.layers.31.{name}"), nn.Linear) for name in LORA_LAYERS)


def test_phi4_computes_what_transformers_does_with_the_released_settings(tmp_path: Path) -> None:
    """A window longer than any sequence, rotary frequencies for long sequences, and one end."""
    folder, content = save_tiny_phi4(tmp_path / "model"), released("phi4_multimodal")["config"]
    config = json.loads((folder / "config.json").read_text())
    end = config["eos_token_id"][0]
    rope = content["rope_scaling"] | {
        name: content["rope_scaling"][name][:6] for name in ("long_factor", "short_factor")
    }
    rope |= {"rope_theta": 10_000.0, "partial_rotary_factor": 0.75, "rope_type": "longrope"}
    settings = {"sliding_window": 262144, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    write(folder, config=config | settings | {"eos_token_id": end, "rope_parameters": rope})
    family = require_answering(open_family(str(folder)))
    model = family.load_model(dtype=torch.float32, device="cpu", text_head=True).eval()
    torch.manual_seed(4)
    with torch.no_grad():  # a random head repeats itself, or ends at once
        model.get_parameter("lm_head.weight").normal_()
        for name, weight in model.named_parameters():
            weight.mul_(30 if "down_proj" in name else 10 if "self_attn" in name and "layers" in name else 1)
    conversation = family.probe()
    sequence = family.render(conversation)
    theirs, sums = (
        family.transformers_forward(model, sequence),
        family.objective(model)(family.collate([sequence])).sums,
    )
    torch.testing.assert_close(sums.double(), theirs.sums, rtol=1e-5, atol=0)
    clip = conversation.turns[0].parts[0]
    assert isinstance(clip, AudioClip)
    prompt = family.render(answer_conversation("What is said?", clip, id="open"))
    generated = family.transformers_generate(model, prompt, 8)
    ids = family.answer(model, [prompt], 8)[0].ids
    assert ids == [int(id) for id in generated.choices[: len(ids), 0]] and len(ids) > 1


def test_phi4_of_the_main_branch_names_the_one_that_is_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="phi4mm") as caught:
        open_family(str(write(tmp_path / "phi4", config={"model_type": "phi4mm"})))
    assert "microsoft/Phi-4-multimodal-instruct@refs/pr/70" in caught.value.hint


def test_the_true_configuration_is_the_built_in_one() -> None:
    content = released("higgs_v2_transformers")["config"]
    family = open_family("higgs-v2")
    assert isinstance(family, HiggsV2)
    own = family.config.to_dict()
    assert {
        name: own[name] for name in content if name in own and name not in ("bos_token_id", "architectures", "dtype")
    } == {
        name: value
        for name, value in content.items()
        if name in own and name not in ("bos_token_id", "architectures", "dtype")
    }
