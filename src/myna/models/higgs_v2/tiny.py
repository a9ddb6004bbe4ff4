"""Tiny random checkpoint of the real classes, for tests: the files and names of the true one in a few megabytes."""

from pathlib import Path
from typing import Any

import torch
from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration, PreTrainedTokenizerFast

from myna.models.files import byte_tokenizer, quiet_transformers
from myna.models.higgs_v2.checkpoint import SPECIAL_IDS
from myna.models.higgs_v2.codec import codec_classes

SPECIAL_TOKENS = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"),
    *("<|audio_bos|>", "<|audio_eos|>", "<|audio_out_bos|>", "<|reserved_special_token_6|>", "<|AUDIO|>"),
    *("<|AUDIO_OUT|>", "<|scene_desc_start|>", "<|scene_desc_end|>"),
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and the special tokens: 270 ids."""
    return byte_tokenizer(SPECIAL_TOKENS, begin="<|begin_of_text|>", end="<|eot_id|>", pad="<|end_of_text|>")


def tiny_config(
    *, hidden: int = 64, layers: int = 2, codebooks: int = 8, codebook_size: int = 64
) -> HiggsAudioV2Config:
    """Return the true architecture with few and narrow layers; ids are those of `tiny_tokenizer`."""
    ids = tiny_tokenizer().convert_tokens_to_ids
    return HiggsAudioV2Config(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        num_codebooks=codebooks,
        codebook_size=codebook_size + 2,
        audio_stream_bos_id=codebook_size,
        audio_stream_eos_id=codebook_size + 1,
        bos_token_id=ids("<|begin_of_text|>"),
        **{setting: ids(token) for setting, token in SPECIAL_IDS.items()},
    )


def save_tiny(folder: Path, *, seed: int = 0, hidden: int = 64, layers: int = 2, codebook_size: int = 64) -> Path:
    """Write a checkpoint folder: language model with its text head, tokenizer, and the codec under `codec/`."""
    torch.manual_seed(seed)
    model = HiggsAudioV2ForConditionalGeneration(
        tiny_config(hidden=hidden, layers=layers, codebook_size=codebook_size), use_text_head=True
    )
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    save_tiny_codec(folder / "codec", seed=seed, codebook_size=codebook_size)
    return folder


def save_tiny_codec(folder: Path, *, seed: int = 0, codebook_size: int = 64) -> Path:
    """Write the Higgs codec at a thousandth of its size, untrained: 24 kHz, 25 frames a second, 8 codebooks."""
    config_class, model_class = codec_classes()
    torch.manual_seed(seed)
    bits = (codebook_size - 1).bit_length()
    config = config_class(
        target_bandwidths=[(8 * 25 * bits + 1) / 1000],  # a little over, since transformers rounds quotients down
        codebook_size=codebook_size,
        codebook_dim=8,
        acoustic_model_config={
            "model_type": "dac",
            "encoder_hidden_size": 4,
            "downsampling_ratios": [8, 5, 4, 2, 3],
            "decoder_hidden_size": 32,
            "upsampling_ratios": [8, 5, 4, 2, 3],
            "hidden_size": 16,
        },
        semantic_model_config={
            "model_type": "hubert",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "conv_dim": [8] * 7,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.0,
        },
    )
    codec = model_class(config).eval()
    _calibrate(codec)
    with quiet_transformers():
        codec.save_pretrained(folder)
    return folder


@torch.no_grad()
def _calibrate(codec: Any) -> None:
    """Make codes distinguish sounds. After initialisation little of the audio gets through, and codebooks are all zero.
    Convolutions preserve the level, each codebook is sampled from the residuals of a few sounds, and the decoder's
    output is scaled to the level of speech."""
    init, count = torch.nn.init, 8 + codec.config.codebook_size // 8
    for stack in (codec.acoustic_encoder, codec.acoustic_decoder):
        for module in stack.modules():
            if isinstance(module, torch.nn.Conv1d):
                init.kaiming_normal_(module.weight, nonlinearity="linear")
    init.orthogonal_(codec.fc.weight)
    init.orthogonal_(codec.fc2.weight)

    second = torch.arange(24_000) / 24_000
    pitch, level = 80 * 40 ** torch.rand(count, 1), 10 ** -torch.rand(count, 1)
    glides = torch.sin(2 * torch.pi * pitch * second * (1 + second))
    sounds = level * (0.5 * glides + 0.1 * torch.randn(count, len(second)))
    encoded: list[torch.Tensor] = []
    hook = codec.fc.register_forward_hook(lambda _module, _inputs, out: encoded.append(out.flatten(0, 1)))
    codec.encode(sounds[:, None])
    hook.remove()

    rest = encoded[0]
    for quantizer in codec.quantizer.quantizers:
        init.orthogonal_(quantizer.project_in.weight)
        quantizer.project_out.weight.copy_(quantizer.project_in.weight.T)
        narrow, book = quantizer.project_in(rest), quantizer.codebook.embed
        book.copy_(narrow[torch.randperm(len(narrow))[: len(book)]])
        rest = rest - quantizer.project_out(book[quantizer.codebook.quantize(narrow)])
    decoded = codec.acoustic_decoder(codec.fc2(encoded[0] - rest).T[None, :, :50])
    codec.acoustic_decoder.conv2.weight.mul_(0.1 / decoded.std())
