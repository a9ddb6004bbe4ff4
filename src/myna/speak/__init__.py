"""Speech: requests, the batch loop, streaming. Here: keyword arguments that the command line and Python share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypedDict


class VoiceOptions(TypedDict, total=False):
    """Voice to speak in, and how."""

    reference: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    """Recording of the voice to speak in, of at most 60 s; several for a text with `[SPEAKER0]`, `[SPEAKER1]` tags."""
    reference_text: str | Sequence[str]
    """Transcript of that recording; one for each. If left out, it is heard by the recogniser of `myna setup metrics`,
    and shown."""
    voice: str | None
    """A stored voice of `myna voice list`, in place of a reference."""
    scene: str | None
    """A sentence about the room or the manner; if not given, the one that the run was trained with."""
    language: str
    """Language of a long text, such as en or de: helps to find its sentences."""
    lexicon: str | os.PathLike[str]
    """File of words and their spelling for the model, a tab between them; or YAML."""
    watermark: bool
    """Mark the speech inaudibly, for `myna detect`. Speech without the mark is logged as such."""


class SamplingOptions(TypedDict, total=False):
    """Sampling of the codes. A setting that is not given is the model's own."""

    temperature: float | None
    """0 is greedy; if not given, that of the model's generation_config.json."""
    top_k: int | None
    """Sample from the likeliest k codes, 0: all; by default the model's own."""
    top_p: float | None
    """Sample within this probability; by default the model's own."""
    max_seconds: float
    """Longest utterance, at which a runaway is cut. A text of more than about 30 s is spoken in segments, each of which
    may take as long. By default 60."""
    seed: int
    """Same seed, same speech."""


class SpeechOptions(VoiceOptions, SamplingOptions, total=False):
    """Keyword arguments of the functions that speak."""
