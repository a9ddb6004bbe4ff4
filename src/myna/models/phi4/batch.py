"""Packed batch and collator: token sequences, and the features of their clips.

Labels are shifted by one here. Features stay 16-bit codes without padding until they are on the device: as padded
floats they would take five times the memory in every transfer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from myna.models.base import IGNORE_INDEX, Batch, RenderedSequence
from myna.models.phi4.codec import CODES_PER_UNIT, MAX_CODE


@dataclass(frozen=True, slots=True, eq=False)
class Phi4Batch(Batch):
    """Packed sequences with the features of all clips."""

    ids: torch.Tensor
    """(positions,)"""
    position_ids: torch.Tensor
    """(positions,): positions, starting over with every sequence."""
    padded_at: torch.Tensor
    """(positions,): index of each position in the padded (sequences, longest) layout, flattened."""
    features: torch.Tensor
    """(spectra, bands): codes of all clips end to end, uint16 bits as int16."""
    features_at: torch.Tensor
    """(spectra,): index of each spectrum in the padded (clips, longest) layout, flattened."""
    spectra: torch.Tensor
    """(clips,): number of spectra."""
    max_spectra: int
    """Number of spectra of the longest clip."""
    audio_at: torch.Tensor
    """(audio positions,): index of each audio position in the packed sequence."""
    audio_from: torch.Tensor
    """(audio positions,): index of the embedding in the encoder's padded output, flattened."""
    text_from: torch.Tensor
    """(targets,): positions that predict the targets."""
    text_targets: torch.Tensor

    def padded_features(self) -> torch.Tensor:
        """Return features as floats, (clips, spectra, bands), zero beyond the end of a clip."""
        features = (self.features.int() & MAX_CODE).float() / CODES_PER_UNIT
        clips, bands = len(self.spectra), features.shape[1]
        padded = features.new_zeros(clips * self.max_spectra, bands)
        return padded.index_copy(0, self.features_at, features).view(clips, self.max_spectra, bands)


def collate(sequences: Sequence[RenderedSequence], bands: int, offset: int = 1) -> Phi4Batch:
    """Pack sequences; position t learns the label of position t + `offset` of its own sequence."""
    lengths = tuple(len(sequence) for sequence in sequences)
    bounds = np.cumsum([0, *lengths])
    position_ids = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    clips, audio_at = [], []
    for sequence, first in zip(sequences, bounds.tolist(), strict=False):
        for start, codes in _clips(sequence):
            clip = codes.reshape(-1, bands)
            # The last position of a clip is filled up with FILL_CODE, which is negative, unlike any feature.
            clips.append(clip[: np.count_nonzero(clip[:, 0] >= 0)].astype(np.uint16))
            audio_at.append(first + start + np.arange(len(codes)))
    spectra = np.array([len(clip) for clip in clips], np.int64)
    max_spectra = int(spectra.max(initial=0))
    features = np.concatenate(clips) if clips else np.empty((0, bands), np.uint16)
    # The encoder's output is padded to the longest clip.
    max_positions = max((len(at) for at in audio_at), default=0)
    audio_from = [number * max_positions + np.arange(len(at)) for number, at in enumerate(audio_at)]

    predicted = (position_ids >= offset) & (position_ids - offset < np.repeat(lengths, lengths))
    labels = np.concatenate([sequence.labels for sequence in sequences])
    text_at = np.flatnonzero((labels != IGNORE_INDEX) & predicted)
    return Phi4Batch(
        ids=torch.from_numpy(np.concatenate([sequence.ids for sequence in sequences])),
        position_ids=torch.from_numpy(position_ids),
        padded_at=torch.from_numpy(position_ids + np.repeat(np.arange(len(lengths)) * max(lengths), lengths)),
        features=torch.from_numpy(features.view(np.int16)),
        features_at=torch.from_numpy(
            _concatenate([number * max_spectra + np.arange(n) for number, n in enumerate(spectra)])
        ),
        spectra=torch.from_numpy(spectra),
        max_spectra=max_spectra,
        audio_at=torch.from_numpy(_concatenate(audio_at)),
        audio_from=torch.from_numpy(_concatenate(audio_from)),
        text_from=torch.from_numpy(text_at - offset),
        text_targets=torch.from_numpy(labels[text_at]),
        lengths=lengths,
        counts=torch.tensor([len(text_at)], dtype=torch.float64),
        target_seconds=sum(sequence.target_seconds for sequence in sequences),
    )


def _clips(sequence: RenderedSequence) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yield the first position and the codes of each clip of a sequence."""
    used = 0
    for span in sequence.spans:
        if span.kind == "audio":
            count = span.stop - span.start
            yield span.start, sequence.codes[used : used + count]
            used += count
    if used != len(sequence.codes):
        raise AssertionError(f"{used} placeholders for {len(sequence.codes)} positions of sound in {sequence.id}")


def _concatenate(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
