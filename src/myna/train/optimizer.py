"""Optimizer, learning rate schedule and running mean of the weights."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from myna.core.compat import foreach_lerp
from myna.core.config import TrainSettings
from myna.train.precision import Precision

INITIAL_LOSS_SCALE, MAX_LOSS_SCALE = 2.0**16, 2.0**24
"""Initial and maximum loss scale in pure fp16; the initial one is that of torch's scaler."""
LOSS_SCALE_GROWTH_STEPS = 2000
"""Number of steps without an overflow before the loss scale is doubled, as in torch's scaler."""
COMPENSATION_UNIT = 2.0**-11
"""Unit of the compensation: half the distance between fp16 numbers near 1. A weight's rounding error is at most this
share of it, so in this unit the error is as large as the weight, and as precise."""


def warmup_steps(settings: TrainSettings, steps: int) -> int:
    """Return the steps of the warm-up. One that is longer than the run is shortened to half of it: otherwise the rate
    would never reach its peak."""
    warmup = round(settings.warmup * steps) if settings.warmup < 1 else int(settings.warmup)
    return warmup if warmup <= steps else steps // 2


def learning_rate(settings: TrainSettings, step: int, steps: int) -> float:
    """Return the learning rate of a step from 1 to `steps`: linear warm-up to the full rate, then the schedule towards
    its end.

    The end is one step after the last, which would otherwise have a rate of 0.
    """
    warmup = warmup_steps(settings, steps)
    if step <= warmup:
        return settings.learning_rate * step / warmup
    progress = (step - 1 - warmup) / max(1, steps - warmup)
    if settings.schedule == "constant":
        return settings.learning_rate
    factor = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    floor = settings.final_learning_rate_ratio
    return settings.learning_rate * (floor + (1.0 - floor) * factor)


def make_optimizer(parameters: Sequence[nn.Parameter], settings: TrainSettings, precision: Precision) -> Optimizer:
    """Make the optimizer of a training: fused AdamW on CUDA, which is bit-exact from run to run like the others."""
    optimizer: Callable[..., Optimizer] = KahanAdamW
    if precision.trainable_dtype != torch.float16:
        fused = all(parameter.is_cuda for parameter in parameters)
        optimizer = partial(AdamW, fused=fused, foreach=not fused)
    return optimizer(parameters, settings.learning_rate, settings.betas, weight_decay=settings.weight_decay)


class KahanAdamW(Optimizer):
    """AdamW for fp16 weights with fp16 gradients: fp32 moments, and a compensation for each weight's rounding error.

    fp16 numbers near 0.1 are 6e-5 apart, so that most updates would round to nothing; the compensation collects them
    until they count (Kahan summation). Gradients stay multiplied by the loss scale, or many would underflow, until
    `step` has them in fp32: so the loss goes through `scale_loss`, and clipping through `clip`.
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
        self.param_groups[0] |= {"loss_scale": INITIAL_LOSS_SCALE, "clean_steps": 0}
        self._norm: float | None = None
        self._max_norm = math.inf

    @property
    def loss_scale(self) -> float:
        return float(self.param_groups[0]["loss_scale"])

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale the loss before backward; it must be fp32."""
        return loss * self.loss_scale

    @torch.no_grad()
    def clip(self, max_norm: float) -> float:
        """Return the norm of the unscaled gradients, which the next `step` clips: here small ones would underflow."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        total = torch.linalg.vector_norm(torch.stack(norms)).item() if norms else 0.0
        self._norm, self._max_norm = total / self.loss_scale, max_norm
        return self._norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is scaled outside"
        norm = self._norm if self._norm is not None else self.clip(math.inf)
        self._norm = None
        state = self.param_groups[0]
        if not math.isfinite(norm):
            state |= {"loss_scale": self.loss_scale / 2, "clean_steps": 0}
            return
        factor = min(1.0, self._max_norm / (norm + 1e-6)) / self.loss_scale
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, parameter.grad.float() * factor)
        state["clean_steps"] += 1
        if state["clean_steps"] == LOSS_SCALE_GROWTH_STEPS:
            state |= {"loss_scale": min(2 * self.loss_scale, MAX_LOSS_SCALE), "clean_steps": 0}

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
        denominator = square.div(1 - beta2**step).sqrt_().add_(group["eps"])

        exact = parameter.float() + state["compensation"].float() * COMPENSATION_UNIT
        exact.mul_(1 - group["lr"] * group["weight_decay"])
        exact.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**step))
        parameter.copy_(exact)
        state["compensation"].copy_((exact - parameter.float()) / COMPENSATION_UNIT)


class WeightEMA:
    """Running averages of parameters in fp32, by name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self.steps = 0
        self.averages = {name: parameter.detach().clone().float() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Update the averages. Early on the decay is smaller, or the average would never forget the initial weights."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        # All at once: on a GPU, launching a kernel for each parameter would take longer than the kernels.
        weights = [parameter.detach().float() for parameter in parameters.values()]
        foreach_lerp([self.averages[name] for name in parameters], weights, 1 - decay)

    @contextmanager
    @torch.no_grad()
    def swapped_in(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Replace the weights by the averages inside the block."""
        weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.copy_(self.averages[name])
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
