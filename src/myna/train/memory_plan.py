"""What a training will need in memory, from shapes alone, and what to change when it does not fit.

The model is built and run on the meta device, forward and backward, where tensors have shapes and no contents, while a
ledger counts what is alive. That takes seconds at any size, before anything is loaded.
"""

from __future__ import annotations

import math
import os
import resource
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from myna.config import Quantization, Recipe
from myna.data.packing import first_fit_decreasing
from myna.errors import TrainingError
from myna.models.base import Batch, Family, RenderedSequence
from myna.models.lora import frozen_names
from myna.models.quantized import quantize
from myna.train.lora import adapt
from myna.train.optimizer import make_optimizer
from myna.train.precision import BF16_CAPABILITY, Precision, decide

if TYPE_CHECKING:  # or whoever makes a Student would need what reads corpora
    from myna.data.loader import Loader, Shard

POOL = 256
"""Targets to look for the longest pass among: half of them the longest clips, half from all over the data."""
SAMPLED = 8
"""Sequences of the longest pass to go through the model on paper: memory grows with the tokens, and time with these."""
HEADROOM = 0.95
"""Share of the memory to plan with: allocators round up and leave gaps."""
SEGMENT = 20 * 2**20
"""What CUDA's allocator asks the card for at a time, where tensors are of a few megabytes: of the last one most may lie
idle, which on a small part of a card is more than the headroom."""
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2"})
"""Operations of torch that no kernel of ours does in passing."""


class Pass(NamedTuple):
    """Sequences that go through the model together."""

    sequences: tuple[RenderedSequence, ...]
    longest: int
    """Tokens of the longest sequence there is, in this pass or not: no row can be shorter."""


def longest_pass(loader: Loader[RenderedSequence, Batch], recipe: Recipe, share: Shard) -> Pass:
    """The most tokens one forward pass can meet, as real sequences of this rank's share."""
    targets = loader.pairing.targets[share.rank :: share.world] or loader.pairing.targets
    by_length = np.argsort(-loader.corpus.table.frames[targets.rows], kind="stable")
    longest = [targets[int(place)] for place in by_length[: POOL // 2]]
    chosen = {target.id: target for target in (*longest, *spread(targets, POOL // 2))}
    pool = [loader.sequence(target, 0) for target in chosen.values()]
    if recipe.data.pack:
        packed = first_fit_decreasing([len(sequence) for sequence in pool], recipe.data.row_tokens)
        rows = [[pool[index] for index in row] for row in packed]
    else:
        rows = [[sequence] for sequence in pool]
    rows.sort(key=lambda row: -sum(map(len, row)))
    # The stream of rows has no end: where there are few, they come again in the same pass.
    fullest = islice(cycle(rows), recipe.train.micro_batch_size)
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
    """What a pass takes, forward and backward, beside the weights and their gradients.

    There are two peaks. One is where the pass turns back: everything that is kept is there, the logits and their
    gradients too. The other is where the first recomputed layer is whole again. The layers that are not recomputed are
    the last ones, so that all they kept is gone by then: were they the first ones, it would still be there, and the
    recomputed layer would come on top of it.
    """

    layers: int
    outside: Line
    """Beside the layers where the pass turns back: embeddings, the heads, logits, and the room their gradients take."""
    layer: Line
    """Kept by one layer."""
    last: Line
    """Kept by the last one, which may have less to do: nobody looks at what it makes of unsupervised positions."""
    between: Line
    """Kept of a layer that is recomputed: what it was given."""
    again: Line
    """A layer that is being recomputed, and the gradients inside it."""

    @property
    def lines(self) -> tuple[Line, ...]:
        return (self.outside, self.layer, self.last, self.between, self.again)

    def total(self, tokens: int, recomputed: int) -> int:
        outside, layer, last, between, again = (line.at(tokens) for line in self.lines)
        whole = self.layers - recomputed
        turning = outside + (last + (whole - 1) * layer if whole else 0) + recomputed * between
        return int(max(turning, again + recomputed * between) if recomputed else turning)

    def without_fixed(self) -> Activations:
        """Only what grows with the tokens."""
        return Activations(self.layers, *(Line(0.0, line.per_token) for line in self.lines))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, part by part."""

    precision: str
    sequences: tuple[RenderedSequence, ...]
    """The pass that was planned for."""
    longest: int
    tokens: int
    recomputed: int
    """Layers whose activations are not kept but computed again in the backward pass."""
    chosen: bool
    """By the plan, because the recipe leaves it to us."""
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
    base: Quantization = "none"
    """What the frozen layers are kept in."""

    @property
    def activations(self) -> int:
        return self.working.total(self.tokens, self.recomputed)

    @property
    def total(self) -> int:
        kept = self.frozen + self.trained + self.gradients + self.moments + self.averages
        return kept + max(self.activations, self.stepping)

    @property
    def fits(self) -> bool:
        return self.total <= HEADROOM * self.room

    def with_least_recomputed(self) -> MemoryPlan:
        """The same with as few layers recomputed as fit, or, if it never does, with as many as save most."""
        every = [replace(self, recomputed=number, chosen=True) for number in range(self.working.layers + 1)]
        return next((one for one in every if one.fits), min(every, key=lambda one: one.total))

    @property
    def choice(self) -> str:
        """What is recomputed, and why."""
        layers = self.working.layers
        how = {0: "no layer recomputed", layers: f"all {layers} layers recomputed"}
        told = how.get(self.recomputed, f"{self.recomputed} of {layers} layers recomputed")
        if not self.chosen:
            return f"{told}, as the recipe says"
        if not self.fits:
            return f"{told}, which saves most and may not be enough"
        return f"{told}, the fewest that fit" if self.recomputed else f"{told}, since everything fits"

    def table(self) -> str:
        parts = {
            "frozen weights" if self.base == "none" else f"frozen, {self.base}": self.frozen,
            "trained weights": self.trained,
            "gradients": self.gradients,
            "optimizer": self.moments,
            "running mean": self.averages,
            "activations" if self.activations >= self.stepping else "optimizer step": max(
                self.activations, self.stepping
            ),
        }
        lines = [f"memory plan: {self.precision}, {self.tokens:,} tokens a pass, {self.choice}"]
        lines += [f"  {name:16}{size(count):>12}" for name, count in parts.items() if count]
        lines.append(f"  {'in all':16}{size(self.total):>12} of {size(self.room)}")
        return "\n".join(lines)


def plan(
    family: Family, recipe: Recipe, precision: Precision, device: torch.device, longest: Pass, world: int = 1
) -> MemoryPlan:
    """Everything one process holds at its peak, counted on the meta device."""
    model = family.load_model(dtype=precision.frozen, device="meta", text_head=recipe.needs_text_head)
    model = quantize(model, recipe.model.quantization, frozen_names(model, family, recipe.adapt), "meta")
    model = adapt(model, family, recipe.adapt, dtype=precision.trainable)
    # Families do not fold on Apple's devices, and cannot see from here where the model will be.
    fast = recipe.train.fused_lora and device.type != "mps"
    objective: Any = family.objective(model, label_smoothing=recipe.loss.label_smoothing, fast=fast).train()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = sum(parameter.numel() for parameter in learning)
    frozen, trained = _bytes([*objective.parameters(), *objective.buffers()]) - _bytes(learning), _bytes(learning)
    kept, stepping = _optimizer_bytes(recipe, precision)
    working = _activations(
        family,
        objective,
        partial(_Autocast, precision.frozen, _attention_on(device, precision)),
        spread(longest.sequences, SAMPLED),
        in_passing=_has_kernels(device) and (objective.folded or recipe.train.compile),
    )
    parts = world if recipe.adapt.mode == "full" else 1
    if parts > 1:
        # Shared out by FSDP: each process has its part, and puts two layers and what is around them together at a time.
        layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in family.layers(objective)]
        together = weights - sum(layers) + 2 * max(layers)
        frozen += together * precision.frozen.itemsize * parts
        # They come in the compute type already: nothing is cast and kept, however few the tokens.
        working = working.without_fixed()
    asked = layers_asked_for(recipe, working.layers)
    planned = MemoryPlan(
        precision=precision.name,
        sequences=longest.sequences,
        longest=longest.longest,
        tokens=sum(map(len, longest.sequences)),
        recomputed=asked or 0,
        chosen=False,
        frozen=frozen // parts,
        trained=trained // parts,
        gradients=trained // parts * (2 if world > parts else 1),  # DDP has a bucket beside every gradient
        moments=weights * kept // parts,
        averages=weights * 4 // parts if recipe.train.ema_decay is not None else 0,
        working=working,
        stepping=weights * stepping // parts if device.type != "cuda" else 0,
        room=room(device),
        world=world,
        base=recipe.model.quantization,
    )
    return planned if asked is not None else planned.with_least_recomputed()


def layers_asked_for(recipe: Recipe, layers: int) -> int | None:
    """How many of the layers `train.gradient_checkpointing` has recomputed; None where the plan is to choose."""
    asked = recipe.train.gradient_checkpointing
    words = {"auto": None, "none": 0, "full": layers}
    return words[asked] if isinstance(asked, str) else math.ceil(layers / asked)


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
    recomputed: int = 0
    """Layers that are recomputed with it, if they are not already."""

    def __call__(self, planned: MemoryPlan) -> MemoryPlan:
        recomputed = max(self.recomputed, planned.recomputed)
        return replace(planned, tokens=planned.tokens // self.fewer_tokens, recomputed=recomputed)


def ways_out(
    planned: MemoryPlan, recipe: Recipe, in_half_precision: Callable[[], MemoryPlan | None]
) -> Iterator[tuple[dict[str, Any], MemoryPlan]]:
    """Changes to the recipe that save memory, and the plans they lead to: what costs least comes first."""
    settings, data = recipe.train, recipe.data
    rows, budget = settings.micro_batch_size, data.row_tokens
    fewer = [_Change({"train.micro_batch_size": rows // n}, n) for n in range(2, rows + 1) if rows % n == 0]
    # Shorter rows, and so many more of them that a step learns from as much as before.
    halvings = int(math.log2(max(1, budget / planned.longest))) if data.pack else 0
    shorter = [
        _Change({"data.row_tokens": budget // n, "train.batch_size": settings.batch_size * n}, n)
        for n in (2**halving for halving in range(1, halvings + 1))
    ]
    layers = planned.working.layers
    full = _Change({"train.gradient_checkpointing": "full"}, recomputed=layers)
    every = [_Change({"train.gradient_checkpointing": n}, recomputed=math.ceil(layers / n)) for n in (4, 2)]
    recomputing = [change for change in (*every, full) if change.recomputed > planned.recomputed]
    pinned: dict[str, Any] = {}
    if planned.chosen and planned.recomputed:
        # The plan has filled the device, and was too hopeful. With fewer tokens it would recompute less and be so once
        # more: before anything else changes, what is recomputed is taken out of its hands.
        for change in recomputing:
            yield change.typed, change(planned)
        pinned, recomputing, planned = full.typed, [], full(planned)
    for change in (*fewer, *shorter, *recomputing):
        yield pinned | change.typed, change(planned)
    half = in_half_precision()
    if half is not None:
        half = full(half) if pinned else half
        yield pinned | {"train.precision": half.precision}, half
    # None of them alone: the most of each kind, one kind after another.
    starts: list[tuple[dict[str, Any], MemoryPlan]] = [(pinned, planned)]
    starts += [(pinned | {"train.precision": half.precision}, half)] if half is not None else []
    for typed, lighter in starts:
        for kind in (fewer, shorter, recomputing):
            if kind:
                typed, lighter = typed | kind[-1].typed, kind[-1](lighter)
                yield typed, lighter


def _no_way_out(planned: MemoryPlan) -> str:
    if planned.moments > planned.frozen:
        return "train a LoRA instead, --set adapt.mode=comprehensive, or use a device with more memory"
    if planned.precision == "fp32":
        smaller = "--set train.precision=auto"
    elif planned.base != "nf4":
        smaller = "--set model.quantization=nf4"
    else:
        smaller = "--set model.source=... for a smaller model"
    return f"{smaller}, or use a device with more memory"


def is_out_of_memory(error: RuntimeError) -> bool:
    """CUDA has a class for it; the CPU and MPS only a message."""
    told = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in told or "not enough memory" in told


def room(device: torch.device) -> int:
    """Memory that a training could get: what this process already holds for something else is not to be had."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        ours = free + torch.cuda.memory_reserved(device)
        # A process can be held to a part of its card: to share it, or to see how it would do on a smaller one.
        allowed = total * torch.cuda.get_per_process_memory_fraction(device)
        return int(min(ours, allowed)) - torch.cuda.memory_allocated(device) - SEGMENT
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
    family: Family,
    objective: nn.Module,
    autocast: Callable[[], _Autocast],
    sequences: Sequence[RenderedSequence],
    *,
    in_passing: bool,
) -> Activations:
    """Two passes, one twice the other, tell what grows with the tokens from what does not."""
    layers = len(family.layers(objective))
    tokens = sum(map(len, sequences))
    once, twice = (_kept(family, objective, autocast(), [*sequences] * times, in_passing) for times in (1, 2))
    lines = [Line(2 * low - high, (high - low) / tokens) for low, high in zip(once, twice, strict=True)]
    return Activations(layers, *lines)


def _kept(
    family: Family, objective: Any, autocast: _Autocast, sequences: Sequence[RenderedSequence], in_passing: bool
) -> tuple[float, ...]:
    """A pass over these, in which half of the layers are recomputed, as the lines of `Activations`."""
    learning = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.grad = torch.empty_like(parameter)
    known = [*objective.parameters(), *objective.buffers(), *(parameter.grad for parameter in learning)]
    ledger = _Ledger(known, in_passing)
    layers = family.layers(objective)
    objective.recompute = recomputed = len(layers) // 2
    marks: list[int] = []
    turning = 0

    def enter(*_: Any) -> None:
        nonlocal turning
        if len(marks) == len(layers) + 1:
            # Back at the first layer that is recomputed: from here on it is another peak.
            turning, ledger.most = ledger.most, ledger.alive
        marks.append(ledger.alive)
        # Torch leaves function modes behind when it goes backward, and layers are recomputed there.
        autocast.__enter__()  # type: ignore[no-untyped-call]

    def leave(module: nn.Module, *_: Any) -> None:
        autocast.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if module is layers[-1]:
            marks.append(ledger.alive)

    hooks = [layer.register_forward_pre_hook(enter) for layer in layers]
    # Torch stops recomputing, by an exception, as soon as it has all it wants.
    hooks += [layer.register_forward_hook(leave, always_call=True) for layer in layers]
    with ledger, autocast:
        torch.autograd.backward(objective(family.collate(sequences).to(torch.device("meta"))).sums.sum())
    for hook in hooks:
        hook.remove()
    # From one layer to the next, since what a layer was given may go when it is done. But for the last they are alike.
    at_last = len(layers) - 1
    last = marks[at_last + 1] - marks[at_last]
    if not recomputed:
        return ledger.most - last, last, last, last, ledger.most
    kept, in_whole = marks[recomputed] - marks[0], marks[at_last] - marks[recomputed]
    in_one = in_whole / (at_last - recomputed) if at_last > recomputed else last
    return turning - kept - in_whole - last, in_one, last, kept / recomputed, ledger.most - kept


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are alive, each storage once, and the most there were.

    With `in_passing` it looks only where matrices are multiplied: what is gone by then was never there.
    """

    def __init__(self, known: Iterable[torch.Tensor], in_passing: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.most = 0
        self.in_passing = in_passing
        self._storages: dict[int, Any] = {tensor.untyped_storage()._cdata: tensor for tensor in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor):
                self._note(tensor.untyped_storage())
        if not self.in_passing or func.overloadpacket.__name__ in PRODUCTS:
            self.most = max(self.most, self.alive)
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


class _Autocast(TorchFunctionMode):
    """What autocast and attention do to memory, for the meta device, which has no autocast and no fused kernels."""

    def __init__(self, dtype: torch.dtype, attention: _Attends) -> None:
        super().__init__()
        self.dtype, self.attention = dtype, attention
        self._cast: dict[torch.Tensor, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (F.linear, F.conv1d, F.conv2d) and self.dtype != torch.float32:
            args = tuple(self._in_dtype(arg) if torch.is_tensor(arg) else arg for arg in args)
        if func is F.scaled_dot_product_attention:
            return _Attention.apply(*args[:3], self.attention)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))

    def _in_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autocast casts a weight once and keeps that until it ends, whether or not its layer is recomputed."""
        if not (tensor.is_leaf and tensor.requires_grad and tensor.dtype != self.dtype):
            return tensor.to(self.dtype)
        if tensor not in self._cast:
            self._cast[tensor] = tensor.to(self.dtype)
        return self._cast[tensor]


_Attends = Literal["shared", "apart", "pairs"]


def _attention_on(device: torch.device, precision: Precision) -> _Attends:
    """With heads that share keys as they are; with a copy of the keys for each head, on cards before Ampere; or, in
    fp32 on a card, with a matrix of all pairs of positions."""
    if device.type != "cuda":
        return "shared"
    if precision.frozen == torch.float32:
        return "pairs"
    return "shared" if _is_ampere_or_later(device) else "apart"


def _has_kernels(device: torch.device) -> bool:
    """Whether what lies between two products of a fast layer is one kernel there, and leaves nothing but its result."""
    return device.type == "cuda" and _is_ampere_or_later(device)


def _is_ampere_or_later(device: torch.device) -> bool:
    """Of a card; one that is only imagined is a new one."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= BF16_CAPABILITY


class _Attention(torch.autograd.Function):
    """Keeps what attention keeps: its inputs, its output, and a number per head and position, or per pair of them."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: _Attends) -> torch.Tensor:
        ctx.shapes = (q.shape, k.shape, v.shape)
        out = torch.empty_like(q)
        if how == "apart":
            k, v = torch.empty_like(q), torch.empty_like(q)
        pairs = (*q.shape[:-1], k.shape[-2] if how == "pairs" else 1)
        ctx.save_for_backward(q, k, v, out, q.new_empty(pairs, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients; those of queries are summed in fp32, those of keys that heads share for each head apart."""
        q, *_, pairs = ctx.saved_tensors
        scratch = [q.new_empty(q.shape, dtype=torch.float32), torch.empty_like(q), torch.empty_like(q), pairs.clone()]
        gradients = [q.new_empty(shape) for shape in ctx.shapes]
        del scratch
        return (*gradients, None)
