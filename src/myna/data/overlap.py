"""Overlap of clips with training data: the same audio, or the same words of the same speaker."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from myna.core.config import Recipe
from myna.core.io import file_hash
from myna.data.code_store import codes_key
from myna.data.dataset import PreparedDataset, Utterances
from myna.data.manifest import Span
from myna.data.references import ReferenceSampler
from myna.text.normalization import normalise_text

OverlapKind = Literal["audio", "words"]


class ComparedClip(NamedTuple):
    """Clip, or a text alone, to be searched for in training data."""

    id: str
    speaker: str
    text: str
    key: str = ""
    """Key from `PreparedDataset.key`; empty without audio."""


@dataclass(frozen=True, slots=True)
class TrainedClips:
    utterances: Utterances
    codec_revision: str

    @classmethod
    def open(cls, recipe: Recipe) -> TrainedClips:
        dataset = PreparedDataset.open(recipe.data.train)
        targets = ReferenceSampler(dataset, recipe.data, recipe.train.seed).targets
        return cls(dataset.utterances if recipe.loss.supervise_references else targets, dataset.info.codec_revision)

    def key(self, audio: Path, span: Span | None = None) -> str:
        """Key of a clip of this audio in the training data, wherever the file is."""
        return codes_key(file_hash(audio), span, self.codec_revision)

    def find(self, clips: Sequence[ComparedClip], *, unnamed_speakers: bool = False) -> dict[str, OverlapKind]:
        return find_overlap(self.utterances, clips, unnamed_speakers=unnamed_speakers)


def find_overlap(
    trained: Utterances, clips: Sequence[ComparedClip], *, unnamed_speakers: bool = False
) -> dict[str, OverlapKind]:
    """Find the clips that are among the trained ones, and why, by id. With `unnamed_speakers`, equal words count too if
    one of the two clips names no speaker."""
    keys = trained.keys_among([clip.key for clip in clips if clip.key])
    speakers = {clip.speaker for clip in clips}
    # There may be a million trained clips, so only those that can be equal are compared.
    if unnamed_speakers:
        compared = trained if "" in speakers else trained.by_speakers({*speakers, ""})
    else:
        compared = trained.by_speakers(speakers - {""})
    said_by: defaultdict[str, set[str]] = defaultdict(set)
    for utterance in compared:
        said_by[plain_words(utterance.text)].add(utterance.speaker)

    def is_said(clip: ComparedClip) -> bool:
        by = said_by.get(plain_words(clip.text), set()) if clip.text else set()
        return clip.speaker in by or (unnamed_speakers and bool(by) and (not clip.speaker or "" in by))

    found: dict[str, OverlapKind] = {clip.id: "words" for clip in clips if is_said(clip)}
    return found | {clip.id: "audio" for clip in clips if clip.key in keys}


def plain_words(text: str) -> str:
    """Remove case and punctuation from a text."""
    letters = (c for c in normalise_text(text).casefold() if not unicodedata.category(c).startswith("P"))
    return " ".join("".join(letters).split())
