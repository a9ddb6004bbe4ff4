"""One decision about numbers, read by the loader and the loop.

Trainable parameters are fp32. Frozen ones sit in the compute type. A gradient scaler exists only when that type is
fp16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from myna.errors import ConfigError

Asked = Literal["auto", "fp32", "bf16", "fp16"]
BF16_CAPABILITY = (8, 0)
"""The first compute capability with bf16 units; torch may say yes to older cards, by emulation."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    name: Literal["fp32", "bf16", "fp16"]
    reason: str

    @property
    def frozen(self) -> torch.dtype:
        """What is not trained, and what is computed in."""
        return DTYPES[self.name]

    @property
    def trainable(self) -> torch.dtype:
        return torch.float32

    @property
    def scaler(self) -> bool:
        return self.name == "fp16"

    @property
    def mixed_precision(self) -> Literal["no", "bf16", "fp16"]:
        """Accelerate's word for it."""
        return "no" if self.name == "fp32" else self.name

    def __str__(self) -> str:
        scaler = "with" if self.scaler else "without"
        return f"{self.name}: {self.reason}; trainable weights fp32, {scaler} gradient scaler"


def pick_device(asked: str) -> torch.device:
    """`auto` is the best there is; anything else must be there."""
    if asked == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    device = torch.device(asked)
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if not there.get(device.type, False):
        raise ConfigError(f"`train.device: {asked}` is not to be had here", hint="--set train.device=auto")
    return device


def decide(asked: Asked, device: torch.device, capability: tuple[int, int] | None = None) -> Precision:
    """`capability` is looked up when not given."""
    if device.type == "cuda" and capability is None:
        capability = torch.cuda.get_device_capability(device)
    if device.type == "cuda" and capability is not None:
        card = f"CUDA capability {capability[0]}.{capability[1]}"
        has_bf16 = capability >= BF16_CAPABILITY
        if asked == "auto":
            return Precision("bf16", f"{card} has bf16") if has_bf16 else Precision("fp16", f"{card} has no bf16")
        if asked == "bf16" and not has_bf16:
            raise ConfigError(
                f"`train.precision: bf16` on {card}: the card would emulate it slowly, bf16 begins at 8.0",
                hint="--set train.precision=fp16",
            )
        return Precision(asked, f"asked for, on {card}")
    where = "Apple MPS" if device.type == "mps" else "the CPU"
    if asked == "fp16":
        raise ConfigError(
            f"`train.precision: fp16` needs a CUDA card, this is {where}", hint="--set train.precision=fp32"
        )
    if asked == "auto":
        return Precision("fp32", f"{where} is surest in fp32")
    return Precision(asked, f"asked for, on {where}")
