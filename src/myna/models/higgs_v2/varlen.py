"""Variable-length attention of torch. The import takes most of a second, so this module is imported for the first CUDA
batch of a training; speaking does not need it."""

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# Later versions want grouped queries declared; earlier ones infer them from the shapes.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def varlen_causal_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Attend causally inside each sequence; (positions, heads, head size) in sequence order."""
    ends = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    attended = varlen_attn(q, k, v, *ends, window_size=(-1, 0), **_GROUPED)
    assert isinstance(attended, Tensor), "no auxiliary output was requested"
    return attended
