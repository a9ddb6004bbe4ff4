"""Who may look at whom: the way of a sorted stream through attention and back."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from myna.models.higgs_v2.batch import HiggsBatch

VARLEN_CAPABILITY = (8, 0)
"""The first compute capability whose attention kernel takes sequences of any length end to end."""

# Later versions want to be told that queries share keys; earlier ones see it by the shapes.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class Needed(NamedTuple):
    """The rows of a stream that somebody still looks at."""

    rows: torch.Tensor
    texts: int
    """How many of them are text; they come first, as ever."""


class Route(NamedTuple):
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

    @classmethod
    def of(cls, core: Any, batch: HiggsBatch, stream: torch.Tensor) -> Route:
        cos, sin = rotary_tables(core, batch.position_ids, stream)
        together = has_varlen(stream)
        # Rounded, and without lengths: a compiled layer is made anew for every number it has not seen.
        longest = -(-max(batch.lengths) // 1024) * 1024
        lengths = () if together else batch.lengths
        return cls(batch.to_sequence, batch.to_stream, cos, sin, batch.bounds, lengths, longest)

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


def attend_within(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Causal attention inside each sequence; (positions, heads, head size) in sequence order.

    One call per sequence: exact on every device, and no mask that grows with the square of a row.
    """
    if q.is_cuda and q.dtype != torch.float32:
        # An older card has a kernel for such numbers, but not where heads share keys: there it would compute all pairs.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    attended = []
    for parts in zip(*(torch.split(x, list(lengths)) for x in (q, k, v)), strict=True):
        one_q, one_k, one_v = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        grouped = one_q.shape[1] != one_k.shape[1]
        out = F.scaled_dot_product_attention(one_q, one_k, one_v, is_causal=True, enable_gqa=grouped)
        attended.append(out[0].transpose(0, 1))
    return torch.cat(attended)
