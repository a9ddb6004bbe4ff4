"""Which modules a LoRA mode means, and what the parts of the model are called."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from myna.errors import ModelError
from myna.models.base import LoraTargets

_LAYERS = r"model\.layers\.\d+\."
_HEARING = r"model\.embed_tokens_extend\.audio_embed\."
_MODES = {
    "comprehensive": _LAYERS + r"(self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj)",
    "audio_focused": _HEARING + r"(encoder\.encoders\.\d+\..*|(up|down)_proj_for_speech)",
    "attention_only": _LAYERS + r"self_attn\.(qkv|o)_proj",
}
"""Mode -> pattern of the linear layers that get a LoRA: those of the decoder, those that hear, or attention alone."""
_HEAD = "lm_head"

_PARTS = {
    "text_embedding": r"model\.embed_tokens",
    "audio_encoder": _HEARING + "encoder",
    "audio_projection": _HEARING + r"(up|down)_proj_for_speech",
    "attention": _LAYERS + r"self_attn",
    "text_ffn": _LAYERS + r"mlp",
    "norms": _LAYERS + r"\w*layernorm|model\.norm",
    "text_head": _HEAD,
}
"""Short name -> pattern of full module names. Every parameter belongs to one part."""


def adapt_targets(model: nn.Module, mode: str, custom: Sequence[str] = ()) -> LoraTargets:
    """What a mode means on this unwrapped model. A head is only selected: it is trained in full or not at all."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if mode == "custom":
        for ending in custom:
            _check_ending(ending, linears)
        adapted = tuple(name for name in linears if any(_ends(name, ending) for ending in custom))
    else:
        adapted = tuple(name for name in linears if re.fullmatch(_MODES[mode], name))
    heads = (_HEAD,) if mode == "comprehensive" else ()
    return LoraTargets(adapted=adapted, selected=adapted + heads)


def module_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    names = [name for name, _ in model.named_modules()]
    return {part: tuple(name for name in names if re.fullmatch(pattern, name)) for part, pattern in _PARTS.items()}


def _ends(name: str, ending: str) -> bool:
    """Whole components only."""
    return name == ending or name.endswith(f".{ending}")


def _check_ending(ending: str, linears: Sequence[str]) -> None:
    if ending == _HEAD:
        raise ModelError(
            f"adapt.targets: `{ending}` is the head, and a head gets no LoRA",
            hint="train it in full: adapt.train_modules: [text_head]",
        )
    if not any(_ends(name, ending) for name in linears):
        known = dict.fromkeys(".".join(name.split(".")[-2:]) for name in linears if name != _HEAD)
        raise ModelError(
            f"adapt.targets: no linear layer's name ends in `{ending}`",
            hint="they end in: " + ", ".join(f"`{name}`" for name in known),
        )
