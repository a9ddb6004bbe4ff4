"""Preflight checks of the backward pass: trainable parameters, gradients and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor

from myna.core.errors import TrainingError
from myna.core.system_memory import is_out_of_memory
from myna.models.base import Batch
from myna.models.files import format_names
from myna.train.loss import stream_weights, weighted_loss
from myna.train.memory_plan import out_of_memory_error, peak_memory
from myna.train.optimizer import INITIAL_LOSS_SCALE, make_optimizer
from myna.train.preflight.context import CheckContext, on_all_ranks
from myna.train.trainer import Trainer

T = TypeVar("T")


def check_trainable_parameters(context: CheckContext) -> None:
    """There are trainable parameters, a LoRA among them if the recipe has one, and the optimizer holds all of them."""
    trainer, mode = context.trainer, context.recipe.adapt.mode
    trainable = [name for name, parameter in trainer.trainable_parameters.items() if parameter.requires_grad]
    if not trainable:
        raise TrainingError("no weight would learn: everything is frozen", hint="--set adapt.mode=comprehensive")
    if mode != "full" and not any("lora_" in name for name in trainable):
        raise TrainingError(
            f"adapt.mode {mode} has put a LoRA on nothing; what would learn: {format_names(trainable)}",
            hint=f"myna model stats {context.recipe.model.source} --lora {mode} lists what a mode meets",
        )
    held = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    missing = [name for name in trainable if id(trainer.trainable_parameters[name]) not in held]
    if missing:
        raise TrainingError(
            f"the optimizer does not hold {len(missing)} of {len(trainable)} trainable weights: "
            f"{format_names(missing)}",
            hint="it was made before the model was adapted: make the trainer anew",
        )


def check_largest_batch_fits(context: CheckContext) -> int:
    """The largest micro-batch through two optimizer steps, as in training; returns the peak memory."""
    trainer, device = context.trainer, context.trainer.accelerator.device
    batch = trainer.family.collate(context.memory.sequences)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with _preserve_weights(trainer):
        try:
            run_two_steps(trainer, batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory_error(context.memory, trainer.family, context.recipe, device) from error
    return peak_memory(device)


def run_two_steps(trainer: Trainer, batch: Batch) -> None:
    """Two optimizer steps on the unwrapped objective, so that a rank that fails fails alone, with another optimizer."""
    settings, accelerator = trainer.recipe.train, trainer.accelerator
    objective = accelerator.unwrap_model(trainer.objective).train()
    parameters = list(trainer.trainable_parameters.values())
    optimizer = make_optimizer(parameters, settings, trainer.precision)
    weights = stream_weights(trainer.family.loss_terms, trainer.recipe.loss)
    accumulates = settings.batch_size > settings.micro_batch_size * accelerator.num_processes
    scale = INITIAL_LOSS_SCALE if trainer.precision.may_overflow else 1.0

    def overflows() -> bool:
        return not all(parameter.grad is None or _is_finite(parameter.grad) for parameter in parameters)

    for _ in range(2):
        while True:
            with accelerator.autocast():
                sums = objective(batch.to(accelerator.device)).sums
                loss = weighted_loss(sums, batch.counts, weights)
            torch.autograd.backward(loss * scale)
            if scale == 1.0 or not any(_on_sharded_ranks(trainer, overflows)):
                break
            # As the gradient scaler would: a step that overflows is tried again at half the scale.
            scale /= 2
            optimizer.zero_grad(set_to_none=True)
        _on_sharded_ranks(trainer, partial(check_gradients, trainer))
        optimizer.step()
        if not accumulates:
            # Else gradients stay, as they do when a step has several micro-batches.
            optimizer.zero_grad(set_to_none=True)


def check_gradients(trainer: Trainer) -> None:
    """Every trainable parameter has a finite gradient, and not all are zero. Those of a new LoRA's A are."""
    gradients = {name: parameter.grad for name, parameter in trainer.trainable_parameters.items()}
    missing = [name for name, gradient in gradients.items() if gradient is None]
    if missing:
        raise TrainingError(
            f"{len(missing)} of {len(gradients)} trainable weights get no gradient: {format_names(missing)}",
            hint="the loss does not reach them: take them out of adapt.train_modules, or add them to adapt.freeze",
        )
    infinite = [name for name, gradient in gradients.items() if gradient is not None and not _is_finite(gradient)]
    if infinite:
        raise TrainingError(
            f"{len(infinite)} of {len(gradients)} gradients are not finite: {format_names(infinite)}",
            hint="--set train.precision=bf16"
            if trainer.precision.may_overflow
            else "lower train.learning_rate, or find the cause with --set train.precision=fp32",
        )
    if not any(bool(_local(gradient).any()) for gradient in gradients.values() if gradient is not None):
        raise TrainingError(
            f"all {len(gradients)} gradients are zero: nothing would be learned",
            hint="look at the weights of the loss: loss.codebook_weights, loss.text_weight, loss.audio_weight",
        )


@contextmanager
def _preserve_weights(trainer: Trainer) -> Iterator[None]:
    """Restore the trained weights from host memory, where the optimizer state of a resumed run waits too: the steps
    inside have a state of their own, and a training never has both."""
    weights = [_local(parameter.detach()) for parameter in trainer.trainable_parameters.values()]
    saved = [weight.to("cpu", copy=True) for weight in weights]
    offloaded = [
        (state, key, value.device)
        for state in trainer.optimizer.state.values()
        for key, value in state.items()
        if torch.is_tensor(value) and not isinstance(value, DTensor)
    ]
    for state, key, _ in offloaded:
        state[key] = state[key].cpu()
    try:
        yield
    finally:
        for parameter in trainer.trainable_parameters.values():
            parameter.grad = None
        for weight, before in zip(weights, saved, strict=True):
            weight.copy_(before)
        for state, key, device in offloaded:
            state[key] = state[key].to(device)


def _on_sharded_ranks(trainer: Trainer, check: Callable[[], T]) -> list[T]:
    """Inside a check, where sharded ranks must stay together, and others must not wait for one another."""
    return on_all_ranks(trainer, check) if trainer.sharded else [check()]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(_local(tensor)).all())
