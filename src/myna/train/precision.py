"""Numeric precision of a training, decided in one place.

Trainable parameters are fp32. Frozen ones sit in the compute type. A gradient scaler exists only when that type is
fp16. `pure-fp16` is an opt-in exception: everything is fp16, and the optimizer compensates the rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from myna.core.compat import cpu_has_bf16
from myna.core.errors import ConfigError

PrecisionName = Literal["fp32", "bf16", "fp16", "pure-fp16"]
PrecisionSetting = Literal["auto"] | PrecisionName
BF16_CAPABILITY = (8, 0)
"""First CUDA compute capability with bf16 units; torch emulates bf16 on older GPUs."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "pure-fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    name: PrecisionName
    reason: str

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of the frozen parameters and of the computation."""
        return DTYPES[self.name]

    @property
    def trainable_dtype(self) -> torch.dtype:
        return torch.float16 if self.name == "pure-fp16" else torch.float32

    @property
    def may_overflow(self) -> bool:
        """Whether the loss is scaled, by the scaler or the optimizer, and a step that overflows is skipped."""
        return self.compute_dtype == torch.float16

    @property
    def mixed_precision(self) -> Literal["no", "bf16", "fp16"]:
        """Accelerate's setting; `no` if all parameters have one type. With fp16 it has a gradient scaler, which rejects
        fp16 gradients."""
        return self.name if self.name in ("bf16", "fp16") else "no"

    def __str__(self) -> str:
        if self.name == "pure-fp16":
            return (
                f"{self.name}: {self.reason}; WARNING: trainable weights fp16 too, small updates survive only through "
                "the optimizer's compensation, which also scales the loss; prefer fp16 if it fits"
            )
        scaler = "with" if self.mixed_precision == "fp16" else "without"
        return f"{self.name}: {self.reason}; trainable weights fp32, {scaler} gradient scaler"


def supports_bf16_matmul(device: torch.device) -> bool:
    """Whether the device multiplies bf16 matrices correctly: small whole numbers come out exact."""
    numbers = torch.arange(64, dtype=torch.float32).view(8, 8) % 7
    try:
        product = numbers.to(device, torch.bfloat16) @ numbers.to(device, torch.bfloat16)
        return torch.equal(product.float().cpu(), numbers @ numbers)
    except (RuntimeError, TypeError):  # raised by torch for a type the device lacks
        return False


def choose_precision(
    setting: PrecisionSetting,
    device: torch.device,
    capability: tuple[int, int] | None = None,
    probe: Callable[[torch.device], bool] = supports_bf16_matmul,
) -> Precision:
    """Choose the precision for a device. `capability` is looked up by default; `probe` tests bf16 if torch cannot
    tell."""
    if device.type == "cuda":
        return _on_cuda(setting, capability or torch.cuda.get_device_capability(device))
    where = "Apple MPS" if device.type == "mps" else "the CPU"
    hint = "--set train.precision=fp32"
    if setting in ("fp16", "pure-fp16"):
        raise ConfigError(f"`train.precision: {setting}` needs a CUDA card, this is {where}", hint=hint)
    if setting == "fp32":
        return Precision("fp32", f"asked for, on {where}")
    if device.type == "mps":
        if probe(device):
            return Precision("bf16", f"{where} multiplies bf16")
        if setting == "bf16":
            raise ConfigError(f"`train.precision: bf16`: {where} does not multiply bf16 here", hint=hint)
        return Precision("fp32", f"{where} does not multiply bf16 here")
    if setting == "bf16":
        how = "has bf16 instructions" if cpu_has_bf16() else "has no bf16 instructions and will be slow"
        return Precision("bf16", f"asked for, on {where}, which {how}")
    return Precision("fp32", f"fp32 is the safest choice on {where}")


def _on_cuda(setting: PrecisionSetting, capability: tuple[int, int]) -> Precision:
    card = f"CUDA capability {capability[0]}.{capability[1]}"
    has_bf16 = capability >= BF16_CAPABILITY
    if setting == "auto":
        return Precision("bf16", f"{card} has bf16") if has_bf16 else Precision("fp16", f"{card} has no bf16")
    if setting == "bf16" and not has_bf16:
        raise ConfigError(
            f"`train.precision: bf16` on {card}: the card would emulate it slowly, bf16 begins at 8.0",
            hint="--set train.precision=fp16",
        )
    return Precision(setting, f"asked for, on {card}")
