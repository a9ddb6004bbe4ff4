"""Where kernels of our own can be used instead of what torch has."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

TRITON_CAPABILITY = (8, 0)
"""The first compute capability that Triton promises to work on."""


def fused(x: torch.Tensor) -> bool:
    """Whether the kernels work on such a tensor."""
    return x.is_cuda and _has_triton(x.device.index)


@cache
def _has_triton(device: int) -> bool:
    """torch for CUDA brings it on Linux; elsewhere there may be none."""
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= TRITON_CAPABILITY
