"""Who may look at whom: the way of a sorted stream through attention and back."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn.attention.varlen import varlen_attn

from myna.models.attention import attend_within as attend_within
from myna.models.higgs_v2.batch import HiggsBatch
from myna.models.triton_support import fused

VARLEN_CAPABILITY = (8, 0)
"""The first compute capability whose attention kernel takes sequences of any length end to end."""

TILED_GENERATION = 9
"""The major compute capability of the cards they were measured on: on others, tiles may not fit into shared memory."""
TILED_SIZES = (16, 32, 64, 128)
"""Head sizes that a tile can have."""

# Later versions want to be told that queries share keys; earlier ones see it by the shapes.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class Needed(NamedTuple):
    """The rows of a stream that somebody still looks at."""

    rows: torch.Tensor
    texts: int
    """How many of them are text; they come first, as ever."""


class PackedAttention(NamedTuple):
    to_sequence: torch.Tensor
    """(positions,): `stream[to_sequence]` is in sequence order."""
    to_stream: torch.Tensor
    """(positions,): its inverse."""
    cos: torch.Tensor
    sin: torch.Tensor
    """(positions, 1, head size): rotary tables in sequence order."""
    bounds: torch.Tensor
    """(sequences + 1,) int32."""
    lengths: tuple[int, ...]
    """Of the sequences, where attention goes one by one; empty where it takes them all at once."""
    longest: int
    """At least the longest sequence."""
    tiles: tuple[torch.Tensor, ...] | None = None
    """Where the programs of our own kernels begin; None where those of torch are used."""

    @classmethod
    def of(cls, core: Any, batch: HiggsBatch, stream: torch.Tensor) -> PackedAttention:
        cos, sin = rotary_tables(core, batch.position_ids, stream)
        together = has_varlen(stream)
        # Rounded, and without lengths: a compiled layer is made anew for every number it has not seen.
        longest = -(-max(batch.lengths) // 1024) * 1024
        lengths = () if together else batch.lengths
        # Once for all layers.
        tiles = _kernels().Tiles.of(batch.bounds, len(stream)) if together and has_tiles(stream) else None
        return cls(batch.to_sequence, batch.to_stream, cos, sin, batch.bounds, lengths, longest, tiles)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`look` for queries and keys that were not rotated yet."""
        return self.look(rotate(q, self.cos, self.sin).to(v.dtype), rotate(k, self.cos, self.sin).to(v.dtype), v)

    def look(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention inside each sequence; (positions, heads, head size) in sequence order."""
        if not self.lengths:
            ends = (self.bounds, self.bounds, self.longest, self.longest)
            attended = varlen_attn(q, k, v, *ends, window_size=(-1, 0), **_GROUPED)
            assert isinstance(attended, torch.Tensor), "no auxiliary output was asked for"
            return attended
        return attend_within(q, k, v, self.lengths)

    def look_in_tiles(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`look`, where nothing is compiled around it: by our own kernels if they can do it."""
        if self.tiles is None or q.dtype not in (torch.bfloat16, torch.float16) or q.shape[2] not in TILED_SIZES:
            return self.look(q, k, v)
        return _InTiles.apply(q, k, v, self.tiles)  # type: ignore[no-untyped-call,no-any-return]


class _InTiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        out, reach = _kernels().forward(q, k, v, tiles)
        ctx.save_for_backward(q, k, v, out, reach)
        ctx.tiles = tiles
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *d_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_kernels().backward(d_outputs[0].contiguous(), *ctx.saved_tensors, ctx.tiles), None


@cache
def _kernels() -> Any:
    return __import__("myna.models.higgs_v2.fused.attention_kernels", fromlist=["attention_kernels"])


def has_tiles(like: torch.Tensor) -> bool:
    """Whether our own kernels are made for the card. How much they save: docs/benchmarks/attention.json."""
    return fused(like) and torch.cuda.get_device_capability(like.device)[0] == TILED_GENERATION


def tabulate(bounds: torch.Tensor, positions: int, size: int) -> torch.Tensor:
    """(tiles, 3) int32: the beginning and length of a tile's sequence, and its first position in it.

    Worked out on the card, since the host need not know the lengths. There are as many rows as any sequences of so many
    positions could need; those left over have no length.
    """
    starts, lengths = bounds[:-1], bounds.diff()
    ends = (-(-lengths // size)).cumsum(0)
    tile = torch.arange(positions // size + len(lengths), device=bounds.device)
    sequence = torch.searchsorted(ends, tile, right=True)
    used, sequence = sequence < len(lengths), sequence.clamp(max=len(lengths) - 1)
    # The last tiles of a sequence have the most to look at, and so begin first.
    first = (ends[sequence] - 1 - tile) * size
    return torch.stack([starts[sequence], lengths[sequence] * used, first * used], dim=1).int()


def has_varlen(like: torch.Tensor) -> bool:
    """Whether the attention kernel for sequences end to end can be used on a stream of such numbers.

    Where embeddings learn the stream is fp32, and autocast makes the numbers that attention sees.
    """
    cast = torch.is_autocast_enabled(like.device.type) if like.is_cuda else False
    dtype = torch.get_autocast_dtype(like.device.type) if cast else like.dtype
    return (
        like.is_cuda
        and dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(like.device) >= VARLEN_CAPABILITY
    )


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions; cos and sin are (positions, 1, head size)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rotary_tables(core: Any, position_ids: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = core.model.rotary_emb(like, position_ids[None])
    return cos[0].unsqueeze(1), sin[0].unsqueeze(1)
