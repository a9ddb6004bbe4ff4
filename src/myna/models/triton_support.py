"""Whether the Triton kernels can run."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

TRITON_CAPABILITY = (8, 0)
"""The first compute capability that Triton supports."""


def supports_triton(x: torch.Tensor) -> bool:
    """Whether Triton kernels can run on the tensor's device."""
    return x.is_cuda and not why_no_triton(x.device.index)


@cache
def why_no_triton(device: int) -> str:
    """Why Triton kernels cannot run on a CUDA device, or nothing."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < TRITON_CAPABILITY:
        return "Triton needs compute capability {}.{}".format(*TRITON_CAPABILITY)
    return ""
