"""Is it the same voice? The speaker encoder of Resemblyzer, whose weights come in its wheel.

Two clips of one real speaker are about 0.87 alike, two speakers about 0.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt

from myna.audio.files import Samples
from myna.evaluate.dependencies import RATE, heard_at, is_silent, needed

Voice = npt.NDArray[np.float32]
"""A voice as a direction: as many numbers as its ear has, of length one, or zero where no voice was heard."""

# Its declared dependencies do not install everywhere (webrtcvad must be compiled, typing shadows the standard
# library's), so it comes alone and the extra brings what it really imports.
INSTALL = ("pip install --no-deps resemblyzer==0.1.4", 'pip install "myna[evaluate]"')


class ResemblyzerEncoder:
    def __init__(self, encoder: Any, preprocess: Any) -> None:
        self._encoder, self._preprocess = encoder, preprocess

    @classmethod
    def open(cls) -> ResemblyzerEncoder:
        resemblyzer = needed("resemblyzer", *INSTALL)
        return cls(resemblyzer.VoiceEncoder("cpu", verbose=False), resemblyzer.preprocess_wav)

    @property
    def name(self) -> str:
        return f"resemblyzer {version('resemblyzer')}"

    def embed(self, samples: Samples, sample_rate: int) -> Voice:
        """Long silences are cut out first. A clip with no voice in it gives zeros, so that it is like nobody."""
        clip = heard_at(samples, sample_rate)
        nobody = np.zeros(256, np.float32)
        # Silence would be raised to the usual loudness, which is a division by nothing.
        if is_silent(clip):
            return nobody
        spoken = self._preprocess(clip, RATE)
        return np.asarray(self._encoder.embed_utterance(spoken), np.float32) if len(spoken) else nobody

    @staticmethod
    def similarity(one: Voice, other: Voice) -> float:
        """The cosine of two voices, at most 1; 0 where one of them was not heard."""
        lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
        return float(one @ other) / lengths if lengths else 0.0


def rank(clone: Voice, own: int, voices: Sequence[Voice]) -> int:
    """Which place its own voice has among all, by similarity: 1 is the nearest. Whoever draws level comes before it."""
    alike = [ResemblyzerEncoder.similarity(clone, voice) for voice in voices]
    return 1 + sum(other >= alike[own] for place, other in enumerate(alike) if place != own)
