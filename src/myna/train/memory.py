"""What a training will need in memory, from shapes alone, and what to change when it does not fit.

The model is built and run forward on the meta device, where tensors have shapes and no contents, while a ledger counts
what stays alive for the backward pass. That takes seconds at any size, before anything is loaded.
"""

from __future__ import annotations

import heapq
import math
import os
import resource
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from myna.config import Recipe
from myna.data.loader import Loader, Share
from myna.data.pack import first_fit_decreasing
from myna.errors import TrainingError
from myna.models.base import Batch, Family, Rendered
from myna.train.lora import adapt
from myna.train.optimizer import make_optimizer
from myna.train.precision import Precision, decide

POOL = 256
"""Targets to look for the longest pass among: half of them the longest clips, half from all over the data."""
HEADROOM = 0.95
"""Share of the memory to plan with: allocators round up and leave gaps."""
EVERY = {"none": 0, "full": 1}
"""`train.checkpointing` as a number: every n-th layer is recomputed, 0 recomputes none."""


class Pass(NamedTuple):
    """Sequences that go through the model together."""

    sequences: tuple[Rendered, ...]
    longest: int
    """Tokens of the longest sequence there is, in this pass or not: no row can be shorter."""


def longest_pass(loader: Loader[Rendered, Batch], recipe: Recipe, share: Share) -> Pass:
    """The most tokens one forward pass can meet, as real sequences of this rank's share."""
    targets = loader.pairing.targets[share.rank :: share.world] or loader.pairing.targets
    longest = heapq.nlargest(POOL // 2, targets, key=loader.corpus.seconds)
    chosen = {target.id: target for target in (*longest, *spread(targets, POOL // 2))}
    pool = [loader.sequence(target, 0) for target in chosen.values()]
    if recipe.data.pack:
        packed = first_fit_decreasing([len(sequence) for sequence in pool], recipe.data.row_tokens)
        rows = [[pool[index] for index in row] for row in packed]
    else:
        rows = [[sequence] for sequence in pool]
    rows.sort(key=lambda row: -sum(map(len, row)))
    # The stream of rows has no end: where there are few, they come again in the same pass.
    fullest = islice(cycle(rows), recipe.train.rows_per_pass)
    return Pass(tuple(sequence for row in fullest for sequence in row), max(map(len, pool)))


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of them, evenly from first to last."""
    return [items[int(number * len(items) / min(count, len(items)))] for number in range(min(count, len(items)))]


class Line(NamedTuple):
    """Bytes that grow with the tokens of a pass, from some that do not: weights are cast once, however many follow."""

    fixed: float
    per_token: float

    def at(self, tokens: int) -> float:
        return self.fixed + tokens * self.per_token


@dataclass(frozen=True, slots=True)
class Activations:
    """What a forward pass keeps for its backward pass."""

    outside: Line
    """Beside the layers: embeddings, the heads, logits, and the room their gradients take."""
    layer: Line
    """In one layer."""
    between: Line
    """What a layer hands to the next, which stays when the layer is recomputed."""
    layers: int

    def total(self, tokens: int, every: int) -> int:
        """`every` n-th layer is recomputed; one of them at a time is whole again in the backward pass."""
        recomputed = math.ceil(self.layers / every) if every else 0
        whole = self.layers - recomputed + (1 if recomputed else 0)
        outside, layer, between = (line.at(tokens) for line in (self.outside, self.layer, self.between))
        return int(outside + whole * layer + recomputed * between)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, part by part."""

    precision: str
    sequences: tuple[Rendered, ...]
    """The pass that was planned for."""
    longest: int
    tokens: int
    every: int
    frozen: int
    trained: int
    gradients: int
    moments: int
    """What the optimizer keeps."""
    averages: int
    """The running mean of the trained weights."""
    working: Activations
    stepping: int
    """What an optimizer step needs for itself, while there are no activations."""
    room: int
    """What the device has for us."""
    world: int

    @property
    def activations(self) -> int:
        return self.working.total(self.tokens, self.every)

    @property
    def total(self) -> int:
        kept = self.frozen + self.trained + self.gradients + self.moments + self.averages
        return kept + max(self.activations, self.stepping)

    def table(self) -> str:
        recomputed = {0: "no layer recomputed", 1: "every layer recomputed"}
        how = recomputed.get(self.every, f"one layer in {self.every} recomputed")
        parts = {
            "frozen weights": self.frozen,
            "trained weights": self.trained,
            "gradients": self.gradients,
            "optimizer": self.moments,
            "running mean": self.averages,
            "activations" if self.activations >= self.stepping else "optimizer step": max(
                self.activations, self.stepping
            ),
        }
        lines = [f"memory plan: {self.precision}, {self.tokens:,} tokens a pass, {how}"]
        lines += [f"  {name:16}{size(count):>12}" for name, count in parts.items() if count]
        lines.append(f"  {'in all':16}{size(self.total):>12} of {size(self.room)}")
        return "\n".join(lines)


def plan(
    family: Family, recipe: Recipe, precision: Precision, device: torch.device, longest: Pass, world: int = 1
) -> MemoryPlan:
    """Everything one process holds at its peak, counted on the meta device."""
    model = family.load_model(dtype=precision.frozen, device="meta", text_head=recipe.needs_text_head)
    model = adapt(model, family, recipe.adapt, dtype=precision.trainable)
    objective = family.objective(model, label_smoothing=recipe.loss.label_smoothing).train()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = sum(parameter.numel() for parameter in learning)
    frozen, trained = _bytes([*objective.parameters(), *objective.buffers()]) - _bytes(learning), _bytes(learning)
    kept, stepping = _optimizer_bytes(recipe, precision)
    # On CUDA, heads that share keys are attended to in fp32 with a matrix of all pairs of positions.
    fused = device.type != "cuda" or precision.frozen != torch.float32
    working = _activations(family, objective, _Autocast(precision.frozen, fused), longest.sequences)
    parts = world if recipe.adapt.mode == "full" else 1
    if parts > 1:
        # Shared out by FSDP: each process has its part, and puts two layers and what is around them together at a time.
        layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in family.layers(objective)]
        together = weights - sum(layers) + 2 * max(layers)
        frozen += together * precision.frozen.itemsize * parts
        # Nor are casts of weights kept, which are put together anew for the backward pass.
        working = replace(working, layer=Line(0.0, working.layer.per_token))
    return MemoryPlan(
        precision=precision.name,
        sequences=longest.sequences,
        longest=longest.longest,
        tokens=sum(map(len, longest.sequences)),
        every=int(EVERY.get(str(recipe.train.checkpointing), recipe.train.checkpointing)),
        frozen=frozen // parts,
        trained=trained // parts,
        gradients=trained // parts * (2 if world > parts else 1),  # DDP has a bucket beside every gradient
        moments=weights * kept // parts,
        averages=weights * 4 // parts if recipe.train.ema is not None else 0,
        working=working,
        stepping=weights * stepping // parts if device.type != "cuda" else 0,
        room=room(device),
        world=world,
    )


def check_room(planned: MemoryPlan) -> None:
    """Refuse to load what cannot be loaded."""
    weights = planned.frozen + planned.trained
    if weights > planned.room:
        raise TrainingError(
            f"the weights alone take {size(weights)}, and there are {size(planned.room)}\n{planned.table()}",
            hint=_no_way_out(planned),
        )


def out_of_memory(planned: MemoryPlan, family: Family, recipe: Recipe, device: torch.device) -> TrainingError:
    """What to say when the longest pass has run out of memory: the cheapest change that fits, as what to type."""

    def in_half_precision() -> MemoryPlan | None:
        half = decide("auto", device)
        if planned.precision != "fp32" or half.name == "fp32":
            return None
        return plan(family, recipe, half, device, Pass(planned.sequences, planned.longest), planned.world)

    # A plan that failed was too hopeful: what comes instead must be well below it.
    budget = HEADROOM * min(planned.room, planned.total)
    hint = _no_way_out(planned)
    for typed, lighter in ways_out(planned, recipe, in_half_precision):
        if lighter.total <= budget:
            settings = " ".join(f"--set {key}={value}" for key, value in typed.items())
            hint = f"{settings}   which takes {size(lighter.total)}"
            break
    return TrainingError(f"out of memory in the longest pass, {planned.tokens:,} tokens\n{planned.table()}", hint=hint)


class _Change(NamedTuple):
    """Something to type that saves memory."""

    typed: dict[str, Any]
    fewer_tokens: int = 1
    """By what the tokens of a pass are divided."""
    every: int | None = None

    def __call__(self, planned: MemoryPlan) -> MemoryPlan:
        every = planned.every if self.every is None else self.every
        return replace(planned, tokens=planned.tokens // self.fewer_tokens, every=every)


def ways_out(
    planned: MemoryPlan, recipe: Recipe, in_half_precision: Callable[[], MemoryPlan | None]
) -> Iterator[tuple[dict[str, Any], MemoryPlan]]:
    """Changes to the recipe that save memory, and the plans they lead to: what costs least comes first."""
    settings, data = recipe.train, recipe.data
    rows, budget = settings.rows_per_pass, data.row_tokens
    fewer = [_Change({"train.rows_per_pass": rows // n}, n) for n in range(2, rows + 1) if rows % n == 0]
    # Shorter rows, and so many more of them that a step learns from as much as before.
    halvings = int(math.log2(max(1, budget / planned.longest))) if data.pack else 0
    shorter = [
        _Change({"data.row_tokens": budget // n, "train.rows_per_step": settings.rows_per_step * n}, n)
        for n in (2**halving for halving in range(1, halvings + 1))
    ]
    recomputed = [n for n in (4, 2, 1) if planned.every == 0 or n < planned.every]
    recomputing = [_Change({"train.checkpointing": "full" if n == 1 else n}, every=n) for n in recomputed]
    for change in (*fewer, *shorter, *recomputing):
        yield change.typed, change(planned)
    half = in_half_precision()
    if half is not None:
        yield {"train.precision": half.precision}, half
    # None of them alone: the most of each kind, one kind after another.
    starts: list[tuple[dict[str, Any], MemoryPlan]] = [({}, planned)]
    starts += [({"train.precision": half.precision}, half)] if half is not None else []
    for typed, lighter in starts:
        for kind in (fewer, shorter, recomputing):
            if kind:
                typed, lighter = typed | kind[-1].typed, kind[-1](lighter)
                yield typed, lighter


def _no_way_out(planned: MemoryPlan) -> str:
    if planned.moments > planned.frozen:
        return "train a LoRA instead, --set adapt.mode=comprehensive, or use a device with more memory"
    smaller = (
        "--set train.precision=auto" if planned.precision == "fp32" else "--set model.source=... for a smaller model"
    )
    return f"{smaller}, or use a device with more memory"


def is_out_of_memory(error: RuntimeError) -> bool:
    """CUDA has a class for it; the CPU and MPS only a message."""
    told = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in told or "not enough memory" in told


def room(device: torch.device) -> int:
    """Memory that we have or could get."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device))
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak(device: torch.device) -> int:
    """The most there was: of the device where it has memory of its own, else of the process, Python included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of what lies behind them, each storage once: some tensors are views of others."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _optimizer_bytes(recipe: Recipe, precision: Precision) -> tuple[int, int]:
    """Bytes per trained weight that the optimizer keeps, and that a step needs: it is asked on a small one."""
    weight = nn.Parameter(torch.zeros(1024, dtype=precision.trainable))
    weight.grad = torch.zeros_like(weight)
    optimizer = make_optimizer([weight], recipe.train, precision)
    optimizer.step()
    kept = [state for state in optimizer.state[weight].values() if torch.is_tensor(state) and state.numel() == 1024]
    return _bytes(kept) // 1024, weight.element_size()


def _activations(
    family: Family, objective: nn.Module, autocast: _Autocast, sequences: Sequence[Rendered]
) -> Activations:
    """Two passes, one twice the other, tell what grows with the tokens from what does not."""
    layers = len(family.layers(objective))
    tokens = sum(map(len, sequences))
    once, twice = (_kept(family, objective, autocast, [*sequences] * times) for times in (1, 2))
    lines = [Line(2 * low - high, (high - low) / tokens) for low, high in zip(once, twice, strict=True)]
    return Activations(lines[0], lines[1], lines[2], layers)


def _kept(
    family: Family, objective: nn.Module, autocast: _Autocast, sequences: Sequence[Rendered]
) -> tuple[float, float, float]:
    """What a forward pass over these keeps beside the layers, in one layer, and between layers."""
    ledger = _Ledger([*objective.parameters(), *objective.buffers()])
    entered: list[int] = []
    between: list[int] = []

    def enter(*_: Any) -> None:
        entered.append(ledger.alive)

    def leave(_module: nn.Module, _inputs: Any, out: Any) -> None:
        between.append(_bytes(tensor for tensor in tree_leaves(out) if torch.is_tensor(tensor)))

    layers = family.layers(objective)
    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    with ledger, autocast:
        result = objective(family.collate(sequences).to(torch.device("meta")))
    for hook in hooks:
        hook.remove()
    # From one layer to the next, since what a layer was given may go when it is done. Layers are all alike.
    in_one = (entered[-1] - entered[0]) / (len(layers) - 1) if len(layers) > 1 else ledger.alive - entered[0]
    # The largest of all, the logits, meets its own gradient in two types.
    outside = ledger.alive - len(layers) * in_one + 2 * ledger.largest
    del result
    return outside, in_one, sum(between) / len(layers)


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are alive, each storage once."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.largest = 0
        self._storages: dict[int, Any] = {tensor.untyped_storage()._cdata: tensor for tensor in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, count = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def forget(_: Any) -> None:
            self.alive -= count
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, forget)
        self.alive += count
        self.largest = max(self.largest, count)


class _Autocast(TorchFunctionMode):
    """What autocast and attention do to memory, for the meta device, which has no autocast and no fused kernels."""

    def __init__(self, dtype: torch.dtype, fused: bool) -> None:
        super().__init__()
        self.dtype, self.fused = dtype, fused

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and self.dtype != torch.float32:
            args = tuple(arg.to(self.dtype) if torch.is_tensor(arg) else arg for arg in args)
        if func is F.scaled_dot_product_attention:
            return _Attention.apply(*args[:3], self.fused)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    """Keeps what attention keeps: its inputs, its output, and a number per head and position, or per pair of them."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fused: bool) -> torch.Tensor:
        out = torch.empty_like(q)
        pairs = (*q.shape[:-1], 1 if fused else k.shape[-2])
        ctx.save_for_backward(q, k, v, out, q.new_empty(pairs, dtype=torch.float32))
        return out
