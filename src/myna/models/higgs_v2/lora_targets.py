"""LoRA target modules of each mode, and short names of the model's parts."""

from __future__ import annotations

from myna.models.module_patterns import ModulePatterns

_LAYERS = r"model\.layers\.\d+\."
_AUDIO_FFN = r"audio_mlp\.(gate|up|down)_proj"

MODULES = ModulePatterns(
    modes={
        "comprehensive": (
            rf"{_LAYERS}(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj|{_AUDIO_FFN})",
            ("text_lm_head", "audio_lm_head"),
        ),
        "audio_focused": (rf"{_LAYERS}(self_attn\.[qv]_proj|{_AUDIO_FFN})", ("audio_lm_head",)),
        "attention_only": (rf"{_LAYERS}self_attn\.[qkvo]_proj", ()),
    },
    parts={
        "text_embedding": r"model\.embed_tokens",
        "audio_embedding": r"model\.embed_audio_tokens\.embed_audio_tokens",
        "attention": _LAYERS + r"self_attn",
        "text_ffn": _LAYERS + r"mlp",
        "audio_ffn": _LAYERS + r"audio_mlp",
        "norms": _LAYERS + r"\w*layernorm|model\.norm",
        "text_head": "text_lm_head",
        "audio_head": "audio_lm_head",
    },
)
