"""One decision about numbers, read by the loader and the loop.

Trainable parameters are fp32. Frozen ones sit in the compute type. A gradient scaler exists only when that type is
fp16. `pure-fp16` is the exception one has to ask for: everything is fp16, and the optimizer makes up for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from myna.errors import ConfigError

Name = Literal["fp32", "bf16", "fp16", "pure-fp16"]
Asked = Literal["auto"] | Name
BF16_CAPABILITY = (8, 0)
"""The first compute capability with bf16 units; torch may say yes to older cards, by emulation."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "pure-fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    name: Name
    reason: str

    @property
    def frozen(self) -> torch.dtype:
        """What is not trained, and what is computed in."""
        return DTYPES[self.name]

    @property
    def trainable(self) -> torch.dtype:
        return torch.float16 if self.name == "pure-fp16" else torch.float32

    @property
    def scaler(self) -> bool:
        """Accelerate's gradient scaler, which refuses gradients that are fp16 themselves."""
        return self.name == "fp16"

    @property
    def may_overflow(self) -> bool:
        """The loss is scaled, by the scaler or by the optimizer, and a step that overflows is skipped."""
        return self.frozen == torch.float16

    @property
    def mixed_precision(self) -> Literal["no", "bf16", "fp16"]:
        """Accelerate's word for it. Where all numbers are of one type there is nothing to mix."""
        match self.name:
            case "bf16" | "fp16":
                return self.name
            case _:
                return "no"

    def __str__(self) -> str:
        if self.name == "pure-fp16":
            return (
                f"{self.name}: {self.reason}; WARNING: trainable weights fp16 too, small updates survive only through "
                "the optimizer's compensation, which also scales the loss; prefer fp16 if it fits"
            )
        scaler = "with" if self.scaler else "without"
        return f"{self.name}: {self.reason}; trainable weights fp32, {scaler} gradient scaler"


def pick_device(asked: str) -> torch.device:
    """`auto` is the best there is; anything else must be there."""
    if asked == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if not there.get(asked.partition(":")[0], False):
        raise ConfigError(
            f"the device `{asked}` is not to be had here",
            hint="use `auto`, or one of: " + ", ".join(name for name, is_there in there.items() if is_there),
        )
    return torch.device(asked)


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 matrices, and rightly: small whole numbers come out exact."""
    numbers = torch.arange(64, dtype=torch.float32).view(8, 8) % 7
    try:
        product = numbers.to(device, torch.bfloat16) @ numbers.to(device, torch.bfloat16)
        return torch.equal(product.float().cpu(), numbers @ numbers)
    except (RuntimeError, TypeError):  # what torch raises for a type that a device does not have
        return False


def has_bf16_instructions() -> bool:
    """Whether this CPU computes in bf16 (AMX or AVX512-bf16) rather than converting back and forth."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def decide(
    asked: Asked,
    device: torch.device,
    capability: tuple[int, int] | None = None,
    probe: Callable[[torch.device], bool] = multiplies_bf16,
) -> Precision:
    """`capability` is looked up when not given; `probe` is asked about bf16 where the device does not tell."""
    if device.type == "cuda":
        return _on_cuda(asked, capability or torch.cuda.get_device_capability(device))
    where = "Apple MPS" if device.type == "mps" else "the CPU"
    if asked in ("fp16", "pure-fp16"):
        raise ConfigError(
            f"`train.precision: {asked}` needs a CUDA card, this is {where}", hint="--set train.precision=fp32"
        )
    if asked == "fp32":
        return Precision("fp32", f"asked for, on {where}")
    if device.type == "mps":
        if probe(device):
            return Precision("bf16", f"{where} multiplies bf16")
        if asked == "bf16":
            raise ConfigError(
                f"`train.precision: bf16`: {where} does not multiply bf16 here", hint="--set train.precision=fp32"
            )
        return Precision("fp32", f"{where} does not multiply bf16 here")
    if asked == "bf16":
        how = "has bf16 instructions" if has_bf16_instructions() else "has no bf16 instructions and will be slow"
        return Precision("bf16", f"asked for, on {where}, which {how}")
    return Precision("fp32", f"{where} is surest in fp32")


def _on_cuda(asked: Asked, capability: tuple[int, int]) -> Precision:
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
