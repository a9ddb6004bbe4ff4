"""The released model's configuration, known without a download: enough to count and to plan with."""

from __future__ import annotations

from transformers import HiggsAudioV2Config

from myna.errors import ModelError

BUILTIN_NAMES = ("higgs-v2",)


def builtin_config(name: str) -> HiggsAudioV2Config:
    """The true-size configuration. transformers' defaults fit but for the two numbers below."""
    if name not in BUILTIN_NAMES:
        raise ModelError(f"there is no built-in model {name}", hint=f"built in: {', '.join(BUILTIN_NAMES)}")
    return HiggsAudioV2Config(
        codebook_size=1026,  # 1024 codes and the two ends of a stream; the default has no room for the ends
        bos_token_id=128000,  # the tokenizer's; the default is 1
    )
