"""What a family is before anything of its own: a configuration, perhaps a folder with weights, and a renderer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from myna.data.conversation import Conversation
from myna.errors import ModelError
from myna.models.base import Family
from myna.models.files import load_tokenizer


class Renders(Protocol):
    """What every renderer can tell of texts and conversations without rendering them."""

    @property
    def revision(self) -> str: ...

    @property
    def text_revision(self) -> str: ...

    def count_tokens(self, texts: Mapping[str, str]) -> list[int]: ...

    def length(self, conversation: Conversation) -> int: ...


class HFFamily(Family):
    """One of transformers' checkpoints, opened without its weights; without a folder it is there for arithmetic."""

    def __init__(self, source: str, config: Any, folder: Path | None, codec: str | None = None) -> None:
        self.source = source
        self.config = config
        self.folder = folder
        self._codec = codec

    @property
    @abstractmethod
    def renderer(self) -> Renders:
        """The one way from a conversation to ids."""

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self._checkpoint())

    @property
    def has_weights(self) -> bool:
        return self.folder is not None

    @property
    def prompt_revision(self) -> str:
        return self.renderer.revision

    @cached_property
    def text_revision(self) -> str:
        return self.renderer.text_revision

    def count_tokens(self, texts: Mapping[str, str]) -> list[int]:
        return self.renderer.count_tokens(texts)

    def length(self, conversation: Conversation) -> int:
        return self.renderer.length(conversation)

    def show_token(self, id: int) -> str:
        return str(self.tokenizer.decode([id]))

    def _checkpoint(self) -> Path:
        if self.folder is None:
            raise ModelError(
                f"{self.source} is a configuration without weights", hint="name a checkpoint: a folder or a hub name"
            )
        return self.folder
