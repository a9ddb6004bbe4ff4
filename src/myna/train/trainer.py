"""Trainer: the model in its precision, adapted, with its optimizer, on its device."""

import gc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.distributed import broadcast_object_list, new_group

from myna.core.compat import ddp_ignore_buffers
from myna.core.config import Recipe
from myna.core.errors import MynaError, TrainingError
from myna.models.base import Batch, Family
from myna.models.files import USAGE_FINGERPRINTS, find_adapter
from myna.models.lora import base_model_hash, count_parameters, frozen_linear_names, initialize_adapter, make_trainable
from myna.models.quantized import quantize
from myna.models.ref import ModelRef
from myna.train.distributed import MAIN_RANK_TIMEOUT, full_tensor, gather_full_tensors, shard_model, synchronize
from myna.train.loss import DivergenceMonitor, LossAccumulator, weighted_loss
from myna.train.optimizer import KahanAdamW, WeightEMA, make_optimizer
from myna.train.precision import DTYPES, Precision

T = TypeVar("T")

MAX_CONSECUTIVE_OVERFLOWS = 20
"""Steps in a row that may overflow in fp16 before the training is stopped, since no loss scale will help."""


def build_model(
    recipe: Recipe,
    family: Family,
    precision: Precision,
    device: torch.device | str,
    load_device: torch.device | str | None = None,
) -> nn.Module:
    """Load the family's model, quantized and adapted as the recipe says. With a `load_device`, it is loaded there, and
    only its quantized layers move to `device`."""
    load_device = device if load_device is None else load_device
    model = family.load_model(dtype=precision.compute_dtype, device=load_device, text_head=recipe.needs_text_head)
    model = quantize(model, recipe.model.quantization, frozen_linear_names(model, family, recipe.adapt), device)
    return make_trainable(model, family, recipe.adapt, dtype=precision.trainable_dtype)


def configured_recomputation(recipe: Recipe, layers: int) -> int | None:
    """Number of layers recomputed by `train.gradient_checkpointing`; None if the memory plan chooses it."""
    setting = recipe.train.gradient_checkpointing
    named = {"auto": None, "none": 0, "full": layers}
    return named[setting] if isinstance(setting, str) else math.ceil(layers / setting)


@dataclass(slots=True)
class Trainer:
    """Model, optimizer and EMA of a training, and its optimizer step."""

    recipe: Recipe
    family: Family
    precision: Precision
    accelerator: Accelerator
    objective: Any
    """The family's objective as Accelerate wraps it."""
    optimizer: Any
    trainable_parameters: dict[str, nn.Parameter]
    """Trainable parameters by their names in the unwrapped model."""
    ema: WeightEMA | None
    sharded: bool
    """Whether weights are sharded: in full training on several processes. A LoRA is too small for it."""
    waiting_group: Any = None
    """Process group in which ranks wait for rank 0. It uses gloo, with a time limit of a day; its connections break
    when rank 0 ends. NCCL would stop all ranks after `RANK_TIMEOUT`."""
    overflows: int = 0
    divergence: DivergenceMonitor = field(default_factory=DivergenceMonitor)

    @classmethod
    def from_recipe(
        cls,
        recipe: Recipe,
        family: Family,
        precision: Precision,
        accelerator: Accelerator,
        log: Callable[[str], None],
        recompute: int | None = None,
    ) -> Self:
        """Make the trainer. `recompute` is from the memory plan; by default `auto` recomputes no layer."""
        settings = recipe.train
        # Every rank starts from the same adapter, whatever its random state was.
        torch.manual_seed(settings.seed)
        sharded = recipe.adapt.mode == "full" and accelerator.num_processes > 1
        # A whole model may not fit the device that is to hold a shard of it, or all of it in fewer bits: sharding and
        # quantizing move it there layer by layer.
        load_device = torch.device("cpu") if sharded or recipe.model.quantization != "none" else None
        model = build_model(recipe, family, precision, accelerator.device, load_device)
        objective: Any = family.objective(
            model,
            label_smoothing=recipe.loss.label_smoothing,
            fused_lora=settings.fused_lora,
            compiled=settings.compile,
        )
        if recompute is None:
            recompute = configured_recomputation(recipe, len(family.layers(objective))) or 0
        objective.recompute = recompute
        if sharded:
            shard_model(objective, family.layers(objective), precision, accelerator)
        parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        total, trainable, _ = count_parameters(model)
        log(f"{trainable:,} of {total:,} parameters learn ({100 * trainable / total:.2f} %)")
        if not accelerator.is_main_process:
            # Dropout differs between ranks from here on.
            torch.manual_seed(settings.seed + accelerator.process_index)
        optimizer = accelerator.prepare(make_optimizer(list(parameters.values()), settings, precision))
        ema = WeightEMA(parameters, settings.ema_decay) if settings.ema_decay is not None else None
        waiting = None
        if accelerator.num_processes > 1:
            waiting = new_group(backend="gloo", timeout=MAIN_RANK_TIMEOUT)
        if not sharded:
            ddp_ignore_buffers(objective)
            objective = accelerator.prepare(objective)
        return cls(recipe, family, precision, accelerator, objective, optimizer, parameters, ema, sharded, waiting)

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.accelerator.unwrap_model(self.objective).model
        return model

    def full_model(self, *, runnable: bool = False) -> nn.Module | None:
        """Return the model with all its weights on rank 0, for saving, or `runnable` on its device. Every rank must
        call it. A sharded model is gathered into another one."""
        is_main = self.accelerator.is_main_process
        if not self.sharded:
            return self.model if is_main else None
        weights = gather_full_tensors(self.model.state_dict(), keep=is_main)
        if not is_main:
            return None
        # A runnable one is loaded again on its device, with the buffers that no checkpoint holds.
        dtype, device = self.precision.trainable_dtype, torch.device("meta")
        if runnable:
            dtype, device = self.precision.compute_dtype, self.accelerator.device
        model = self.family.load_model(dtype=dtype, device=device, text_head=self.recipe.needs_text_head)
        model.load_state_dict(weights, assign=not runnable)
        return model

    @property
    def kahan(self) -> KahanAdamW | None:
        """Optimizer of pure fp16, which scales the loss and clips by itself; None with another one."""
        inner = self.optimizer.optimizer
        return inner if isinstance(inner, KahanAdamW) else None

    def train_step(
        self, batches: Sequence[Batch], weights: torch.Tensor, learning_rate: float
    ) -> tuple[LossAccumulator, float]:
        """Run one optimizer step over this rank's micro-batches; return losses over all ranks, and the gradient
        norm."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        # Targets are counted first, over all micro-batches and ranks, so that each of them weighs the same.
        losses = LossAccumulator.zeros(len(self.family.loss_terms))
        losses.counts = self.reduce(torch.stack([batch.counts for batch in batches]).sum(0))
        self.backward(batches, weights, losses)
        norm_tensor = self.clip_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(self.trainable_parameters)
        # Read only now that all work is queued, since reading waits for the device.
        norm = float(norm_tensor)
        self._check_finite(norm)
        return losses.reduced(self.reduce), norm

    def backward(self, batches: Sequence[Batch], weights: torch.Tensor, losses: LossAccumulator) -> None:
        """Compute gradients of the whole step's loss. Ranks sum their gradients once, in the last micro-batch. With a
        sharded model they do so in every micro-batch: otherwise each rank would hold the gradients of all weights."""
        inner = getattr(self.objective, "module", self.objective)
        if not (self.objective.training and inner.training and inner.model.training):
            # Checked first: setting the mode of a thousand modules leaves the GPU idle for milliseconds.
            self.objective.train()
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            with self.accelerator.autocast(), nullcontext() if last else self.accelerator.no_sync(self.objective):
                result = self.objective(batch.to(self.accelerator.device))
                # DDP and FSDP average over ranks, but the loss is a sum.
                loss = weighted_loss(result.sums, losses.counts, weights) * self.accelerator.num_processes
                self.accelerator.backward(self.kahan.scale_loss(loss) if self.kahan is not None else loss)
            losses.add(result)

    def clip_gradients(self) -> torch.Tensor | float:
        """Clip the gradient to `train.max_grad_norm`; return its norm before."""
        max_norm = self.recipe.train.max_grad_norm
        if self.kahan is not None:
            return self.kahan.clip(max_norm)
        return full_tensor(self.accelerator.clip_grad_norm_(list(self.trainable_parameters.values()), max_norm))

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], weights: torch.Tensor) -> dict[str, Any]:
        self.objective.eval()
        losses = LossAccumulator.zeros(len(self.family.loss_terms))
        with self.ema_weights(), self.accelerator.autocast():
            # The unwrapped objective: DDP would require equally many batches of every rank.
            objective = self.accelerator.unwrap_model(self.objective)
            paired = synchronize(batches, self.accelerator) if self.sharded else ((batch, True) for batch in batches)
            for batch, counts in paired:
                result = objective(batch.to(self.accelerator.device))
                if counts:
                    losses.add(result)
                    losses.counts += batch.counts
            if self.sharded:
                # After a forward without a backward, the root's weights stay gathered and would miss the next step.
                objective.reshard()
        losses.counts = self.reduce(losses.counts)
        return losses.reduced(self.reduce).metrics(self.family.loss_terms, weights)

    def ema_weights(self) -> AbstractContextManager[None]:
        """Use the averaged weights instead of the last ones, if the recipe has an EMA."""
        return self.ema.swapped_in(self.trainable_parameters) if self.ema is not None else nullcontext()

    def reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.accelerator.num_processes == 1:
            return tensor
        # MPS has no fp64, but it has only one rank.
        return self.accelerator.reduce(tensor.to(self.accelerator.device)).cpu()  # type: ignore[no-any-return]

    def run_on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 while the other ranks wait; return its result on all ranks. An error of the user's stops
        all of them. Every rank must call it."""
        outcome: list[Any] = [None, None]
        if self.accelerator.is_main_process:
            try:
                outcome = [work(), None]
            except MynaError as error:
                outcome = [None, error]
        if self.waiting_group is not None:
            broadcast_object_list(outcome, src=0, group=self.waiting_group)
        result, failure = outcome
        if failure is not None:
            raise failure
        return result  # type: ignore[no-any-return]

    def on_all_ranks(self, check: Callable[[], T]) -> list[T]:
        """Run a check on every rank and return all results. An error of one rank stops all of them with the same
        message. Every rank must call it."""
        outcome: tuple[T | None, MynaError | None]
        try:
            outcome = check(), None
        except MynaError as error:
            if self.accelerator.num_processes == 1:
                raise
            outcome = None, error
        outcomes = gather_object([outcome])
        for rank, (_, failure) in enumerate(outcomes):
            if failure is not None:
                raise TrainingError(f"rank {rank}: {failure.what}", hint=failure.hint) from outcome[1]
        return [result for result, _ in outcomes]

    def check_same_weights(self) -> None:
        """Check that all ranks hold the same weights, which detects a bypassed DDP wrapper. Shards differ by design."""
        if self.accelerator.num_processes == 1 or self.sharded:
            return
        weights = (parameter.detach().double() for parameter in self.trainable_parameters.values())
        sums = torch.stack([moment for weight in weights for moment in (weight.sum(), weight.square().sum())])
        all_sums = self.accelerator.gather(sums[None])
        differing = (all_sums != all_sums[0]).any(dim=1).nonzero().flatten().tolist()
        if differing:
            raise TrainingError(
                f"the weights of rank {differing[0]} have parted from rank 0's",
                hint="report this: gradients were not shared",
            )

    def shutdown(self) -> None:
        """End the training. DDP is freed before the process group: as the last owner of the connections it would close
        them while holding the GIL, which one of gloo's threads may be waiting for."""
        if self.accelerator.num_processes > 1:
            self.objective, self.waiting_group = self.accelerator.unwrap_model(self.objective), None
            self.accelerator.free_memory()
            gc.collect()
        self.accelerator.end_training()

    def _check_finite(self, norm: float) -> None:
        if math.isfinite(norm):
            self.overflows = 0
            return
        self.overflows += 1
        if not self.precision.may_overflow or self.overflows > MAX_CONSECUTIVE_OVERFLOWS:
            raise TrainingError(
                "the gradient is not finite",
                hint="lower train.learning_rate or train.max_grad_norm, or find the cause with train.precision=fp32",
            )


# Training on from a saved adapter


def start_from_adapter(trainer: Trainer, inputs: Mapping[str, Any], log: Callable[[str], None]) -> None:
    """Give the new adapter of a training the weights of `adapt.init`. `inputs` are the fingerprints of the training."""
    source = trainer.recipe.adapt.init
    assert source is not None, "the recipe names one"
    ref = ModelRef.find_trained(find_adapter(source))
    folder, known = ref.require_adapter(), ref.metadata.inputs
    for name in USAGE_FINGERPRINTS:
        if known.get(name, inputs[name]) != inputs[name]:
            raise TrainingError(
                f"`adapt.init`: {source} was trained with another {name} ({known[name]}, now {inputs[name]})",
                hint=f"train with the {name} it was trained with, or without adapt.init",
            )
    _check_base(trainer, ref, inputs)
    initialize_adapter(trainer.model, folder)
    if trainer.ema is not None:
        trainer.ema = WeightEMA(trainer.trainable_parameters, trainer.ema.decay)
    log(f"training on from {folder}")
    if "base model" not in known and ref.metadata.source != trainer.family.source:
        log(f"it names {ref.metadata.source} as its base model, and no fingerprint of it to compare")


def _check_base(trainer: Trainer, ref: ModelRef, inputs: Mapping[str, Any]) -> None:
    metadata, recipe = ref.metadata, trainer.recipe
    expected, precision = metadata.inputs.get("base model"), metadata.inputs.get("precision", "")
    if expected is None or precision not in DTYPES:
        return
    found = inputs["base model"]
    as_trained = (inputs["precision"], recipe.model.quantization, recipe.needs_text_head)
    if as_trained != (precision, metadata.quantization, bool(metadata.text_head)):
        # The fingerprint was taken of rounded weights, so the base is read again, rounded in the same way.
        def read_again() -> str:
            text_head, dtype = bool(metadata.text_head), DTYPES[precision]
            return base_model_hash(
                trainer.family.load_model(dtype=dtype, device="cpu", text_head=text_head),
                trainer.family,
                ref.require_adapter(),
                dtype=dtype,
                quantization=metadata.quantization,
                text_head=text_head,
            )

        found = trainer.run_on_main(read_again)
    if found != expected:
        raise TrainingError(
            f"`adapt.init`: {recipe.adapt.init} was trained on another base model than {trainer.family.source}: the "
            f"fingerprint of its weights was {expected}, and is {found}",
            hint=f"--set model.source=... with the model it was trained on, {metadata.source}",
        )
