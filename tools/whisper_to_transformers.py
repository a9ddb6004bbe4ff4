"""Turn a Whisper of CTranslate2 into a folder of transformers, so that the same weights run by torch on any GPU.

    python tools/whisper_to_transformers.py ~/.cache/myna/whisper-base ~/.cache/myna/whisper-base-transformers

Weights must be stored as float16 or float32: int8 would have lost what it rounded off.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from myna.core.errors import CheckpointError
from myna.core.io import atomic_folder

BINARY_VERSION = 6
DTYPES = {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2"}
"""Types of numpy by CTranslate2's numbers."""
LANGUAGE_TOKENS_AFTER = "<|startoftranscript|>"


def read_variables(file: BinaryIO) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Names and values of a `model.bin` of CTranslate2."""

    def number(form: str) -> int:
        return int(struct.unpack(form, file.read(struct.calcsize(form)))[0])

    def text() -> str:
        return file.read(number("<H")).rstrip(b"\0").decode()

    version, spec = number("<I"), text()
    number("<I")  # revision
    if (version, spec) != (BINARY_VERSION, "WhisperSpec"):
        raise CheckpointError(f"version {version} of {spec} is no Whisper that is known", hint="convert it elsewhere")
    for _ in range(number("<I")):
        name = text()
        shape = [number("<I") for _ in range(number("<B"))]
        dtype = DTYPES[number("<B")]
        yield name, np.frombuffer(file.read(number("<I")), dtype).reshape(shape)


def transformers_name(name: str) -> str:
    """The place of a weight that both have one by one."""
    side, *path, kind = name.split("/")
    kind = {"gamma": "weight", "beta": "bias", "encodings": "weight"}.get(kind, kind)
    if path[0].startswith("layer_") and path[0] != "layer_norm":
        attention = {"self_attention": "self_attn", "attention": "encoder_attn"}
        block, place = path[1], path[-1]
        if block == "ffn":
            place = {"layer_norm": "final_layer_norm", "linear_0": "fc1", "linear_1": "fc2"}[place]
        elif place == "layer_norm":
            place = f"{attention[block]}_layer_norm"
        else:
            place = f"{attention[block]}.{place}"
        return f"model.{side}.layers.{path[0][6:]}.{place}.{kind}"
    own = {"embeddings": "embed_tokens", "position_encodings": "embed_positions"}.get(path[0], path[0])
    return f"model.{side}.{own}.{kind}"


def transformers_weights(variables: dict[str, np.ndarray[Any, Any]]) -> dict[str, torch.Tensor]:
    """All weights by transformers' names. Projections that CTranslate2 has fused are parted."""
    weights: dict[str, torch.Tensor] = {}
    for name, value in variables.items():
        if value.ndim == 0:
            continue
        if value.dtype not in (np.float16, np.float32):
            raise CheckpointError(f"{name} is stored as {value.dtype}", hint="take a Whisper of float16")
        place, tensor = transformers_name(name), torch.from_numpy(value.astype(np.float32))
        before, _, kind = place.rpartition(".")
        before, _, linear = before.rpartition(".")
        if ".encoder_attn." in place or ".self_attn." in place:
            fused = {"self_attn": ("qkv", "o"), "encoder_attn": ("q", "kv", "o")}[before.rsplit(".", 1)[1]]
            letters = fused[int(linear.removeprefix("linear_"))]
            for letter, part in zip(letters, tensor.chunk(len(letters)), strict=True):
                if (letter, kind) != ("k", "bias"):  # Whisper has none: CTranslate2 wrote zeros
                    weights[f"{before}.{'out' if letter == 'o' else letter}_proj.{kind}"] = part.contiguous()
        else:
            weights[place] = tensor
    return weights


def convert(source: Path, out: Path) -> None:
    with (source / "model.bin").open("rb") as file:
        variables = dict(read_variables(file))
    weights = transformers_weights(variables)
    settings = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tokens = {one["content"]: one["id"] for one in _tokenizer(source)["added_tokens"]}
    vocabulary, width = weights["model.decoder.embed_tokens.weight"].shape
    layers = {side: 1 + max(int(name.split(".")[3]) for name in weights if f"{side}.layers" in name) for side in SIDES}
    mel_bands = weights["model.encoder.conv1.weight"].shape[1]
    end = tokens["<|endoftext|>"]
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    ids["decoder_start_token_id"] = tokens[LANGUAGE_TOKENS_AFTER]
    config = WhisperConfig(
        vocab_size=vocabulary,
        num_mel_bins=mel_bands,
        d_model=width,
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
        encoder_attention_heads=int(variables["encoder/num_heads"]),
        decoder_attention_heads=int(variables["decoder/num_heads"]),
        encoder_ffn_dim=weights["model.encoder.layers.0.fc1.weight"].shape[0],
        decoder_ffn_dim=weights["model.decoder.layers.0.fc1.weight"].shape[0],
        max_source_positions=len(weights["model.encoder.embed_positions.weight"]),
        max_target_positions=len(weights["model.decoder.embed_positions.weight"]),
        architectures=["WhisperForConditionalGeneration"],
        **ids,
    )
    names = {number: name for name, number in tokens.items()}
    generation = GenerationConfig(
        suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        max_length=config.max_target_positions,
        **ids,
    )
    generation.alignment_heads = settings["alignment_heads"]
    generation.lang_to_id = {names[number]: number for number in settings.get("lang_ids", [])}
    generation.task_to_id = {task: tokens[f"<|{task}|>"] for task in ("transcribe", "translate")}
    generation.no_timestamps_token_id = tokens["<|notimestamps|>"]
    generation.is_multilingual = bool(generation.lang_to_id)
    generation.max_initial_timestamp_index = 50
    # Every name and shape is checked before anything is written.
    with torch.device("meta"):
        expected = WhisperForConditionalGeneration(config).state_dict()
    expected.pop("proj_out.weight")
    wrong = expected.keys() ^ weights.keys()
    wrong |= {name for name in expected.keys() & weights.keys() if expected[name].shape != weights[name].shape}
    if wrong:
        raise CheckpointError(f"these weights do not fit: {sorted(wrong)[:5]}", hint="convert it elsewhere")
    with atomic_folder(out) as folder:
        save_file({name: one.half() for name, one in weights.items()}, folder / "model.safetensors", {"format": "pt"})
        config.save_pretrained(folder)
        generation.save_pretrained(folder)
        WhisperFeatureExtractor(feature_size=mel_bands).save_pretrained(folder)
        shutil.copy(source / "tokenizer.json", folder)
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "WhisperTokenizer", "model_max_length": config.max_target_positions})
        )


SIDES = ("encoder", "decoder")


def _tokenizer(source: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder with model.bin, config.json and tokenizer.json")
    parser.add_argument("out", type=Path, help="new folder")
    arguments = parser.parse_args()
    convert(arguments.source, arguments.out)


if __name__ == "__main__":
    main()
