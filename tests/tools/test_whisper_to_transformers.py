"""A Whisper of CTranslate2 as a folder of transformers: every weight in its place, other files refused."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from myna.core.errors import CheckpointError
from tests.evaluate.tiny_scorers import save_whisper
from whisper_to_transformers import read_variables, transformers_weights


def fused(weights: dict[str, torch.Tensor]) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float16]]]:
    """The variables that CTranslate2 has for weights of transformers."""

    def join(place: str, letters: str, kind: str) -> torch.Tensor:
        zeros = torch.zeros_like(weights[f"{place}.q_proj.bias"])
        return torch.cat([weights.get(f"{place}.{letter}_proj.{kind}", zeros) for letter in letters])

    variables: dict[str, torch.Tensor] = {}
    for side in ("encoder", "decoder"):
        own = f"model.{side}"
        layer = f"{own}.layers.0"
        blocks = {"self_attn": "self_attention"} | ({"encoder_attn": "attention"} if side == "decoder" else {})
        for kind, norm in (("weight", "gamma"), ("bias", "beta")):
            variables[f"{side}/layer_norm/{norm}"] = weights[f"{own}.layer_norm.{kind}"]
            variables[f"{side}/layer_0/ffn/layer_norm/{norm}"] = weights[f"{layer}.final_layer_norm.{kind}"]
            for number in (0, 1):
                variables[f"{side}/layer_0/ffn/linear_{number}/{kind}"] = weights[f"{layer}.fc{number + 1}.{kind}"]
            for attention, block in blocks.items():
                place = f"{layer}.{attention}"
                variables[f"{side}/layer_0/{block}/layer_norm/{norm}"] = weights[f"{place}_layer_norm.{kind}"]
                for number, letters in enumerate(["qkv"] if attention == "self_attn" else ["q", "kv"]):
                    variables[f"{side}/layer_0/{block}/linear_{number}/{kind}"] = join(place, letters, kind)
                last = 1 if attention == "self_attn" else 2
                variables[f"{side}/layer_0/{block}/linear_{last}/{kind}"] = weights[f"{place}.out_proj.{kind}"]
            if side == "encoder":
                for number in (1, 2):
                    variables[f"encoder/conv{number}/{kind}"] = weights[f"{own}.conv{number}.{kind}"]
        variables[f"{side}/position_encodings/encodings"] = weights[f"{own}.embed_positions.weight"]
    variables["decoder/embeddings/weight"] = weights["model.decoder.embed_tokens.weight"]
    return {name: one.numpy() for name, one in variables.items()}


def test_every_weight_has_its_place(tmp_path: Path) -> None:
    from transformers import WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(save_whisper(tmp_path))
    weights = {name: one for name, one in model.state_dict().items() if name != "proj_out.weight"}
    converted = transformers_weights({**fused(weights), "decoder/num_heads": np.array(2, np.int16)})
    assert converted.keys() == weights.keys()
    assert all(torch.equal(converted[name], one) for name, one in weights.items())
    with pytest.raises(CheckpointError, match="stored as int8"):
        transformers_weights({"encoder/conv1/weight": np.zeros((2, 2, 3), np.int8)})


def test_variables_are_read_by_name_shape_and_type() -> None:
    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    weight = np.arange(6, dtype="<f2").reshape(2, 3)
    body = text("encoder/conv1/weight") + struct.pack("<BIIBI", 2, 2, 3, 4, weight.nbytes) + weight.tobytes()
    content = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, 1) + body
    [(name, value)] = read_variables(io.BytesIO(content))
    assert name == "encoder/conv1/weight" and np.array_equal(value, weight)
    other = struct.pack("<I", 6) + text("TransformerSpec") + struct.pack("<II", 3, 0)
    with pytest.raises(CheckpointError, match="TransformerSpec is no Whisper"):
        list(read_variables(io.BytesIO(other)))
