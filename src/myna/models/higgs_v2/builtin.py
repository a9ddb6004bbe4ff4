"""Configuration of the released model, for parameter counts and memory plans without a download."""

from __future__ import annotations

from typing import Any

from myna.core.errors import ModelError

BUILTIN_NAMES = ("higgs-v2",)


def builtin_config(name: str) -> Any:
    """The true-size configuration. transformers' defaults fit but for the two numbers below."""
    if name not in BUILTIN_NAMES:
        raise ModelError(f"there is no built-in model {name}", hint=f"built in: {', '.join(BUILTIN_NAMES)}")
    from transformers import HiggsAudioV2Config

    return HiggsAudioV2Config(
        codebook_size=1026,  # 1024 codes and the two ends of a stream; the default leaves out the ends
        bos_token_id=128000,  # the tokenizer's; the default is 1
    )
