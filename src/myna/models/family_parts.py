"""Parts of families: module selection by name, and what all renderers have in common."""

import difflib
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import nn

from myna.core.errors import DataError, ModelError
from myna.data.conversation import AudioClip, Conversation
from myna.models.base import LoraTargets, RenderedSequence


@dataclass(frozen=True, slots=True)
class ModulePatterns:
    """Patterns of the module names of one family."""

    modes: Mapping[str, tuple[str, tuple[str, ...]]]
    """LoRA mode -> pattern of the linear layers that get an adapter, and the heads that the mode covers."""
    parts: Mapping[str, str]
    """Short name -> pattern of full module names. Every parameter belongs to one part; heads end in `_head`."""

    def lora_targets(self, model: nn.Module, mode: str, custom: Sequence[str] = ()) -> LoraTargets:
        """Return the LoRA targets of a model. A head is only selected: it is trained in full or not at all."""
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        endings = custom if mode == "custom" else ()
        for ending in endings:
            self._check_ending(ending, linears)
        own = {"custom": (rf"(.*\.)?({'|'.join(map(re.escape, endings))})", ())}
        pattern, heads = {**self.modes, **own}[mode]
        adapted = tuple(name for name in linears if re.fullmatch(pattern, name))
        return LoraTargets(adapted=adapted, selected=adapted + tuple(name for name in linears if name in heads))

    def module_names(self, model: nn.Module) -> dict[str, tuple[str, ...]]:
        """Map short names to full module names; a part that was not loaded has none."""
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


TOKEN_CACHE_SIZE = 4096
"""Texts whose token ids are cached."""

Ids = npt.NDArray[np.int64]


class PromptSegment(NamedTuple):
    """Piece of a prompt: text, a control token, or a clip between its control tokens."""

    kind: Literal["text", "special", "audio"]
    text: str
    supervised: bool = False
    clip: AudioClip | None = None
    cached: bool = False
    """Whether to cache the tokens, because the same text occurs in many conversations."""


@dataclass(frozen=True, eq=False)
class PromptRenderer(ABC):
    """Base of the families' renderers: everything about text that does not depend on the prompt format."""

    tokenizer: Any

    def __getstate__(self) -> dict[str, Any]:
        # Caches are left out: every process fills its own.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    @abstractmethod
    def revision(self) -> str:
        """Hash over the ids of conversations that use every rule of the prompt."""

    @abstractmethod
    def render(
        self, conversation: Conversation, *, supervise_text: bool = False, supervise_references: bool = False
    ) -> RenderedSequence: ...

    @abstractmethod
    def _segments(self, conversation: Conversation) -> Iterator[PromptSegment]:
        """Yield the prompt of a conversation, in order."""

    @abstractmethod
    def _clip_positions(self, clip: AudioClip) -> int: ...

    def length(self, conversation: Conversation) -> int:
        return sum(
            len(self._ids(segment)) if segment.clip is None else self._clip_positions(segment.clip)
            for segment in self._segments(conversation)
        )

    @property
    def text_revision(self) -> str:
        """Hash over the whole tokenizer."""
        return hashlib.blake2b(self._backend.to_str().encode(), digest_size=16).hexdigest()

    def count_tokens(self, texts: Mapping[str, str]) -> list[int]:
        checked = [self._check_text(text, id) for id, text in texts.items()]
        return [len(tokens) for tokens in self._backend.encode_batch_fast(checked, add_special_tokens=False)]

    def _ids(self, segment: PromptSegment) -> Ids:
        if segment.kind == "special":
            return self._special_ids(segment.text)
        return self._cached_ids(segment.text) if segment.cached else self._encode(segment.text)

    @cached_property
    def _cached_ids(self) -> Callable[[str], Ids]:
        return lru_cache(TOKEN_CACHE_SIZE)(self._encode)

    @cached_property
    def _special_ids(self) -> Callable[[str], Ids]:
        return lru_cache(None)(lambda token: np.array([self.tokenizer.convert_tokens_to_ids(token)], np.int64))

    def _encode(self, text: str) -> Ids:
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, np.int64)

    def _check_text(self, text: str, id: str) -> str:
        """Refuse control tokens in the user's text."""
        if match := self._control_tokens.search(text):
            raise DataError(f"the text of {id} contains the control token {match[0]}", hint="remove it from the text")
        return text

    @cached_property
    def _backend(self) -> Any:
        """Rust tokenizer, which takes a tenth of the time of transformers' wrapper for a sentence."""
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return backend

    @cached_property
    def _control_tokens(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.tokenizer.get_added_vocab())) or r"(?!)")
