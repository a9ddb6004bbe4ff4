"""Module names: LoRA targets of each mode, and the parts of the model."""

from __future__ import annotations

from myna.models.module_patterns import ModulePatterns

_LAYERS = r"model\.layers\.\d+\."
_AUDIO = r"model\.embed_tokens_extend\.audio_embed\."

MODULES = ModulePatterns(
    modes={
        "comprehensive": (_LAYERS + r"(self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj)", ("lm_head",)),
        "audio_focused": (_AUDIO + r"(encoder\.encoders\.\d+\..*|(up|down)_proj_for_speech)", ()),
        "attention_only": (_LAYERS + r"self_attn\.(qkv|o)_proj", ()),
    },
    parts={
        "text_embedding": r"model\.embed_tokens",
        "audio_encoder": _AUDIO + "encoder",
        "audio_projection": _AUDIO + r"(up|down)_proj_for_speech",
        "attention": _LAYERS + r"self_attn",
        "text_ffn": _LAYERS + r"mlp",
        "norms": _LAYERS + r"\w*layernorm|model\.norm",
        "text_head": "lm_head",
    },
)
