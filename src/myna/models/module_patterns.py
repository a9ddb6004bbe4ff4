"""Module selection by name: the LoRA targets of each mode, and the parts of a model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from myna.core.errors import ModelError
from myna.models.base import LoraTargets


@dataclass(frozen=True, slots=True)
class ModulePatterns:
    """Patterns of the module names of one family."""

    modes: Mapping[str, tuple[str, tuple[str, ...]]]
    """LoRA mode -> pattern of the linear layers that get an adapter, and the heads that the mode covers."""
    parts: Mapping[str, str]
    """Short name -> pattern of full module names. Every parameter belongs to one part; heads end in `_head`."""

    def lora_targets(self, model: nn.Module, mode: str, custom: Sequence[str] = ()) -> LoraTargets:
        """LoRA targets in an unwrapped model. A head is only selected: it is trained in full or not at all."""
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        endings = custom if mode == "custom" else ()
        for ending in endings:
            self._check_ending(ending, linears)
        own = {"custom": (rf"(.*\.)?({'|'.join(map(re.escape, endings))})", ())}
        pattern, heads = {**self.modes, **own}[mode]
        adapted = tuple(name for name in linears if re.fullmatch(pattern, name))
        return LoraTargets(adapted=adapted, selected=adapted + tuple(name for name in linears if name in heads))

    def module_names(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Short names to full module names; a part that was not loaded has none."""
        names = [name for name, _ in model.named_modules()]
        return {part: tuple(n for n in names if re.fullmatch(pattern, n)) for part, pattern in self.parts.items()}

    def _check_ending(self, ending: str, linears: Sequence[str]) -> None:
        heads = {pattern: part for part, pattern in self.parts.items() if part.endswith("_head")}
        # Whole components only: `mlp.up_proj` does not mean `audio_mlp.up_proj`.
        matched = [name for name in linears if name == ending or name.endswith(f".{ending}")]
        if not matched:
            inner = [name.split(".") for name in linears if name not in heads]
            # A name may be given by its last component, by its last two, or in full.
            known = dict.fromkeys(".".join(name[-length:]) for length in (2, 1, 9) for name in inner)
            close = difflib.get_close_matches(ending, known, n=3, cutoff=0.6)
            shown = close or dict.fromkeys(".".join(name[-2:]) for name in inner)
            raise ModelError(
                f"adapt.targets: no linear layer's name ends in `{ending}`",
                hint=("nearest: " if close else "they end in: ") + ", ".join(f"`{name}`" for name in shown),
            )
        for name in matched:
            if name in heads:
                raise ModelError(
                    f"adapt.targets: `{ending}` means `{name}`, and a head gets no LoRA",
                    hint=f"train it in full: adapt.train_modules: [{heads[name]}]",
                )
