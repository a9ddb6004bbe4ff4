"""Packed batch and collator.

The batch is sorted by modality: all text positions first, then all audio positions. Norms and FFNs, of which this
family has one set per modality, then act on two contiguous slices; only attention needs the sequence order. The
collator computes the permutation and shifts the labels, once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from myna.models.base import IGNORE_INDEX, Batch, RenderedSequence


@dataclass(frozen=True, slots=True, eq=False)
class HiggsBatch(Batch):
    """Packed sequences of Higgs Audio v2, sorted by modality."""

    text_ids: torch.Tensor
    """(text positions,)"""
    codes: torch.Tensor
    """(audio positions, codebooks)"""
    to_sequence: torch.Tensor
    """(positions,): indices that bring the residual stream, `stream[to_sequence]`, into sequence order."""
    to_stream: torch.Tensor
    """(positions,): inverse of `to_sequence`."""
    position_ids: torch.Tensor
    """(positions,): positions in sequence order, starting over with every sequence."""
    cu_seqlens: torch.Tensor
    """(sequences + 1,) int32: where sequences begin and end."""
    audio_predictors: torch.Tensor
    """(audio targets,): the stream positions that predict them."""
    audio_targets: torch.Tensor
    """(audio targets, codebooks)"""
    text_targets: torch.Tensor
    output_positions: torch.Tensor
    """Stream positions that predict anything, in order. After the last attention only these are computed."""
    num_text_outputs: int
    """Number of them that are text."""
    audio_output_index: torch.Tensor
    """(audio targets,): indices into `output_positions` of the positions that predict the targets."""
    text_output_index: torch.Tensor


def collate(sequences: Sequence[RenderedSequence], audio_ids: tuple[int, ...], offset: int = 1) -> HiggsBatch:
    """Lay sequences end to end; position t learns the label of position t + `offset` of its own sequence."""
    ids = np.concatenate([s.ids for s in sequences])
    is_audio = np.isin(ids, audio_ids)
    lengths = tuple(len(s) for s in sequences)
    cu_seqlens = np.cumsum([0, *lengths])
    frames = np.add.reduceat(is_audio, cu_seqlens[:-1], dtype=np.int64)
    for sequence, placeholders in zip(sequences, frames.tolist(), strict=True):
        # Checked per sequence: in the sum, one frame too many and one too few would cancel out.
        if not placeholders == len(sequence.codes) == len(sequence.code_labels):
            raise AssertionError(f"{placeholders} placeholders for {len(sequence.codes)} frames in {sequence.id}")
    position_ids = np.arange(len(ids)) - np.repeat(cu_seqlens[:-1], lengths)
    audio_positions, text_positions = np.flatnonzero(is_audio), np.flatnonzero(~is_audio)
    to_stream = np.concatenate([text_positions, audio_positions])
    to_sequence = np.empty_like(to_stream)
    to_sequence[to_stream] = np.arange(len(ids))

    # Labels whose predicting position, `offset` before them, lies within their own sequence.
    predicted = (position_ids >= offset) & (position_ids - offset < np.repeat(lengths, lengths))
    labels = np.concatenate([s.labels for s in sequences])
    code_labels = np.concatenate([s.code_labels for s in sequences])
    text_label_at = np.flatnonzero((labels != IGNORE_INDEX) & predicted)
    learned = (code_labels != IGNORE_INDEX).any(axis=1) & predicted[audio_positions]
    audio_targets = code_labels[learned]
    counts = [len(text_label_at), *(audio_targets != IGNORE_INDEX).sum(axis=0)]
    audio_predictors = to_sequence[audio_positions[learned] - offset]
    text_predictors = to_sequence[text_label_at - offset]
    is_output = np.zeros(len(ids), bool)
    is_output[audio_predictors] = is_output[text_predictors] = True
    output_index = np.cumsum(is_output) - 1
    return HiggsBatch(
        text_ids=torch.from_numpy(ids[text_positions]),
        codes=torch.from_numpy(np.concatenate([s.codes for s in sequences])),
        to_sequence=torch.from_numpy(to_sequence),
        to_stream=torch.from_numpy(to_stream),
        position_ids=torch.from_numpy(position_ids),
        cu_seqlens=torch.from_numpy(cu_seqlens).int(),
        audio_predictors=torch.from_numpy(audio_predictors),
        audio_targets=torch.from_numpy(audio_targets),
        text_targets=torch.from_numpy(labels[text_label_at]),
        output_positions=torch.from_numpy(np.flatnonzero(is_output)),
        num_text_outputs=int(is_output[: len(text_positions)].sum()),
        audio_output_index=torch.from_numpy(output_index[audio_predictors]),
        text_output_index=torch.from_numpy(output_index[text_predictors]),
        lengths=lengths,
        counts=torch.tensor(counts, dtype=torch.float64),
        target_seconds=sum(s.target_seconds for s in sequences),
    )
