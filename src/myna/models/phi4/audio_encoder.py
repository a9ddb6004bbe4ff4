"""Audio encoder over padded clips of unequal length, with the result of each clip alone.

transformers' own forward adds 1 where there is sound and 0 where there is padding to the attention scores, so that
padding is attended to and a clip's embedding depends on its batch. The same modules run here; padding is zeroed before
every strided convolution and masked in attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


def encode_audio(core: Any, features: torch.Tensor, spectra: torch.Tensor) -> torch.Tensor:
    """(clips, spectra, bands) -> (clips, positions, hidden size): embeddings at the placeholders of each clip."""
    audio_embed = core.model.embed_tokens_extend.audio_embed
    encoder = audio_embed.encoder
    hidden = encoder.encoder_embedding(features).to(audio_embed.up_proj_for_speech.bias.dtype)
    hidden, lengths = _subsample(encoder.embed, hidden, spectra)
    mask = _mask(hidden.shape[1], lengths)
    bias = encoder.relative_attention_bias_layer(hidden).masked_fill(~mask[:, None, None], -torch.inf).to(hidden.dtype)
    for layer in encoder.encoders:
        hidden = layer(hidden, bias)
    return audio_embed.down_proj_for_speech(F.gelu(audio_embed.up_proj_for_speech(hidden)))  # type: ignore[no-any-return]


def _subsample(embed: Any, hidden: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Strided convolutions before the encoder, each of which halves the length."""
    hidden = hidden.unsqueeze(1)
    for module in embed.conv:
        if getattr(module, "stride", None) == (2, 2):
            hidden = hidden * _mask(hidden.shape[2], lengths)[:, None, :, None]
            lengths = (lengths + 1) // 2
        hidden = module(hidden)
    return embed.out(hidden.transpose(1, 2).flatten(2)), lengths


def _mask(count: int, lengths: torch.Tensor) -> torch.Tensor:
    """(clips, count): true up to each clip's length."""
    return torch.arange(count, device=lengths.device) < lengths[:, None]
