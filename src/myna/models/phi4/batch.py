"""Sequences to tensors: one flat stream of positions, and the clips beside it, each with its own length.

Here the labels are shifted by one. Features travel as they are stored, in 16 bits and without padding: as numbers side
by side they would take five times the room between processes and on the way to a card.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from myna.models.base import IGNORED, Batch, RenderedSequence
from myna.models.phi4.codec import LARGEST, STEPS


@dataclass(frozen=True, slots=True, eq=False)
class PhiBatch(Batch):
    ids: torch.Tensor
    """(positions,)"""
    position_ids: torch.Tensor
    """(positions,): starting over with every sequence."""
    places: torch.Tensor
    """(positions,): where each stands when sequences lie side by side, each as long as the longest."""
    features: torch.Tensor
    """(spectra, bands): of all clips end to end, the bits of unsigned numbers as signed ones."""
    features_at: torch.Tensor
    """(spectra,): where each stands when clips lie side by side, each as long as the longest."""
    spectra: torch.Tensor
    """(clips,): how many there are of each."""
    most_spectra: int
    """Of the longest clip."""
    audio_at: torch.Tensor
    """(audio positions,): where in the stream what is heard stands."""
    audio_from: torch.Tensor
    """(audio positions,): where it stands among all that the encoder makes of the clips, end to end."""
    text_from: torch.Tensor
    """(targets,): the positions that predict them."""
    text_targets: torch.Tensor

    def side_by_side(self) -> torch.Tensor:
        """(clips, spectra, bands): features as numbers, as long as the longest, zero where a clip has ended."""
        numbers = (self.features.int() & LARGEST).float() / STEPS
        clips, bands = len(self.spectra), numbers.shape[1]
        room = numbers.new_zeros(clips * self.most_spectra, bands)
        return room.index_copy(0, self.features_at, numbers).view(clips, self.most_spectra, bands)


def collate(sequences: Sequence[RenderedSequence], bands: int, offset: int = 1) -> PhiBatch:
    """Lay sequences end to end; position t learns the label of position t + `offset` of its own sequence."""
    lengths = tuple(len(sequence) for sequence in sequences)
    bounds = np.cumsum([0, *lengths])
    position_ids = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    clips, audio_at = [], []
    for sequence, first in zip(sequences, bounds.tolist(), strict=False):
        for start, codes in _clips(sequence):
            clip = codes.reshape(-1, bands)
            # What fills up the last position of a clip is below zero, as no feature is.
            clips.append(clip[: np.count_nonzero(clip[:, 0] >= 0)].astype(np.uint16))
            audio_at.append(first + start + np.arange(len(codes)))
    spectra = np.array([len(clip) for clip in clips], np.int64)
    longest = int(spectra.max(initial=0))
    features = np.concatenate(clips) if clips else np.empty((0, bands), np.uint16)
    # Where each clip begins among the encoder's output, which is as long for all clips as for the longest.
    within = [np.arange(len(at)) for at in audio_at]
    most = max((len(at) for at in audio_at), default=0)
    audio_from = [number * most + places for number, places in enumerate(within)]

    predicted = (position_ids >= offset) & (position_ids - offset < np.repeat(lengths, lengths))
    labels = np.concatenate([sequence.labels for sequence in sequences])
    text_at = np.flatnonzero((labels != IGNORED) & predicted)
    return PhiBatch(
        ids=torch.from_numpy(np.concatenate([sequence.ids for sequence in sequences])),
        position_ids=torch.from_numpy(position_ids),
        places=torch.from_numpy(position_ids + np.repeat(np.arange(len(lengths)) * max(lengths), lengths)),
        features=torch.from_numpy(features.view(np.int16)),
        features_at=torch.from_numpy(_joined([number * longest + np.arange(n) for number, n in enumerate(spectra)])),
        spectra=torch.from_numpy(spectra),
        most_spectra=longest,
        audio_at=torch.from_numpy(_joined(audio_at)),
        audio_from=torch.from_numpy(_joined(audio_from)),
        text_from=torch.from_numpy(text_at - offset),
        text_targets=torch.from_numpy(labels[text_at]),
        lengths=lengths,
        counts=torch.tensor([len(text_at)], dtype=torch.float64),
        target_seconds=sum(sequence.target_seconds for sequence in sequences),
    )


def _clips(sequence: RenderedSequence) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Where each clip of a sequence begins, and what of it there is to hear."""
    used = 0
    for piece in sequence.pieces:
        if piece.kind == "audio":
            count = piece.stop - piece.start
            yield piece.start, sequence.codes[used : used + count]
            used += count
    if used != len(sequence.codes):
        raise AssertionError(f"{used} placeholders for {len(sequence.codes)} positions of sound in {sequence.id}")


def _joined(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
