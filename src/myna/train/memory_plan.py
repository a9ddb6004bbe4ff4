"""Memory plan of a training, from shapes alone, and the changes to the recipe that make it fit.

Weights, gradients and optimizer state are counted and activations measured on the meta device, before anything is
loaded.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from myna.core.compat import TorchDispatchMode, storage_id, tree_leaves
from myna.core.config import Recipe
from myna.core.device import memory_limit, peak_process_memory
from myna.core.errors import TrainingError
from myna.data.conversation import AudioClip
from myna.data.loader import Loader, Shard, first_fit_decreasing
from myna.models import open_family
from myna.models.base import IGNORE_INDEX, Batch, Family, RenderedSequence, TokenSpan
from myna.train.optimizer import make_optimizer
from myna.train.precision import BF16_CAPABILITY, Precision, choose_precision
from myna.train.trainer import build_model, configured_recomputation

LONGEST_CANDIDATES = 256
"""Number of targets searched for the largest batch: half are the longest clips, half are spread over the data."""
MEASURED_SEQUENCES = 8
"""Maximum number of measured sequences of the largest batch: memory grows linearly with the tokens."""
USABLE_MEMORY_SHARE = 0.95
"""Share of the memory to plan with: allocators round up and leave gaps."""
CUDA_SEGMENT_BYTES = 20 * 2**20
"""Bytes that CUDA's caching allocator allocates at once for tensors of a few megabytes. Most of the last allocation may
be unused, which on a small share of a GPU is more than the reserve."""


DRIVER_GIBIBYTES = 0.6
"""Memory of a GPU that the driver and CUDA take."""


class LargestBatch(NamedTuple):
    """The largest micro-batch of a training."""

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
    # Rows repeat endlessly: if there are few of them, a micro-batch holds some of them twice.
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
    batch: LargestBatch
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
    activation_memory: "ActivationMemory"
    optimizer_step: int
    """Temporary memory of an optimizer step, while there are no activations."""
    available: int
    world_size: int
    recipe: Recipe

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

    def with_least_recomputation(self) -> "MemoryPlan":
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
        largest, quantization = max(self.activations, self.optimizer_step), self.recipe.model.quantization
        parts = {
            "frozen weights" if quantization == "none" else f"frozen, {quantization}": self.frozen,
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
    family: Family,
    recipe: Recipe,
    precision: Precision,
    device: torch.device,
    batch: LargestBatch,
    world_size: int = 1,
    available: int | None = None,
) -> MemoryPlan:
    """Plan the memory of one process for its largest micro-batch, counted on the meta device. `available` bytes are
    those of the device, unless they are given."""
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
        growing = [LinearBytes(0.0, part.per_token) for part in activations[1:]]
        activations = ActivationMemory(activations.layers, *growing)
    recomputed = configured_recomputation(recipe, activations.layers)
    plan = MemoryPlan(
        precision=precision.name,
        batch=batch,
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
        available=available_memory(device) if available is None else available,
        world_size=world_size,
        recipe=recipe,
    )
    return plan if recomputed is not None else plan.with_least_recomputation()


def check_weights_fit(plan: MemoryPlan) -> None:
    """Raise an error, before anything is loaded, if the weights alone do not fit."""
    if (weights := plan.frozen + plan.trained) > plan.available:
        what = f"the weights alone take {format_bytes(weights)}, and there are {format_bytes(plan.available)}"
        raise TrainingError(f"{what}\n{plan.table()}", hint=_last_resort(plan))


def plan_for_gpu(recipe: Recipe, gibibytes: float) -> MemoryPlan:
    """Plan the memory of a training on a GPU that need not be here, from the model's configuration alone. Rows are
    taken to be full."""
    family = open_family(recipe.model.source, revision=recipe.model.revision, codec=recipe.model.codec)
    device, precision = torch.device("cuda"), choose_precision(recipe.train.precision, torch.device("cuda"), (8, 0))
    tokens = recipe.data.row_tokens * recipe.train.micro_batch_size
    available = int((gibibytes - DRIVER_GIBIBYTES) * 2**30)
    batch = LargestBatch((typical_sequence(family, recipe),) * 2, recipe.data.row_tokens)
    plan = replace(plan_memory(family, recipe, precision, device, batch, available=available), tokens=tokens)
    return plan.with_least_recomputation() if plan.automatic else plan


def typical_sequence(family: Family, recipe: Recipe) -> RenderedSequence:
    """Make a sequence of usual proportions without a tokenizer, which a built-in configuration does not have."""
    [clip, *_] = [part for turn in family.probe().turns for part in turn.parts if isinstance(part, AudioClip)]
    is_speaking = any(name.startswith("code") for name in family.loss_terms)
    text, audio, learned = 150, 500, 50
    ids = np.full(text + audio, 5)
    labels = np.full(text + audio, IGNORE_INDEX)
    if recipe.needs_text_head or not is_speaking:
        labels[-learned:] = 5
    codes = np.zeros((audio, clip.codes.shape[1]), np.int64)
    if is_speaking:
        ids[text:] = family.config.audio_token_id
    span = TokenSpan("audio", text - learned, text - learned + audio, "", supervised=is_speaking)
    code_labels = codes if is_speaking else np.full_like(codes, IGNORE_INDEX)
    return RenderedSequence("typical", ids, codes, labels, code_labels, (span,), audio / 25)


def out_of_memory_error(plan: MemoryPlan, family: Family, recipe: Recipe, device: torch.device) -> TrainingError:
    """Make the error of a largest micro-batch that ran out of memory; its hint is the cheapest change that fits."""

    def plan_in_half_precision() -> MemoryPlan | None:
        half = choose_precision("auto", device)
        if plan.precision != "fp32" or half.name == "fp32":
            return None
        return plan_memory(family, recipe, half, device, plan.batch, plan.world_size)

    hint = cheapest_saving(plan, recipe, plan_in_half_precision)
    return TrainingError(f"out of memory in the longest pass, {plan.tokens:,} tokens\n{plan.table()}", hint=hint)


def cheapest_saving(
    plan: MemoryPlan, recipe: Recipe, plan_in_half_precision: Callable[[], MemoryPlan | None] = lambda: None
) -> str:
    """Return what to type for a plan that does not fit, or has failed."""
    # A plan that has failed was too low: the next one must be well below it.
    budget = USABLE_MEMORY_SHARE * min(plan.available, plan.total)
    for changes, lighter in lighter_plans(plan, recipe, plan_in_half_precision):
        if lighter.total <= budget:
            settings = " ".join(f"--set {key}={value}" for key, value in changes.items())
            return f"{settings}   which takes {format_bytes(lighter.total)}"
    return _last_resort(plan)


class _Saving(NamedTuple):
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
    halvings = int(math.log2(max(1, row_tokens / plan.batch.longest_sequence))) if data.pack else 0
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
        # The plan underestimated a full device. A new automatic plan would fill it again, so fix recomputation first.
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
    # No single change is enough: combine the strongest change of each kind, one kind after another.
    for changes, lighter in starts:
        for kind in (fewer_rows, shorter_rows, recomputing):
            if kind:
                changes, lighter = changes | kind[-1].changes, kind[-1].apply(lighter)
                yield changes, lighter


def _last_resort(plan: MemoryPlan) -> str:
    smaller = "--set model.source=... for a smaller model"
    if plan.optimizer_state > plan.frozen:
        smaller = "train a LoRA instead, --set adapt.mode=comprehensive"
    elif plan.precision == "fp32":
        smaller = "--set train.precision=auto"
    elif plan.recipe.model.quantization != "nf4":
        smaller = "--set model.quantization=nf4"
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
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_process_memory()


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


# Activations, measured on the meta device: forward and backward run on tensors with shapes but no contents, while the
# bytes of live tensors are counted. That takes seconds for a model of any size


MATMUL_OPS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2"})
"""Operations of torch that fused kernels never include."""


class LinearBytes(NamedTuple):
    """Bytes as a linear function of the tokens. The fixed part is mostly weights, cast once for any number of them."""

    fixed: float
    per_token: float


class ActivationMemory(NamedTuple):
    """Memory of a forward and backward pass, without the weights and their gradients.

    There are two peaks. The first is between forward and backward, when everything saved exists, and the logits with
    their gradients. The second is when the first recomputed layer is complete again. The layers that are not recomputed
    are the last ones, so that everything they saved is freed by then. If they were the first ones, the recomputed layer
    would come on top of it.
    """

    layers: int
    outside: LinearBytes
    """Memory outside the layers at the first peak: embeddings, heads, logits and their gradients."""
    layer: LinearBytes
    last: LinearBytes
    """Memory that the last layer saves, which may skip unsupervised positions."""
    layer_input: LinearBytes
    """Memory kept for a layer that is recomputed: its input."""
    recomputing: LinearBytes
    """Memory of a layer during its recomputation, with the gradients inside it."""

    def total(self, tokens: int, recomputed: int) -> int:
        outside, layer, last, layer_input, recomputing = (part.fixed + tokens * part.per_token for part in self[1:])
        saved = self.layers - recomputed
        first_peak = outside + (last + (saved - 1) * layer if saved else 0) + recomputed * layer_input
        return int(max(first_peak, recomputing + recomputed * layer_input) if recomputed else first_peak)


def measure_activations(
    family: Family,
    objective: Any,
    precision: Precision,
    device: torch.device,
    sequences: Sequence[RenderedSequence],
    *,
    compiled: bool,
) -> ActivationMemory:
    """Measure the activation memory of an objective on the meta device, as it would be on `device`. Two batches, one
    twice as large, separate what grows with the tokens from what does not."""
    is_new = _is_ampere_or_later(device)
    fused_kernels = device.type == "cuda" and is_new and (objective.fused or compiled)
    attention: _AttentionKind = "grouped"
    if device.type == "cuda" and (precision.compute_dtype == torch.float32 or not is_new):
        attention = "math" if precision.compute_dtype == torch.float32 else "expanded"
    once, twice = (
        _run_on_meta(family, objective, _MetaAutocast(precision.compute_dtype, attention), batch, fused_kernels)
        for batch in (family.collate([*sequences] * times) for times in (1, 2))
    )
    tokens = sum(map(len, sequences))
    parts = [LinearBytes(2 * low - high, (high - low) / tokens) for low, high in zip(once, twice, strict=True)]
    return ActivationMemory(len(family.layers(objective)), *parts)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' memory, views counted once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage_id(storage): storage.nbytes() for storage in storages}.values())


def _run_on_meta(
    family: Family, objective: Any, autocast: "_MetaAutocast", batch: Batch, fused_kernels: bool
) -> tuple[float, ...]:
    """Run forward and backward with half of the layers recomputed; return the parts of `ActivationMemory`."""
    trainable = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.grad = torch.empty_like(parameter)
    existing = [*objective.parameters(), *objective.buffers(), *(parameter.grad for parameter in trainable)]
    memory = _LiveBytes(existing, fused_kernels)
    layers = family.layers(objective)
    objective.recompute = recomputed = len(layers) // 2
    live_at: list[int] = []  # bytes before every layer and after the last
    first_peak = 0

    def enter(*_: Any) -> None:
        nonlocal first_peak
        if len(live_at) == len(layers) + 1:
            # Back at the first layer that is recomputed: the second peak begins.
            first_peak, memory.peak = memory.peak, memory.live
        live_at.append(memory.live)
        # Torch leaves function modes in the backward pass, where layers are recomputed.
        autocast.__enter__()  # type: ignore[no-untyped-call]

    def leave(module: nn.Module, *_: Any) -> None:
        autocast.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if module is layers[-1]:
            live_at.append(memory.live)

    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    # Torch stops recomputing, by an exception, as soon as it has what it needs.
    hooks += [layer.register_forward_hook(leave, always_call=True) for layer in layers]
    with memory, autocast:
        torch.autograd.backward(objective(batch.to(torch.device("meta"))).sums.sum())
    for hook in hooks:
        hook.remove()
    # Differences between layer inputs, since a layer's input may be freed after it. All layers but the last are alike.
    last_index = len(layers) - 1
    last = live_at[last_index + 1] - live_at[last_index]
    if not recomputed:
        return memory.peak - last, last, last, last, memory.peak
    inputs, saved = live_at[recomputed] - live_at[0], live_at[last_index] - live_at[recomputed]
    layer = saved / (last_index - recomputed) if last_index > recomputed else last
    return first_peak - inputs - saved - last, layer, last, inputs / recomputed, memory.peak - inputs


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the bytes of live tensors, each storage once, and of their peak.

    With `fused_kernels` it only looks at matrix products: what is freed before the next one lives inside a kernel.
    """

    def __init__(self, existing: Iterable[torch.Tensor], fused_kernels: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.fused_kernels = fused_kernels
        self._storages: dict[int, Any] = {storage_id(tensor.untyped_storage()): tensor for tensor in existing}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(out)):
            self._add(tensor.untyped_storage())
        if not self.fused_kernels or func.overloadpacket.__name__ in MATMUL_OPS:
            self.peak = max(self.peak, self.live)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, count = storage_id(storage), storage.nbytes()
        if key in self._storages:
            return

        def freed(_: Any) -> None:
            self.live -= count
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, freed)
        self.live += count


class _MetaAutocast(TorchFunctionMode):
    """Emulation of autocast and attention for the meta device, which has neither autocast nor fused attention."""

    def __init__(self, dtype: torch.dtype, attention: "_AttentionKind") -> None:
        super().__init__()
        self.dtype, self.attention = dtype, attention
        self._cast: dict[torch.Tensor, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.linear, F.conv1d, F.conv2d) and self.dtype != torch.float32:
            args = tuple(self._in_dtype(arg) if torch.is_tensor(arg) else arg for arg in args)
        if func is F.scaled_dot_product_attention:
            return _MetaAttention.apply(*args[:3], self.attention)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))

    def _in_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        """Cast as autocast does: a weight once, kept until autocast ends, whether or not its layer is recomputed."""
        if not (tensor.is_leaf and tensor.requires_grad and tensor.dtype != self.dtype):
            return tensor.to(self.dtype)
        if tensor not in self._cast:
            self._cast[tensor] = tensor.to(self.dtype)
        return self._cast[tensor]


_AttentionKind = Literal["grouped", "expanded", "math"]
"""Kinds of attention: keys shared by heads, a copy of the keys for each head, or a matrix of all pairs."""


def _is_ampere_or_later(device: torch.device) -> bool:
    """Whether a GPU is Ampere or later. A plan for a GPU that is not here assumes a new one."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= BF16_CAPABILITY


class _MetaAttention(torch.autograd.Function):
    """Attention that saves as much memory as the real one: inputs, output, and a number per head and position or
    pair."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: "_AttentionKind") -> torch.Tensor:
        ctx.shapes = (q.shape, k.shape, v.shape)
        out = torch.empty_like(q)
        if kind == "expanded":
            k, v = torch.empty_like(q), torch.empty_like(q)
        pairs = (*q.shape[:-1], k.shape[-2] if kind == "math" else 1)
        ctx.save_for_backward(q, k, v, out, q.new_empty(pairs, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return gradients; those of queries are summed in fp32, those of shared keys separately for each head."""
        q, *_, pairs = ctx.saved_tensors
        scratch = [q.new_empty(q.shape, dtype=torch.float32), torch.empty_like(q), torch.empty_like(q), pairs.clone()]
        gradients = [q.new_empty(shape) for shape in ctx.shapes]
        del scratch
        return (*gradients, None)
