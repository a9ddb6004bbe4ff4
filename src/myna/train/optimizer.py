"""AdamW, and what it takes to train weights that are themselves fp16."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from myna.config import TrainSettings
from myna.train.precision import Precision

FIRST_SCALE, LARGEST_SCALE = 2.0**16, 2.0**24
"""Of the loss in pure fp16. The first is the one torch's scaler starts with."""
GROW_AFTER = 2000
"""Steps without an overflow before a larger scale is tried, as with torch's scaler."""
UNIT = 2.0**-11
"""Of the compensation: half the distance between fp16 numbers near 1. A weight's rounding error is at most this share
of it, so that in this unit the error is as large as the weight, and as well represented."""


def make_optimizer(
    parameters: Sequence[nn.Parameter], settings: TrainSettings, precision: Precision
) -> torch.optim.Optimizer:
    """AdamW in one kernel where the device has it, which gives the same bits every time, as do the others."""
    how: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "weight_decay": settings.weight_decay,
    }
    if precision.trainable == torch.float16:
        return KahanAdamW(parameters, **how)
    fused = all(parameter.is_cuda for parameter in parameters)
    return torch.optim.AdamW(parameters, fused=fused, foreach=not fused, **how)


class KahanAdamW(torch.optim.Optimizer):
    """AdamW for fp16 weights with fp16 gradients: fp32 moments, and what rounding takes from a weight is kept for it.

    Between fp16 numbers near 0.1 lie 6e-5, so that most updates would round to nothing; the compensation collects them
    until they count (Kahan summation). Gradients stay multiplied by the loss scale, below which many would vanish,
    until `step` has them in fp32: so the loss goes through `scale_loss`, and clipping through `clip`.
    A step whose gradients overflow is skipped, and the scale halved. The scale is kept in `param_groups[0]`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})
        self.param_groups[0] |= {"loss_scale": FIRST_SCALE, "clean_steps": 0}
        self._norm: float | None = None
        self._limit = math.inf

    @property
    def loss_scale(self) -> float:
        return float(self.param_groups[0]["loss_scale"])

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """What to go backward from; the loss itself must be fp32."""
        return loss * self.loss_scale

    @torch.no_grad()
    def clip(self, limit: float) -> float:
        """The norm of the unscaled gradients, which the coming step holds to `limit`. The gradients stay as they are:
        unscaled or shrunk, small ones would vanish."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        whole = torch.linalg.vector_norm(torch.stack(norms)).item() if norms else 0.0
        self._norm, self._limit = whole / self.loss_scale, limit
        return self._norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is scaled outside"
        norm = self._norm if self._norm is not None else self.clip(math.inf)
        self._norm = None
        scaling = self.param_groups[0]
        if not math.isfinite(norm):
            scaling |= {"loss_scale": self.loss_scale / 2, "clean_steps": 0}
            return
        factor = min(1.0, self._limit / (norm + 1e-6)) / self.loss_scale
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, parameter.grad.float() * factor)
        scaling["clean_steps"] += 1
        if scaling["clean_steps"] == GROW_AFTER:
            scaling |= {"loss_scale": min(2 * self.loss_scale, LARGEST_SCALE), "clean_steps": 0}

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], gradient: torch.Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(gradient)
            state["exp_avg_sq"] = torch.zeros_like(gradient)
            state["compensation"] = torch.zeros_like(parameter)
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        spread = square.div(1 - beta2**step).sqrt_().add_(group["eps"])

        exact = parameter.float() + state["compensation"].float() * UNIT
        exact.mul_(1 - group["lr"] * group["weight_decay"])
        exact.addcdiv_(mean, spread, value=-group["lr"] / (1 - beta1**step))
        parameter.copy_(exact)
        state["compensation"].copy_((exact - parameter.float()) / UNIT)
