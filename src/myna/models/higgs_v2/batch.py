"""Sequences to tensors, in the order the fast forward pass wants them.

The stream is sorted by modality: all text positions first, then all audio positions. Norms and FFNs, of which this
family has one set per modality, then act on two contiguous slices; only attention looks at the sequence order. The
collator computes the permutation, and it also does the one shift of the labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from myna.models.base import IGNORED, Batch, RenderedSequence


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
    needed: torch.Tensor
    """Stream positions that predict anything, in order: after the last attention nobody looks at the others."""
    needed_texts: int
    """How many of them are text."""
    audio_place: torch.Tensor
    """(audio targets,): where in `needed` the positions are that predict them."""
    text_place: torch.Tensor


def collate(sequences: Sequence[RenderedSequence], audio_ids: tuple[int, ...], offset: int = 1) -> HiggsBatch:
    """Lay sequences end to end; position t learns the label of position t + `offset` of its own sequence."""
    ids = np.concatenate([s.ids for s in sequences])
    is_audio = np.isin(ids, audio_ids)
    lengths = tuple(len(s) for s in sequences)
    bounds = np.cumsum([0, *lengths])
    frames = np.add.reduceat(is_audio, bounds[:-1], dtype=np.int64)
    for sequence, holds in zip(sequences, frames.tolist(), strict=True):
        # Sequence by sequence: one frame too many here and one too few there would pass unseen.
        if not holds == len(sequence.codes) == len(sequence.code_labels):
            raise AssertionError(f"{holds} placeholders for {len(sequence.codes)} frames in {sequence.id}")
    position_ids = np.arange(len(ids)) - np.repeat(bounds[:-1], lengths)
    audio_positions, text_positions = np.flatnonzero(is_audio), np.flatnonzero(~is_audio)
    to_stream = np.concatenate([text_positions, audio_positions])
    to_sequence = np.empty_like(to_stream)
    to_sequence[to_stream] = np.arange(len(ids))

    # Labels whose predicting position, `offset` before them, lies within their own sequence.
    predicted = (position_ids >= offset) & (position_ids - offset < np.repeat(lengths, lengths))
    labels = np.concatenate([s.labels for s in sequences])
    code_labels = np.concatenate([s.code_labels for s in sequences])
    text_at = np.flatnonzero((labels != IGNORED) & predicted)
    learned = (code_labels != IGNORED).any(axis=1) & predicted[audio_positions]
    audio_targets = code_labels[learned]
    counts = [len(text_at), *(audio_targets != IGNORED).sum(axis=0)]
    audio_from, text_from = to_sequence[audio_positions[learned] - offset], to_sequence[text_at - offset]
    is_needed = np.zeros(len(ids), bool)
    is_needed[audio_from] = is_needed[text_from] = True
    place = np.cumsum(is_needed) - 1
    return HiggsBatch(
        text_ids=torch.from_numpy(ids[text_positions]),
        codes=torch.from_numpy(np.concatenate([s.codes for s in sequences])),
        to_sequence=torch.from_numpy(to_sequence),
        to_stream=torch.from_numpy(to_stream),
        position_ids=torch.from_numpy(position_ids),
        bounds=torch.from_numpy(bounds).int(),
        audio_from=torch.from_numpy(audio_from),
        audio_targets=torch.from_numpy(audio_targets),
        text_from=torch.from_numpy(text_from),
        text_targets=torch.from_numpy(labels[text_at]),
        needed=torch.from_numpy(np.flatnonzero(is_needed)),
        needed_texts=int(is_needed[: len(text_positions)].sum()),
        audio_place=torch.from_numpy(place[audio_from]),
        text_place=torch.from_numpy(place[text_from]),
        lengths=lengths,
        counts=torch.tensor(counts, dtype=torch.float64),
        target_seconds=sum(s.target_seconds for s in sequences),
    )
