"""Activation memory of a training step, measured on the meta device.

The objective runs forward and backward on tensors with shapes but no contents, while the bytes of live tensors are
counted. That takes seconds for a model of any size.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from myna.core.compat import TorchDispatchMode, storage_id, tree_leaves
from myna.models.base import Batch, Family, RenderedSequence
from myna.train.precision import BF16_CAPABILITY, Precision

MATMUL_OPS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2"})
"""Operations of torch that fused kernels never include."""


class LinearBytes(NamedTuple):
    """Bytes as a linear function of the tokens. The fixed part is mostly weights, cast once for any number of them."""

    fixed: float
    per_token: float

    def at(self, tokens: int) -> float:
        return self.fixed + tokens * self.per_token


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
    """Memory that one layer saves."""
    last: LinearBytes
    """Memory that the last layer saves, which may skip unsupervised positions."""
    layer_input: LinearBytes
    """Memory kept for a layer that is recomputed: its input."""
    recomputing: LinearBytes
    """Memory of a layer during its recomputation, with the gradients inside it."""

    def total(self, tokens: int, recomputed: int) -> int:
        outside, layer, last, layer_input, recomputing = (part.at(tokens) for part in self[1:])
        saved = self.layers - recomputed
        first_peak = outside + (last + (saved - 1) * layer if saved else 0) + recomputed * layer_input
        return int(max(first_peak, recomputing + recomputed * layer_input) if recomputed else first_peak)

    def without_fixed(self) -> ActivationMemory:
        """Return the part that grows with the tokens."""
        return ActivationMemory(self.layers, *(LinearBytes(0.0, part.per_token) for part in self[1:]))


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
    fused_kernels = device.type == "cuda" and _is_ampere_or_later(device) and (objective.fused or compiled)
    attention = _attention_kind(device, precision)
    tokens = sum(map(len, sequences))
    once, twice = (
        _run(
            family,
            objective,
            _MetaAutocast(precision.compute_dtype, attention),
            family.collate([*sequences] * times),
            fused_kernels,
        )
        for times in (1, 2)
    )
    parts = [LinearBytes(2 * low - high, (high - low) / tokens) for low, high in zip(once, twice, strict=True)]
    return ActivationMemory(len(family.layers(objective)), *parts)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' memory, views counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage_id(storage): storage.nbytes() for storage in storages}.values())


def _run(
    family: Family, objective: Any, autocast: _MetaAutocast, batch: Batch, fused_kernels: bool
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
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor):
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

    def __init__(self, dtype: torch.dtype, attention: _AttentionKind) -> None:
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


def _attention_kind(device: torch.device, precision: Precision) -> _AttentionKind:
    if device.type != "cuda":
        return "grouped"
    if precision.compute_dtype == torch.float32:
        return "math"
    return "grouped" if _is_ampere_or_later(device) else "expanded"


def _is_ampere_or_later(device: torch.device) -> bool:
    """Whether a GPU is Ampere or later. A plan for a GPU that is not here assumes a new one."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= BF16_CAPABILITY


class _MetaAttention(torch.autograd.Function):
    """Attention that saves as much memory as the real one: inputs, output, and a number per head and position or
    pair."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: _AttentionKind) -> torch.Tensor:
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
