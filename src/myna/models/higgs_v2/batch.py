"""Sequences to tensors, in the order the fast forward pass wants them.

The stream is sorted by modality: all text positions first, then all audio positions. Norms and FFNs, of which this
family has one set per modality, then act on two contiguous slices; only attention looks at the sequence order. The
collator computes the permutation, and it also does the one shift of the labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from myna.models.base import IGNORED, Batch, Rendered


@dataclass(frozen=True, slots=True, eq=False)
class HiggsBatch(Batch):
    text_ids: torch.Tensor
    """(text positions,)"""
    codes: torch.Tensor
    """(audio positions, codebooks)"""
    to_sequence: torch.Tensor
    """(positions,): `stream[to_sequence]` is in sequence order."""
    to_stream: torch.Tensor
    """(positions,): its inverse."""
    position_ids: torch.Tensor
    """(positions,): in sequence order, starting over with every sequence."""
    bounds: torch.Tensor
    """(sequences + 1,) int32: where sequences begin and end."""
    audio_from: torch.Tensor
    """(audio targets,): the stream positions that predict them."""
    audio_targets: torch.Tensor
    """(audio targets, codebooks)"""
    text_from: torch.Tensor
    text_targets: torch.Tensor
    lengths: tuple[int, ...]
    target_counts: torch.Tensor
    audio_seconds: float

    @property
    def counts(self) -> torch.Tensor:
        return self.target_counts

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def target_seconds(self) -> float:
        return self.audio_seconds

    def to(self, device: torch.device) -> Self:
        moved = {
            field.name: getattr(self, field.name).to(device, non_blocking=True)
            for field in fields(self)
            if field.name != "target_counts" and isinstance(getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)


def collate(sequences: Sequence[Rendered], audio_ids: tuple[int, ...], codebooks: int, offset: int = 1) -> HiggsBatch:
    """Lay sequences end to end; position t learns the label of position t + `offset` of its own sequence."""
    ids = np.concatenate([s.ids for s in sequences])
    is_audio = np.isin(ids, audio_ids)
    codes = np.concatenate([s.codes for s in sequences])
    lengths = tuple(len(s) for s in sequences)
    to_stream = np.concatenate([np.flatnonzero(~is_audio), np.flatnonzero(is_audio)])
    to_sequence = np.argsort(to_stream)

    text_labels, code_labels = [], []
    for sequence in sequences:
        holds_audio = np.isin(sequence.ids, audio_ids)
        # Sequence by sequence: one frame too many here and one too few there would pass unseen.
        if not holds_audio.sum() == len(sequence.codes) == len(sequence.code_labels):
            raise AssertionError(f"{holds_audio.sum()} placeholders for {len(sequence.codes)} frames in {sequence.id}")
        per_position = np.full((len(sequence), codebooks), IGNORED, np.int64)
        per_position[holds_audio] = sequence.code_labels
        code_labels.append(_shift(per_position, offset))
        text_labels.append(_shift(sequence.labels, offset))
    text_label, code_label = np.concatenate(text_labels), np.concatenate(code_labels)
    audio_at, text_at = (code_label != IGNORED).any(axis=1), text_label != IGNORED
    counts = [text_at.sum(), *(code_label != IGNORED).sum(axis=0)]
    return HiggsBatch(
        text_ids=torch.from_numpy(ids[~is_audio]),
        codes=torch.from_numpy(codes),
        to_sequence=torch.from_numpy(to_sequence),
        to_stream=torch.from_numpy(to_stream),
        position_ids=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
        bounds=torch.from_numpy(np.cumsum([0, *lengths])).int(),
        audio_from=torch.from_numpy(to_sequence[audio_at]),
        audio_targets=torch.from_numpy(code_label[audio_at]),
        text_from=torch.from_numpy(to_sequence[text_at]),
        text_targets=torch.from_numpy(text_label[text_at]),
        lengths=lengths,
        target_counts=torch.tensor(counts, dtype=torch.float64),
        audio_seconds=sum(s.target_seconds for s in sequences),
    )


def _shift(labels: npt.NDArray[np.int64], offset: int) -> npt.NDArray[np.int64]:
    """Row t of the result is row t + offset of `labels`, masked where there is none."""
    shifted = np.full_like(labels, IGNORED)
    if offset > 0:
        shifted[:-offset] = labels[offset:]
    elif offset < 0:
        shifted[-offset:] = labels[:offset]
    else:
        shifted[:] = labels
    return shifted
