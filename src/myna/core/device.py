"""Devices that commands compute on, and what they support."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from myna.core.errors import ConfigError


def pick_device(setting: str) -> torch.device:
    """The torch device of a setting: `auto` is the best available; anything else must be available."""
    if setting == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if not available.get(setting.partition(":")[0], False):
        raise ConfigError(
            f"the device `{setting}` is not to be had here",
            hint="use `auto`, or one of: " + ", ".join(name for name, is_there in available.items() if is_there),
        )
    return torch.device(setting)


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
