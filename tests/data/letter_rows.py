"""A family for tests of the loader: a token a character and a token a frame."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from myna.core.config import DataSettings
from myna.data.conversation import AudioClip, Conversation
from myna.data.dataset import PreparedDataset
from myna.data.lengths import LengthEstimator
from myna.data.loader import Loader, Shard

ROW = 1000


@dataclass(frozen=True)
class Line:
    """Sequence with a token for each frame and each character."""

    id: str
    references: tuple[str, ...]
    length: int

    def __len__(self) -> int:
        return self.length


def render(conversation: Conversation) -> Line:
    parts = [part for turn in conversation.turns for part in turn.parts]
    clips = [part for part in parts if isinstance(part, AudioClip)]
    length = len(conversation.scene) + sum(
        len(part.codes) if isinstance(part, AudioClip) else len(part) for part in parts
    )
    return Line(conversation.id, tuple(clip.id for clip in clips if not clip.target), length)


class Characters:
    """Length estimator of such a family."""

    text_revision = "characters"

    def count_tokens(self, texts: Mapping[str, str]) -> list[int]:
        return [len(text) for text in texts.values()]

    def positions(self, frames: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        return frames

    def length(self, conversation: Conversation) -> int:
        return len(render(conversation))


Step = list[list[Line]]


def load(
    corpus: PreparedDataset,
    seed: int = 0,
    render: Callable[[Conversation], Line] = render,
    length_estimator: LengthEstimator = Characters(),  # noqa: B008 - it holds nothing
    **settings: Any,
) -> Loader[Line, list[Line]]:
    chosen = DataSettings(train=corpus.folder, **({"row_tokens": ROW, "packing_window": 16} | settings))
    return Loader(corpus, chosen, render=render, collate=list, length_estimator=length_estimator, seed=seed)


def first(steps: Iterator[Step], count: int) -> list[Step]:
    return list(islice(steps, count))


def rows_of(loader: Loader[Line, list[Line]], count: int) -> list[list[Line]]:
    """Return the first rows of the loader, one row a step."""
    return [passes[0] for passes in first(loader.steps(1, 1, Shard()), count)]
