"""Built-in configuration of the released model, for counting and planning without a download."""

from __future__ import annotations

from typing import Any

from myna.core.errors import ModelError

BUILTIN_NAMES = ("phi-4-multimodal",)


def builtin_config(name: str) -> Any:
    """The true-size configuration: transformers' defaults but for the numbers below, without the rotary scaling of long
    sequences, which no count depends on."""
    if name not in BUILTIN_NAMES:
        raise ModelError(f"there is no built-in model {name}", hint=f"built in: {', '.join(BUILTIN_NAMES)}")
    from transformers import Phi4MultimodalConfig

    return Phi4MultimodalConfig(
        num_attention_heads=24,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
    )
