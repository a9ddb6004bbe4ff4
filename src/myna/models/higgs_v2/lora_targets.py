"""Which modules a LoRA mode means, and what the parts of the model are called."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from torch import nn

from myna.errors import ModelError
from myna.models.base import LoraTargets

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_TEXT_FFN = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_AUDIO_FFN = ("audio_mlp.gate_proj", "audio_mlp.up_proj", "audio_mlp.down_proj")
_HEADS = ("text_lm_head", "audio_lm_head")

_MODES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "comprehensive": (_ATTENTION + _TEXT_FFN + _AUDIO_FFN, _HEADS),
    "audio_focused": (("self_attn.q_proj", "self_attn.v_proj", *_AUDIO_FFN), ("audio_lm_head",)),
    "attention_only": (_ATTENTION, ()),
}
"""Mode -> ends of the names that get a LoRA, and the heads it covers."""

_PARTS = {
    "text_embedding": r"model\.embed_tokens",
    # The embedding lies inside a module of the same name, which must not be meant.
    "audio_embedding": r"model\.embed_audio_tokens\.embed_audio_tokens",
    "attention": r"model\.layers\.\d+\.self_attn",
    "text_ffn": r"model\.layers\.\d+\.mlp",
    "audio_ffn": r"model\.layers\.\d+\.audio_mlp",
    "norms": r"model\.layers\.\d+\.\w*layernorm|model\.norm",
    "text_head": r"text_lm_head",
    "audio_head": r"audio_lm_head",
}
"""Short name -> pattern of full module names. Every parameter belongs to one part."""


def adapt_targets(model: nn.Module, mode: str, custom: Sequence[str] = ()) -> LoraTargets:
    """What a mode means on this unwrapped model. A head is only selected: it is trained in full or not at all."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    endings, heads = (tuple(custom), ()) if mode == "custom" else _MODES[mode]
    for ending in endings:
        _check_ending(ending, linears)
    adapted = tuple(name for name in linears if any(_ends(name, ending) for ending in endings))
    return LoraTargets(adapted=adapted, selected=adapted + tuple(name for name in linears if name in heads))


def module_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Short names to full module names; the text head has none when it was not loaded."""
    names = [name for name, _ in model.named_modules()]
    return {part: tuple(name for name in names if re.fullmatch(pattern, name)) for part, pattern in _PARTS.items()}


def _ends(name: str, ending: str) -> bool:
    """Whole components only: `mlp.up_proj` does not mean `audio_mlp.up_proj`."""
    return name == ending or name.endswith(f".{ending}")


def _check_ending(ending: str, linears: Sequence[str]) -> None:
    matched = [name for name in linears if _ends(name, ending)]
    if not matched:
        # A name is known by its last component, by its last two, and in full.
        inner = [name for name in linears if name not in _HEADS]
        known = dict.fromkeys(".".join(name.split(".")[-length:]) for length in (2, 1, 9) for name in inner)
        close = difflib.get_close_matches(ending, known, n=3, cutoff=0.6)
        shown = close or dict.fromkeys(".".join(name.split(".")[-2:]) for name in inner)
        raise ModelError(
            f"adapt.targets: no linear layer's name ends in `{ending}`",
            hint=("nearest: " if close else "they end in: ") + ", ".join(f"`{name}`" for name in shown),
        )
    for name in matched:
        if name in _HEADS:
            short = next(part for part, pattern in _PARTS.items() if re.fullmatch(pattern, name))
            raise ModelError(
                f"adapt.targets: `{ending}` means `{name}`, and a head gets no LoRA",
                hint=f"train it in full: adapt.train_modules: [{short}]",
            )
