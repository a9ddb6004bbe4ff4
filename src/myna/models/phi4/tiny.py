"""Tiny random checkpoint of the real classes: the same files and names as the released one, in a megabyte."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Phi4MultimodalConfig,
    Phi4MultimodalFeatureExtractor,
    Phi4MultimodalForCausalLM,
    PreTrainedTokenizerFast,
)

from myna.models.files import byte_tokenizer

SPECIAL_TOKENS = ("<|endoftext|>", "<|image|>", "<|audio|>", "<|assistant|>", "<|end|>", "<|user|>", "<|system|>")


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and the special tokens: 263 ids."""
    return byte_tokenizer(SPECIAL_TOKENS, begin="<|endoftext|>", end="<|endoftext|>", pad="<|endoftext|>")


def tiny_config(
    *,
    hidden: int = 64,
    layers: int = 2,
    blocks: int = 2,
    channels: int = 8,
    tied: bool = False,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Phi4MultimodalConfig:
    """Return the true architecture with few narrow layers, `layers` in the decoder, `blocks` in the audio encoder."""
    tokenizer = tokenizer or tiny_tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    return Phi4MultimodalConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
        bos_token_id=ids("<|endoftext|>"),
        pad_token_id=ids("<|endoftext|>"),
        eos_token_id=[ids("<|endoftext|>"), ids("<|end|>")],
        audio_config={
            "hidden_size": hidden // 2,
            "intermediate_size": hidden,
            "num_blocks": blocks,
            "num_attention_heads": 2,
            "ext_pw_out_channel": hidden // 2,
            "depthwise_separable_out_channel": hidden // 2,
            "nemo_conv_channels": channels,
            "bias_max_distance": 500,
            "audio_token_id": ids("<|audio|>"),
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "crop_size": 28,
            "image_token_id": ids("<|image|>"),
        },
    )


def save_tiny(folder: Path, *, seed: int = 0, tokenizer: PreTrainedTokenizerFast | None = None, **sizes: Any) -> Path:
    """Write a checkpoint folder: model, tokenizer and the settings of the feature extractor."""
    torch.manual_seed(seed)
    tokenizer = tokenizer or tiny_tokenizer()
    model = Phi4MultimodalForCausalLM(tiny_config(**sizes, tokenizer=tokenizer))
    _scale_audio_encoder(model.model.embed_tokens_extend.audio_embed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = Phi4MultimodalFeatureExtractor().to_dict()
    plain = {key: value for key, value in settings.items() if isinstance(value, int | float | str)}
    (folder / "preprocessor_config.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    return folder


@torch.no_grad()
def _scale_audio_encoder(audio_embed: Any) -> None:
    """Scale random weights so that the output depends on the audio, which it hardly does after initialisation."""
    for module in audio_embed.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv1d | torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
    # Features of speech lie around 10, with a spread of about 5.
    audio_embed.encoder.encoder_embedding.global_mean.fill_(10.0)
    audio_embed.encoder.encoder_embedding.global_invstd.fill_(0.2)
