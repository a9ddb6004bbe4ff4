"""Packed sequences: causal attention inside each sequence of a stream that is sorted by modality."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from myna.models.attention import packed_causal_attention
from myna.models.higgs_v2.batch import HiggsBatch
from myna.models.triton_support import supports_triton

VARLEN_CAPABILITY = (8, 0)
"""The first compute capability with a variable-length attention kernel in torch."""
TILED_CAPABILITY_MAJOR = 9
"""The compute capability that our attention kernels were tuned on; elsewhere tiles may not fit shared memory."""
TILED_HEAD_SIZES = (16, 32, 64, 128)


class OutputRows(NamedTuple):
    """The rows of a stream that the loss reads."""

    rows: torch.Tensor
    num_text: int
    """How many of them are text; they come first."""


class PackedAttention(NamedTuple):
    """Attention over packed sequences, prepared once per batch for all layers."""

    to_sequence: torch.Tensor
    """(positions,): `stream[to_sequence]` is in sequence order."""
    to_stream: torch.Tensor
    """(positions,): its inverse."""
    cos: torch.Tensor
    sin: torch.Tensor
    """(positions, 1, head size): rotary tables in sequence order."""
    cu_seqlens: torch.Tensor
    """(sequences + 1,) int32: where sequences begin and end."""
    lengths: tuple[int, ...]
    """Of the sequences, where attention runs one by one; empty where one call takes all."""
    max_seqlen: int
    """At least the longest sequence."""
    tiles: tuple[torch.Tensor, ...] | None = None
    """Tile tables of our own attention kernels; None where torch's are used."""

    @classmethod
    def from_batch(cls, core: Any, batch: HiggsBatch, stream: torch.Tensor) -> PackedAttention:
        cos, sin = rotary_tables(core, batch.position_ids, stream)
        varlen = supports_varlen_attention(stream)
        # Rounded, and without lengths: a compiled layer is recompiled for every new number.
        max_seqlen = -(-max(batch.lengths) // 1024) * 1024
        lengths = () if varlen else batch.lengths
        tiles = None
        if varlen and supports_tiled_attention(stream):
            tiles = _kernels().AttentionTileTables.from_cu_seqlens(batch.cu_seqlens, len(stream))
        return cls(batch.to_sequence, batch.to_stream, cos, sin, batch.cu_seqlens, lengths, max_seqlen, tiles)

    def rotate_and_attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`attend` with rotary embedding of queries and keys first."""
        q, k = (apply_rotary(x, self.cos, self.sin).to(v.dtype) for x in (q, k))
        return self.attend(q, k, v)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention inside each sequence; (positions, heads, head size) in sequence order."""
        if self.lengths:
            return packed_causal_attention(q, k, v, self.lengths)
        from myna.models.higgs_v2.varlen import varlen_causal_attention

        return varlen_causal_attention(q, k, v, self.cu_seqlens, self.max_seqlen)

    def attend_tiled(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`attend` by our own kernels where they apply; not inside compiled layers."""
        if self.tiles is None or q.dtype not in (torch.bfloat16, torch.float16) or q.shape[2] not in TILED_HEAD_SIZES:
            return self.attend(q, k, v)
        return _TiledAttention.apply(q, k, v, self.tiles)  # type: ignore[no-untyped-call,no-any-return]


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        out, log2sumexp = _kernels().tiled_attention(q, k, v, tiles)
        ctx.save_for_backward(q, k, v, out, log2sumexp)
        ctx.tiles = tiles
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *d_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_kernels().tiled_attention_backward(d_outputs[0].contiguous(), *ctx.saved_tensors, ctx.tiles), None


@cache
def _kernels() -> Any:
    return __import__("myna.models.higgs_v2.fused.attention_kernels", fromlist=["attention_kernels"])


def supports_tiled_attention(like: torch.Tensor) -> bool:
    """Whether our own attention kernels run on this GPU. What they save: docs/benchmarks/attention.json."""
    return supports_triton(like) and torch.cuda.get_device_capability(like.device)[0] == TILED_CAPABILITY_MAJOR


def attention_tile_table(cu_seqlens: torch.Tensor, positions: int, size: int) -> torch.Tensor:
    """(tiles, 3) int32: the start and length of a tile's sequence, and the tile's first position in it.

    Computed on the GPU, without a sync. There are as many rows as any sequences of so many positions could need; the
    unused ones have length 0.
    """
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    ends = (-(-lengths // size)).cumsum(0)
    tile = torch.arange(positions // size + len(lengths), device=cu_seqlens.device)
    sequence = torch.searchsorted(ends, tile, right=True)
    used, sequence = sequence < len(lengths), sequence.clamp(max=len(lengths) - 1)
    # The last tiles of a sequence attend to the most keys, so they start first.
    first = (ends[sequence] - 1 - tile) * size
    return torch.stack([starts[sequence], lengths[sequence] * used, first * used], dim=1).int()


def supports_varlen_attention(like: torch.Tensor) -> bool:
    """Whether torch's variable-length attention runs on such a stream.

    Where embeddings are trained the stream is fp32, and autocast decides what attention gets.
    """
    autocast = torch.is_autocast_enabled(like.device.type) if like.is_cuda else False
    dtype = torch.get_autocast_dtype(like.device.type) if autocast else like.dtype
    capable = like.is_cuda and torch.cuda.get_device_capability(like.device) >= VARLEN_CAPABILITY
    return capable and dtype in (torch.bfloat16, torch.float16)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding; cos and sin are (positions, 1, head size)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rotary_tables(core: Any, position_ids: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the positions, (positions, 1, head size)."""
    cos, sin = core.model.rotary_emb(like, position_ids[None])
    return cos[0].unsqueeze(1), sin[0].unsqueeze(1)
