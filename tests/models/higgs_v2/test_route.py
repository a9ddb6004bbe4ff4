"""Attention, sequence by sequence, on cards that have no kernel for all of them at once."""

from __future__ import annotations

import pytest
import torch

from myna.models.higgs_v2.route import attend_within


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_heads_that_share_keys_see_the_same_on_a_card(dtype: torch.dtype) -> None:
    """With gradients, against fp32 on the CPU: which of the keys a head has is easily mistaken."""
    torch.manual_seed(0)
    given = [torch.randn(90, heads, 64) for heads in (6, 2, 2)]
    found = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        q, k, v = (x.to(device, kind).requires_grad_() for x in given)
        out = attend_within(q, k, v, (50, 1, 39))
        gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        found.append([part.detach().float().cpu() for part in (out, *gradients)])
    for exact, ours in zip(*found, strict=True):
        assert torch.allclose(exact, ours, rtol=1e-2, atol=1e-2 * float(exact.abs().max()))
