from __future__ import annotations

import pytest
import torch

from myna.errors import ConfigError
from myna.train.precision import decide, pick_device

CUDA, CPU, MPS = torch.device("cuda"), torch.device("cpu"), torch.device("mps")


@pytest.mark.parametrize(
    ("device", "capability", "name", "scaler"),
    [
        (CUDA, (7, 5), "fp16", True),
        (CUDA, (8, 0), "bf16", False),
        (CUDA, (9, 0), "bf16", False),
        (CPU, None, "fp32", False),
        (MPS, None, "fp32", False),
    ],
)
def test_auto_follows_the_card(
    device: torch.device, capability: tuple[int, int] | None, name: str, scaler: bool
) -> None:
    precision = decide("auto", device, capability)
    assert (precision.name, precision.scaler) == (name, scaler)
    assert name in str(precision)


def test_bf16_on_turing_is_refused_with_what_to_use() -> None:
    with pytest.raises(ConfigError, match=r"train\.precision=fp16"):
        decide("bf16", CUDA, (7, 5))


def test_fp16_off_cuda_is_refused() -> None:
    for device in (CPU, MPS):
        with pytest.raises(ConfigError, match=r"train\.precision=fp32"):
            decide("fp16", device)


def test_a_device_that_is_not_there_is_refused() -> None:
    assert pick_device("cpu") == CPU
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="not to be had"):
            pick_device("cuda")
