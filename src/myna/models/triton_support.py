"""Whether the Triton kernels can run."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

TRITON_CAPABILITY = (8, 0)
"""The first compute capability that Triton supports."""


def supports_triton(x: torch.Tensor) -> bool:
    """Whether Triton kernels can run on the tensor's device."""
    return x.is_cuda and _has_triton(x.device.index)


@cache
def _has_triton(device: int) -> bool:
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= TRITON_CAPABILITY
