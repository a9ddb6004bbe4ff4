"""Packed attention sequence by sequence, for GPUs without a kernel for all at once, and by our own kernels."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from myna.models.attention import packed_causal_attention
from myna.models.higgs_v2 import forward
from myna.models.higgs_v2.forward import PackedAttention, attention_tile_table

LENGTHS = (50, 1, 39, 64, 300, 128, 17)
"""Lengths of whole tiles, parts of tiles, and a single position."""


def test_tiles_cover_every_position_once() -> None:
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    for size in (16, 64, 128):
        table = attention_tile_table(cu_seqlens, sum(LENGTHS), size)
        assert table.dtype == torch.int32 and table.is_contiguous()
        covered = [
            position
            for start, length, first in table.tolist()
            for position in range(start + first, start + min(first + size, length))
        ]
        assert sorted(covered) == list(range(sum(LENGTHS)))
        assert all(first % size == 0 for _, _, first in table.tolist())


def test_tiles_of_full_sequences_use_every_row_of_the_table() -> None:
    """Each sequence is one position longer than a multiple of the tile, which needs the most tiles."""
    table = attention_tile_table(torch.tensor([0, 65, 130, 195], dtype=torch.int32), 195, 64)
    assert sorted(table.tolist()) == sorted([start, 65, first] for start in (0, 65, 130) for first in (0, 64))


def tiled_attention_error(device: str, dtype: torch.dtype, size: int) -> float:
    """Return the largest relative error of our kernels and their gradients, compared with fp32 on the CPU."""
    torch.manual_seed(0)
    given, d = torch.randn(sum(LENGTHS), 10, size).to(dtype), torch.randn(sum(LENGTHS), 6, size).to(dtype)

    q, k, v = (x.float().requires_grad_() for x in torch.split(given, [6, 2, 2], dim=1))
    exact = packed_causal_attention(q, k, v, LENGTHS)
    expected = [exact.detach(), *torch.autograd.grad(exact, (q, k, v), d.float())]

    cu_seqlens = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()
    tiles = forward._kernels().AttentionTileTables.from_cu_seqlens(cu_seqlens, sum(LENGTHS))
    unused = torch.empty(0, device=device)
    attention = PackedAttention(unused, unused, unused, unused, cu_seqlens, LENGTHS, 1024, tiles)
    # Parts of one tensor, as in the layers.
    q, k, v = (x.requires_grad_() for x in torch.split(given.to(device), [6, 2, 2], dim=1))
    apply: Any = forward._TiledAttention.apply
    found = attention.attend_tiled(q, k, v) if device == "cuda" else apply(q, k, v, tiles)
    gradients = torch.autograd.grad(found, (q, k, v), d.to(device))
    assert all(part.is_contiguous() for part in gradients), "or they are copied before they are turned back"
    pairs = zip(expected, [found.detach(), *gradients], strict=True)
    return max(float((one - other.float().cpu()).norm() / one.norm()) for one, other in pairs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [64, 128])
def test_tiled_attention_on_a_gpu(size: int) -> None:
    if torch.cuda.get_device_capability()[0] != forward.TILED_CAPABILITY_MAJOR:
        pytest.skip("the tiles are made for another card")
    assert tiled_attention_error("cuda", torch.bfloat16, size) < 1e-2


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton and TRITON_INTERPRET=1")
def test_tiled_attention_in_the_interpreter() -> None:
    """The kernels run slowly without a GPU: `TRITON_INTERPRET=1 pytest tests/models/higgs_v2/test_packing.py`."""
    assert tiled_attention_error("cpu", torch.float32, 32) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_shared_heads_on_a_gpu(dtype: torch.dtype) -> None:
    """Outputs and gradients are compared with fp32 on the CPU, since heads are easily given the wrong keys."""
    torch.manual_seed(0)
    given = [torch.randn(90, heads, 64) for heads in (6, 2, 2)]
    found = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        q, k, v = (x.to(device, kind).requires_grad_() for x in given)
        out = packed_causal_attention(q, k, v, (50, 1, 39))
        gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        found.append([part.detach().float().cpu() for part in (out, *gradients)])
    for exact, ours in zip(*found, strict=True):
        assert torch.allclose(exact, ours, rtol=1e-2, atol=1e-2 * float(exact.abs().max()))
