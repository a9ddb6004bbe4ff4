"""The released model's configuration, known without a download: enough to count and to plan with."""

from __future__ import annotations

from transformers import Phi4MultimodalConfig

from myna.errors import ModelError

BUILTIN_NAMES = ("phi-4-multimodal",)


def builtin_config(name: str) -> Phi4MultimodalConfig:
    """The true-size configuration. transformers' defaults fit but for the numbers below; the factors by which long
    sequences turn more slowly are left out, since nothing is counted by them."""
    if name not in BUILTIN_NAMES:
        raise ModelError(f"there is no built-in model {name}", hint=f"built in: {', '.join(BUILTIN_NAMES)}")
    return Phi4MultimodalConfig(
        num_attention_heads=24,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
    )
