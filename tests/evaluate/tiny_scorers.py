"""Ears of the real classes, small and random: they load, listen and fail as the published ones do."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    Wav2Vec2FeatureExtractor,
    WavLMConfig,
    WavLMForXVector,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

SPECIAL = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|ar|>", "<|translate|>", "<|transcribe|>"),
    *("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def save_whisper(folder: Path, *, seed: int = 0, seconds: int = 2) -> Path:
    """A Whisper that writes letters at random, always the same for one sound; its windows last `seconds`."""
    vocabulary = {letter: number for number, letter in enumerate((*LETTERS, "Ġ", *SPECIAL))}
    tokenizer = WhisperTokenizer(
        vocab=vocabulary, merges=[], unk_token=SPECIAL[0], bos_token=SPECIAL[0], eos_token=SPECIAL[0]
    )
    stamps = [f"<|{moment * 0.02:.2f}|>" for moment in range(50 * seconds + 1)]
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL[1:], *stamps]})
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=8,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_source_positions=50 * seconds,
        max_target_positions=24,
        pad_token_id=ids["<|endoftext|>"],
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|endoftext|>"],
        decoder_start_token_id=ids["<|startoftranscript|>"],
    )
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        # Letters alone are likely, and what it hears counts for more than what it wrote last.
        model.model.decoder.embed_tokens.weight.zero_()[: len(LETTERS)].normal_()
        model.model.decoder.layers[0].encoder_attn.out_proj.weight.normal_(std=5.0)
        model.model.decoder.layers[0].encoder_attn.v_proj.weight.normal_(std=5.0)
    model.generation_config = GenerationConfig(
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        max_length=24,
        is_multilingual=True,
        lang_to_id={token: ids[token] for token in ("<|en|>", "<|ar|>")},
        task_to_id={"translate": ids["<|translate|>"], "transcribe": ids["<|transcribe|>"]},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        suppress_tokens=list(ids.values()),  # the end too: it writes as long as it may
        begin_suppress_tokens=[],
        max_initial_timestamp_index=50,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=8, chunk_length=seconds).save_pretrained(folder)
    return folder


def save_wavlm(folder: Path, *, seed: int = 0) -> Path:
    config = WavLMConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=(8, 8),
        conv_stride=(10, 8),
        conv_kernel=(20, 10),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        num_buckets=8,
        tdnn_dim=(16, 16, 24),
        tdnn_kernel=(5, 3, 1),
        tdnn_dilation=(1, 2, 1),
        xvector_output_dim=12,
        num_labels=3,
    )
    torch.manual_seed(seed)
    WavLMForXVector(config).save_pretrained(folder)
    Wav2Vec2FeatureExtractor(do_normalize=True).save_pretrained(folder)
    return folder
