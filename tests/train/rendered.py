"""Rendered sequences of a given shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from myna.models.base import IGNORE_INDEX, RenderedSequence


def speech(family: Any, text: int, audio: int, books: int = 8) -> RenderedSequence:
    """A sequence of the right shape, all of its audio learned."""
    ids = np.array([5] * text + [family.config.audio_token_id] * audio)
    codes = np.zeros((audio, books), np.int64)
    return RenderedSequence("speech", ids, codes, np.full(text + audio, IGNORE_INDEX), codes, (), audio / 25)
