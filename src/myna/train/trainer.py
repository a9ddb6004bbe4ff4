"""Who learns: the model in its precision, adapted, with its optimizer, on its device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from myna.config import Recipe
from myna.errors import TrainingError
from myna.models.base import Batch, Family
from myna.models.lora import frozen_names
from myna.models.quantized import quantize
from myna.train.distributed import gather, shard, shards, synchronize, whole
from myna.train.ema import Ema
from myna.train.lora import adapt, count_parameters
from myna.train.loss import LossAccumulator, weighted_loss
from myna.train.memory_plan import layers_asked_for
from myna.train.optimizer import KahanAdamW, make_optimizer
from myna.train.precision import Precision

PATIENCE_WITH_OVERFLOW = 20
"""Steps in a row that may overflow in fp16 before it is clear that no scale will do."""


@dataclass(slots=True)
class Trainer:
    recipe: Recipe
    family: Family
    precision: Precision
    accelerator: Accelerator
    objective: Any
    """The family's objective as Accelerate wraps it."""
    optimizer: Any
    trainables: dict[str, nn.Parameter]
    """By their names in the unwrapped model."""
    ema: Ema | None
    overflows: int = 0

    @classmethod
    def make(
        cls,
        recipe: Recipe,
        family: Family,
        precision: Precision,
        accelerator: Accelerator,
        say: Callable[[str], None],
        recompute: int | None = None,
    ) -> Trainer:
        """`recompute` is what the memory plan says; without one, `gradient_checkpointing: auto` recomputes no layer."""
        settings = recipe.train
        # Every rank starts from the same adapter, whatever its random state was.
        torch.manual_seed(settings.seed)
        sharded = shards(recipe, accelerator)
        # A whole model may not fit the device that is to hold a part of it, or all of it in fewer bits: sharding and
        # freezing move it there bit by bit.
        in_parts = sharded or recipe.model.quantization != "none"
        at_first = torch.device("cpu") if in_parts else accelerator.device
        model = family.load_model(dtype=precision.frozen, device=at_first, text_head=recipe.needs_text_head)
        model = quantize(
            model, recipe.model.quantization, frozen_names(model, family, recipe.adapt), accelerator.device
        )
        model = adapt(model, family, recipe.adapt, dtype=precision.trainable)
        objective: Any = family.objective(
            model, label_smoothing=recipe.loss.label_smoothing, fast=settings.fused_lora, compiled=settings.compile
        )
        asked = layers_asked_for(recipe, len(family.layers(objective)))
        objective.recompute = recompute if recompute is not None else asked or 0
        if sharded:
            shard(objective, family.layers(objective), precision, accelerator)
        trainables = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        total, learns, _ = count_parameters(model)
        say(f"{learns:,} of {total:,} parameters learn ({100 * learns / total:.2f} %)")
        optimizer = accelerator.prepare(make_optimizer(list(trainables.values()), settings, precision))
        ema = Ema(trainables, settings.ema_decay) if settings.ema_decay is not None else None
        if not sharded:
            # Each rank has made the same buffers by itself, packed weights among them: DDP need not send them around.
            buffers = [name for name, _ in objective.named_buffers()]
            ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
            ignore(objective, buffers)
            objective = accelerator.prepare(objective)
        return cls(recipe, family, precision, accelerator, objective, optimizer, trainables, ema)

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.accelerator.unwrap_model(self.objective).model
        return model

    @property
    def sharded(self) -> bool:
        """Whether this rank holds only a part of each weight."""
        return shards(self.recipe, self.accelerator)

    def whole_model(self) -> nn.Module | None:
        """The model with all its weights, for rank 0. Every rank must ask."""
        if not self.sharded:
            return self.model if self.accelerator.is_main_process else None
        weights = gather(self.model.state_dict(), keep=self.accelerator.is_main_process)
        if not weights:
            return None
        model = self.family.load_model(
            dtype=self.precision.trainable, device="meta", text_head=self.recipe.needs_text_head
        )
        model.load_state_dict(weights, assign=True)
        return model

    def speaking_model(self) -> nn.Module | None:
        """The same to speak with, on the device of rank 0. Every rank must ask."""
        if not self.sharded:
            return self.whole_model()
        weights = gather(self.model.state_dict(), keep=self.accelerator.is_main_process)
        if not weights:
            return None
        # Opened anew: the tables that no checkpoint holds have to be there as well.
        model = self.family.load_model(
            dtype=self.precision.frozen, device=self.accelerator.device, text_head=self.recipe.needs_text_head
        )
        model.load_state_dict(weights)
        return model

    @property
    def kahan(self) -> KahanAdamW | None:
        """The optimizer of pure fp16, which scales the loss and clips by itself."""
        inner = self.optimizer.optimizer
        return inner if isinstance(inner, KahanAdamW) else None

    def learn(self, passes: Sequence[Batch], weights: torch.Tensor, rate: float) -> tuple[LossAccumulator, float]:
        """One optimizer step: everybody's losses, and the gradient norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # Count first, over all passes and ranks, so that every target weighs the same.
        tally = LossAccumulator.of(len(self.family.streams))
        tally.counts = self.reduce(torch.stack([batch.counts for batch in passes]).sum(0))
        self.backward(passes, weights, tally)
        clipped = self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(self.trainables)
        # Looked at only now that the device has everything to do, since looking waits for it.
        norm = float(clipped)
        self._check_finite(norm)
        return tally.over_ranks(self.reduce), norm

    def backward(self, passes: Sequence[Batch], weights: torch.Tensor, tally: LossAccumulator) -> None:
        """Gradients of the whole step's loss. Ranks exchange theirs once, in the last pass; sharded ones in every pass,
        or each rank would have to hold a whole model's in between."""
        inner = getattr(self.objective, "module", self.objective)
        if not (self.objective.training and inner.training and inner.model.training):
            # Asked first: telling each of a thousand modules takes milliseconds, in which a card has nothing to do.
            self.objective.train()
        for number, batch in enumerate(passes, start=1):
            last = number == len(passes)
            with self.accelerator.autocast(), nullcontext() if last else self.accelerator.no_sync(self.objective):
                result = self.objective(batch.to(self.accelerator.device))
                # DDP and FSDP average over ranks what is a sum over them.
                loss = weighted_loss(result.sums, tally.counts, weights) * self.accelerator.num_processes
                self.accelerator.backward(self.kahan.scale_loss(loss) if self.kahan is not None else loss)
            tally.add(result)

    def clip(self) -> torch.Tensor | float:
        """Hold the gradient to its largest norm; returns what it was."""
        if self.kahan is not None:
            return self.kahan.clip(self.recipe.train.max_grad_norm)
        return whole(self.accelerator.clip_grad_norm_(list(self.trainables.values()), self.recipe.train.max_grad_norm))

    @torch.no_grad()
    def judge(self, batches: Iterable[Batch], weights: torch.Tensor) -> dict[str, Any]:
        """Losses on batches that are not learned from, this rank's share of them summed with the others'."""
        self.objective.eval()
        tally = LossAccumulator.of(len(self.family.streams))
        with self.averaged(), self.accelerator.autocast():
            # The bare objective: DDP would have every rank bring equally many batches.
            objective = self.accelerator.unwrap_model(self.objective)
            shared = synchronize(batches, self.accelerator) if self.sharded else ((batch, True) for batch in batches)
            for batch, counts in shared:
                result = objective(batch.to(self.accelerator.device))
                if counts:
                    tally.add(result)
                    tally.counts += batch.counts
            if self.sharded:
                # After a pass without a backward, the outermost weights stay together and would not see the next step.
                objective.reshard()
        tally.counts = self.reduce(tally.counts)
        return tally.over_ranks(self.reduce).row(self.family.streams, weights)

    def averaged(self) -> Any:
        """The averaged weights in place of the last ones, where there are such."""
        return self.ema.in_place(self.trainables) if self.ema is not None else nullcontext()

    def reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """A sum over ranks of something on the CPU."""
        if self.accelerator.num_processes == 1:
            return tensor
        # MPS has no doubles, but neither has it ranks.
        return self.accelerator.reduce(tensor.to(self.accelerator.device)).cpu()  # type: ignore[no-any-return]

    def _check_finite(self, norm: float) -> None:
        if math.isfinite(norm):
            self.overflows = 0
            return
        self.overflows += 1
        if not self.precision.may_overflow or self.overflows > PATIENCE_WITH_OVERFLOW:
            raise TrainingError(
                "the gradient is not finite",
                hint="lower train.learning_rate or train.max_grad_norm, or find the cause with train.precision=fp32",
            )
