"""Settings of torch that belong to the process, and change what later tests in it compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

CUDNN_FLAGS = ("enabled", "benchmark", "deterministic", "allow_tf32")


def torch_settings() -> dict[str, Any]:
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        **{f"cudnn.{name}": getattr(torch.backends.cudnn, name) for name in CUDNN_FLAGS},
        "default_dtype": torch.get_default_dtype(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "grad": torch.is_grad_enabled(),
    }


@contextmanager
def restored_settings() -> Iterator[dict[str, Any]]:
    """Yield the settings, and restore those that a program can leave behind."""
    before = torch_settings()
    try:
        yield before
    finally:
        torch.set_float32_matmul_precision(before["float32_matmul_precision"])
        for name in CUDNN_FLAGS:
            setattr(torch.backends.cudnn, name, before[f"cudnn.{name}"])
        torch.set_default_dtype(before["default_dtype"])
        torch.use_deterministic_algorithms(before["deterministic_algorithms"])
