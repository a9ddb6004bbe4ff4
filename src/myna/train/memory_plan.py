"""Memory plan of a training, from shapes alone, and the changes to the recipe that make it fit.

Weights, gradients and optimizer state are counted and activations measured on the meta device, before anything is
loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from myna.core.config import Quantization, Recipe
from myna.core.device import memory_limit, peak_process_memory
from myna.core.errors import TrainingError
from myna.data.loader import first_fit_decreasing
from myna.models.base import Batch, Family, RenderedSequence
from myna.train.activation_memory import ActivationMemory, measure_activations, storage_bytes
from myna.train.optimizer import make_optimizer
from myna.train.precision import Precision, choose_precision
from myna.train.trainer import build_model, configured_recomputation

if TYPE_CHECKING:
    from myna.data.loader import Loader, Shard

LONGEST_CANDIDATES = 256
"""Number of targets searched for the largest batch: half are the longest clips, half are spread over the data."""
MEASURED_SEQUENCES = 8
"""Maximum number of measured sequences of the largest batch: memory grows linearly with the tokens."""
USABLE_MEMORY_SHARE = 0.95
"""Share of the memory to plan with: allocators round up and leave gaps."""
CUDA_SEGMENT_BYTES = 20 * 2**20
"""Bytes that CUDA's caching allocator allocates at once for tensors of a few megabytes. Most of the last allocation may
be unused, which on a small share of a GPU is more than the reserve."""


class LargestBatch(NamedTuple):
    """Micro-batch with the most tokens."""

    sequences: tuple[RenderedSequence, ...]
    longest_sequence: int
    """Tokens of the longest sequence of the data, in this batch or not: no row can be shorter than it."""


def largest_batch(loader: Loader[RenderedSequence, Batch], recipe: Recipe, shard: Shard) -> LargestBatch:
    """Find the largest micro-batch that can occur, as real sequences of this rank's targets."""
    targets = loader.reference_sampler.targets[shard.rank :: shard.world_size] or loader.reference_sampler.targets
    by_length = np.argsort(-loader.dataset.table.frames[targets.indices], kind="stable")
    longest = [targets[int(index)] for index in by_length[: LONGEST_CANDIDATES // 2]]
    candidates = {target.id: target for target in (*longest, *evenly_spaced(targets, LONGEST_CANDIDATES // 2))}
    sequences = [loader.sequence(target, 0) for target in candidates.values()]
    rows = [[sequence] for sequence in sequences]
    if recipe.data.pack:
        packed = first_fit_decreasing(list(map(len, sequences)), recipe.data.row_tokens)
        rows = [[sequences[index] for index in row] for row in packed]
    rows.sort(key=lambda row: -sum(map(len, row)))
    # Rows are repeated without end: few rows come again in the same micro-batch.
    fullest = islice(cycle(rows), recipe.train.micro_batch_size)
    return LargestBatch(tuple(sequence for row in fullest for sequence in row), max(map(len, sequences)))


def evenly_spaced(items: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` items, evenly spaced from first to last."""
    count = min(count, len(items))
    return [items[int(number * len(items) / count)] for number in range(count)]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that one process needs at its peak."""

    precision: str
    sequences: tuple[RenderedSequence, ...]
    """Largest micro-batch."""
    longest_sequence: int
    tokens: int
    recomputed: int
    """Layers whose activations are recomputed in the backward pass."""
    automatic: bool
    """Whether the plan has chosen `recomputed`."""
    frozen: int
    trained: int
    gradients: int
    optimizer_state: int
    ema: int
    activation_memory: ActivationMemory
    optimizer_step: int
    """Temporary memory of an optimizer step, while there are no activations."""
    available: int
    world_size: int
    quantization: Quantization = "none"

    @property
    def activations(self) -> int:
        return self.activation_memory.total(self.tokens, self.recomputed)

    @property
    def total(self) -> int:
        persistent = self.frozen + self.trained + self.gradients + self.optimizer_state + self.ema
        return persistent + max(self.activations, self.optimizer_step)

    @property
    def fits(self) -> bool:
        return self.total <= USABLE_MEMORY_SHARE * self.available

    def with_least_recomputation(self) -> MemoryPlan:
        """Return the plan with as few layers recomputed as fit; if none fits, with as many as save most."""
        plans = [replace(self, recomputed=n, automatic=True) for n in range(self.activation_memory.layers + 1)]
        return next((plan for plan in plans if plan.fits), min(plans, key=lambda plan: plan.total))

    @property
    def recomputation(self) -> str:
        """Description of the recomputed layers, with the reason."""
        layers = self.activation_memory.layers
        named = {0: "no layer recomputed", layers: f"all {layers} layers recomputed"}
        text = named.get(self.recomputed, f"{self.recomputed} of {layers} layers recomputed")
        if not self.automatic:
            return f"{text}, as the recipe says"
        if not self.fits:
            return f"{text}, which saves most and may not be enough"
        return f"{text}, the fewest that fit" if self.recomputed else f"{text}, since everything fits"

    def table(self) -> str:
        largest = max(self.activations, self.optimizer_step)
        parts = {
            "frozen weights" if self.quantization == "none" else f"frozen, {self.quantization}": self.frozen,
            "trained weights": self.trained,
            "gradients": self.gradients,
            "optimizer": self.optimizer_state,
            "running mean": self.ema,
            "activations" if self.activations >= self.optimizer_step else "optimizer step": largest,
        }
        lines = [f"memory plan: {self.precision}, {self.tokens:,} tokens a pass, {self.recomputation}"]
        lines += [f"  {name:16}{format_bytes(count):>12}" for name, count in parts.items() if count]
        lines.append(f"  {'in all':16}{format_bytes(self.total):>12} of {format_bytes(self.available)}")
        return "\n".join(lines)


def plan_memory(
    family: Family, recipe: Recipe, precision: Precision, device: torch.device, batch: LargestBatch, world_size: int = 1
) -> MemoryPlan:
    """Plan the memory of one process for its largest micro-batch, counted on the meta device."""
    model = build_model(recipe, family, precision, "meta")
    # Families do not fuse on MPS; on the meta device they cannot know where the model will be.
    fused = recipe.train.fused_lora and device.type != "mps"
    objective: Any = family.objective(model, label_smoothing=recipe.loss.label_smoothing, fused_lora=fused).train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count = sum(parameter.numel() for parameter in trainable)
    trained = storage_bytes(trainable)
    frozen = storage_bytes([*objective.parameters(), *objective.buffers()]) - trained
    state_bytes, step_bytes = _optimizer_bytes(recipe, precision)
    measured = evenly_spaced(batch.sequences, MEASURED_SEQUENCES)
    activations = measure_activations(family, objective, precision, device, measured, compiled=recipe.train.compile)
    shards = world_size if recipe.adapt.mode == "full" else 1
    if shards > 1:
        # FSDP: each process has its shard, and gathers two layers and what is outside the layers at a time.
        layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in family.layers(objective)]
        gathered = count - sum(layers) + 2 * max(layers)
        frozen += gathered * precision.compute_dtype.itemsize * shards
        # Weights are gathered in the compute type, so no cast copy is kept, however few the tokens.
        activations = activations.without_fixed()
    recomputed = configured_recomputation(recipe, activations.layers)
    plan = MemoryPlan(
        precision=precision.name,
        sequences=batch.sequences,
        longest_sequence=batch.longest_sequence,
        tokens=sum(map(len, batch.sequences)),
        recomputed=recomputed or 0,
        automatic=False,
        frozen=frozen // shards,
        trained=trained // shards,
        gradients=trained // shards * (2 if world_size > shards else 1),  # DDP has a bucket for every gradient
        optimizer_state=count * state_bytes // shards,
        ema=count * 4 // shards if recipe.train.ema_decay is not None else 0,
        activation_memory=activations,
        optimizer_step=count * step_bytes // shards if device.type != "cuda" else 0,
        available=available_memory(device),
        world_size=world_size,
        quantization=recipe.model.quantization,
    )
    return plan if recomputed is not None else plan.with_least_recomputation()


def check_weights_fit(plan: MemoryPlan) -> None:
    """Raise an error, before anything is loaded, if the weights alone do not fit."""
    weights = plan.frozen + plan.trained
    if weights > plan.available:
        raise TrainingError(
            f"the weights alone take {format_bytes(weights)}, and there are {format_bytes(plan.available)}\n"
            f"{plan.table()}",
            hint=_last_resort(plan),
        )


def out_of_memory_error(plan: MemoryPlan, family: Family, recipe: Recipe, device: torch.device) -> TrainingError:
    """Make the error of a largest micro-batch that ran out of memory; its hint is the cheapest change that fits."""

    def plan_in_half_precision() -> MemoryPlan | None:
        half = choose_precision("auto", device)
        if plan.precision != "fp32" or half.name == "fp32":
            return None
        batch = LargestBatch(plan.sequences, plan.longest_sequence)
        return plan_memory(family, recipe, half, device, batch, plan.world_size)

    # The failed plan was too low: the next one must be well below it.
    budget = USABLE_MEMORY_SHARE * min(plan.available, plan.total)
    hint = _last_resort(plan)
    for changes, lighter in lighter_plans(plan, recipe, plan_in_half_precision):
        if lighter.total <= budget:
            settings = " ".join(f"--set {key}={value}" for key, value in changes.items())
            hint = f"{settings}   which takes {format_bytes(lighter.total)}"
            break
    return TrainingError(f"out of memory in the longest pass, {plan.tokens:,} tokens\n{plan.table()}", hint=hint)


class _Saving(NamedTuple):
    """Settings that save memory."""

    changes: dict[str, Any]
    token_divisor: int = 1
    """Divisor of the tokens of a micro-batch."""
    recomputed: int = 0
    """Layers recomputed with these settings, if they are not already."""

    def apply(self, plan: MemoryPlan) -> MemoryPlan:
        return replace(plan, tokens=plan.tokens // self.token_divisor, recomputed=max(self.recomputed, plan.recomputed))


def lighter_plans(
    plan: MemoryPlan, recipe: Recipe, plan_in_half_precision: Callable[[], MemoryPlan | None]
) -> Iterator[tuple[dict[str, Any], MemoryPlan]]:
    """Yield changes to the recipe that save memory, and the plans they lead to, cheapest first."""
    settings, data = recipe.train, recipe.data
    rows, row_tokens = settings.micro_batch_size, data.row_tokens
    fewer_rows = [_Saving({"train.micro_batch_size": rows // n}, n) for n in range(2, rows + 1) if rows % n == 0]
    # Shorter rows, and more of them, so that a step keeps its tokens.
    halvings = int(math.log2(max(1, row_tokens / plan.longest_sequence))) if data.pack else 0
    shorter_rows = [
        _Saving({"data.row_tokens": row_tokens // n, "train.batch_size": settings.batch_size * n}, n)
        for n in (2**halving for halving in range(1, halvings + 1))
    ]
    layers = plan.activation_memory.layers
    full = _Saving({"train.gradient_checkpointing": "full"}, recomputed=layers)
    every = [_Saving({"train.gradient_checkpointing": n}, recomputed=math.ceil(layers / n)) for n in (4, 2)]
    recomputing = [saving for saving in (*every, full) if saving.recomputed > plan.recomputed]
    pinned: dict[str, Any] = {}
    if plan.automatic and plan.recomputed:
        # The plan has filled the device, and was too low. With fewer tokens it would recompute less and be so once
        # more: before anything else changes, recomputation is fixed by a setting.
        for saving in recomputing:
            yield saving.changes, saving.apply(plan)
        pinned, recomputing, plan = full.changes, [], full.apply(plan)
    for saving in (*fewer_rows, *shorter_rows, *recomputing):
        yield pinned | saving.changes, saving.apply(plan)
    starts = [(pinned, plan)]
    half = plan_in_half_precision()
    if half is not None:
        half = full.apply(half) if pinned else half
        starts.append((pinned | {"train.precision": half.precision}, half))
        yield starts[-1]
    # No single change is enough: the most of each kind, one kind after another.
    for changes, lighter in starts:
        for kind in (fewer_rows, shorter_rows, recomputing):
            if kind:
                changes, lighter = changes | kind[-1].changes, kind[-1].apply(lighter)
                yield changes, lighter


def _last_resort(plan: MemoryPlan) -> str:
    if plan.optimizer_state > plan.frozen:
        return "train a LoRA instead, --set adapt.mode=comprehensive, or use a device with more memory"
    if plan.precision == "fp32":
        smaller = "--set train.precision=auto"
    elif plan.quantization != "nf4":
        smaller = "--set model.quantization=nf4"
    else:
        smaller = "--set model.source=... for a smaller model"
    return f"{smaller}, or use a device with more memory"


def available_memory(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes that a training could get, without what this process already holds for other purposes.

    `root` is the folder of the proc and sys file systems that hold the limits of main memory.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        usable = free + torch.cuda.memory_reserved(device)
        # A process can be limited to a share of its GPU, to share it or to emulate a smaller one.
        limit = total * torch.cuda.get_per_process_memory_fraction(device)
        return int(min(usable, limit)) - torch.cuda.memory_allocated(device) - CUDA_SEGMENT_BYTES
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    return memory_limit(root)


def peak_memory(device: torch.device) -> int:
    """Peak bytes of the device if it has its own memory, else of the process, Python included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_process_memory()


def format_bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _optimizer_bytes(recipe: Recipe, precision: Precision) -> tuple[int, int]:
    """Return bytes per trained weight of the optimizer's state and of its step, measured on a small parameter."""
    weight = nn.Parameter(torch.zeros(1024, dtype=precision.trainable_dtype))
    weight.grad = torch.zeros_like(weight)
    optimizer = make_optimizer([weight], recipe.train, precision)
    optimizer.step()
    state = [value for value in optimizer.state[weight].values() if torch.is_tensor(value) and value.numel() == 1024]
    return storage_bytes(state) // 1024, weight.element_size()
