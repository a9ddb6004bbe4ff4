"""What the model hears: the audio encoder over clips of unequal length, each as if it were alone.

transformers' own forward pads a batch and adds 1 where there is sound and 0 where there is padding to what attention
sees, so that padding is heard too, and a clip sounds otherwise in company. The very modules run here; what is beyond
the end of a clip is silenced before every convolution that looks ahead, and hidden from attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


def hear(core: Any, features: torch.Tensor, spectra: torch.Tensor) -> torch.Tensor:
    """(clips, spectra, bands) -> (clips, positions, hidden size): what stands at the placeholders of each clip."""
    ear = core.model.embed_tokens_extend.audio_embed
    encoder = ear.encoder
    heard = encoder.encoder_embedding(features).to(ear.up_proj_for_speech.bias.dtype)
    heard, lengths = _subsample(encoder.embed, heard, spectra)
    mask = _mask(heard.shape[1], lengths)
    bias = encoder.relative_attention_bias_layer(heard).masked_fill(~mask[:, None, None], -torch.inf).to(heard.dtype)
    for layer in encoder.encoders:
        heard = layer(heard, bias)
    return ear.down_proj_for_speech(F.gelu(ear.up_proj_for_speech(heard)))  # type: ignore[no-any-return]


def _subsample(embed: Any, heard: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The convolutions before the encoder, each of which halves the time."""
    heard = heard.unsqueeze(1)
    for module in embed.conv:
        if getattr(module, "stride", None) == (2, 2):
            heard = heard * _mask(heard.shape[2], lengths)[:, None, :, None]
            lengths = (lengths + 1) // 2
        heard = module(heard)
    return embed.out(heard.transpose(1, 2).flatten(2)), lengths


def _mask(count: int, lengths: torch.Tensor) -> torch.Tensor:
    """(clips, count): true where a clip has not ended."""
    return torch.arange(count, device=lengths.device) < lengths[:, None]
