"""Matrix products with a LoRA folded in.

Linear layers that read the same input form a group, and a group is one product. For an input x, frozen weights W and
adapters A and B,

    y = [x, x A'] [W, B]'        and backwards        dx = [dy, dy B] [W; A]

so that the adapters cost no pass over x or y of their own. No gradient of W is ever formed. Where W is multiplied in 8
bits, so are the adapters, but with each of their numbers in two parts, since plain layers do not round them so: see
`FP8_PARTS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from myna.models.higgs_v2.fused import ops
from myna.models.higgs_v2.fused.ops import FP8_PARTS, Copy, PackedInput
from myna.models.quantized import Fp8Linear, QuantizedLinear, multiplies_fp8

FOLD_ALIGNMENT = 16
"""Columns of the folded part come in multiples of this, or the product leaves the card's fast path."""
ROW_ALIGNMENT = 64
"""Rows begin at multiples of this many numbers, for the same reason."""
SCALE_ALIGNMENT = 16
"""In bytes, of where the scales of fp8 rows begin."""
FP8_ROOM = 64
"""How many times larger than the largest weight of its row a B may grow before fp8 cuts it off. That costs next to
nothing: these are floats, with many more binades below the weights that count."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """PEFT's LoRA of one linear layer, and its place in its group."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    outputs: slice
    low: slice
    """Its columns among those of the group's adapters."""


class Group(nn.Module):
    """Linear layers of one input, as PEFT has adapted them, computed together."""

    folded: torch.Tensor
    low: torch.Tensor
    """(fold, inputs): A of every adapter."""
    high: torch.Tensor
    """(outputs, fold): B of every adapter times its scale, each in its own rows and columns."""

    def __init__(self, linears: Sequence[Any], fold: int) -> None:
        super().__init__()
        bases = [linear.get_base_layer() if isinstance(linear, LoraLayer) else linear for linear in linears]
        self.inputs: int = bases[0].in_features
        self.outputs: int = sum(base.out_features for base in bases)
        self.adapters: list[Adapter] = []
        row, low = 0, 0
        for linear, base in zip(linears, bases, strict=True):
            rows = slice(row, row + base.out_features)
            if isinstance(linear, LoraLayer):
                name = linear.active_adapters[0]
                a, b = linear.lora_A[name].weight, linear.lora_B[name].weight
                self.adapters.append(Adapter(a, b, linear.scaling[name], rows, slice(low, low + len(a))))
                low += len(a)
            row += base.out_features
        self.fold = fold
        self._take(bases)

    def _take(self, bases: Sequence[nn.Linear]) -> None:
        """W, B and A lie in one buffer, W at its top left, B to the right of it and A below: both products read it as
        it stands. transformers' own weights become views of it, so that nothing is held twice."""
        height, width = self.outputs + self.fold, self.inputs + self.fold
        folded = bases[0].weight.new_zeros(height, width + -width % ROW_ALIGNMENT)[:, :width]
        row = 0
        for base in bases:
            slot = folded[row : row + base.out_features, : self.inputs]
            slot.copy_(base.weight.data)
            base.weight.data = slot
            row += base.out_features
        self.register_buffer("folded", folded, persistent=False)
        self.low, self.high = folded[self.outputs :, : self.inputs], folded[: self.outputs, self.inputs :]

    @property
    def trained(self) -> list[torch.Tensor]:
        """A and B of every adapter, in the order of `gradients`."""
        return [part for adapter in self.adapters for part in (adapter.a, adapter.b)]

    def copies(self) -> Iterator[Copy]:
        """What has to follow every change of the adapters."""
        for adapter in self.adapters:
            yield Copy(adapter.a, self.low[adapter.low])
            yield Copy(adapter.b, self.high[adapter.outputs, adapter.low], adapter.scale)

    def room(self, like: torch.Tensor, width: int) -> PackedInput:
        """For `width` numbers, inputs or output gradients, in as many rows as another tensor has: to be written."""
        whole = width + self.fold
        buffer = like.new_empty(len(like), whole + -whole % ROW_ALIGNMENT)[:, :whole]
        return PackedInput(buffer[:, :width], buffer[:, width:], buffer)

    def around(self, x: torch.Tensor) -> PackedInput:
        """For numbers that are there already."""
        wide = self.room(x, x.shape[1])
        ops.copy(x, wide)
        return wide

    def project(self, wide: PackedInput, out: torch.Tensor) -> None:
        """(rows, inputs) -> (rows, outputs)."""
        if self.fold:
            torch.mm(wide.x, self.low.t(), out=wide.low)
        self._product(wide, out)

    def back(self, d: PackedInput, out: torch.Tensor) -> None:
        """(rows, outputs) -> (rows, inputs)."""
        self.project_back(d)
        self._product_back(d, out)

    def project_back(self, d: PackedInput) -> None:
        """All of `back` that the gradients of the adapters need."""
        if self.fold:
            torch.mm(d.x, self.high, out=d.low)

    def gradients(self, wide: PackedInput, d: PackedInput) -> list[torch.Tensor]:
        """Of A and B of every adapter, after `project` and `project_back`."""
        found = []
        if self.adapters:
            a = _product_as(self.adapters[0].a.dtype, d.low.t(), wide.x)
            for adapter in self.adapters:
                b = _product_as(adapter.b.dtype, d.x[:, adapter.outputs].t(), wide.low[:, adapter.low])
                found += [a[adapter.low], b.mul_(adapter.scale) if adapter.scale != 1 else b]
        return found

    def _product(self, wide: PackedInput, out: torch.Tensor) -> None:
        assert wide.whole is not None
        torch.mm(wide.whole, self.folded[: self.outputs].t(), out=out)

    def _product_back(self, d: PackedInput, out: torch.Tensor) -> None:
        assert d.whole is not None
        torch.mm(d.whole, self.folded[:, : self.inputs], out=out)


class UnpackedGroup(Group):
    """Of layers kept in fewer bits: the same buffer, put together for one product and gone after it."""

    def _take(self, bases: Sequence[nn.Linear]) -> None:
        # In a list, out of sight of `parameters()`: the model holds them already.
        self._bases = cast(list[QuantizedLinear], list(bases))
        self._hold_adapters()

    def _hold_adapters(self) -> None:
        like = self._bases[0].weight
        self.register_buffer("low", like.new_zeros(self.fold, self.inputs), persistent=False)
        self.register_buffer("high", like.new_zeros(self.outputs, self.fold), persistent=False)

    def _unpacked(self) -> torch.Tensor:
        height, width = self.outputs + self.fold, self.inputs + self.fold
        folded = self.low.new_empty(height, width + -width % ROW_ALIGNMENT)[:, :width]
        torch.cat([base.plain() for base in self._bases], out=folded[: self.outputs, : self.inputs])
        folded[: self.outputs, self.inputs :] = self.high
        folded[self.outputs :, : self.inputs] = self.low
        return folded

    def _product(self, wide: PackedInput, out: torch.Tensor) -> None:
        assert wide.whole is not None
        torch.mm(wide.whole, self._unpacked()[: self.outputs].t(), out=out)

    def _product_back(self, d: PackedInput, out: torch.Tensor) -> None:
        assert d.whole is not None
        torch.mm(d.whole, self._unpacked()[:, : self.inputs], out=out)


class Fp8Group(UnpackedGroup):
    """Of layers kept and multiplied as 8-bit floats, the folded part too: W and the parts of B lie in one such buffer,
    W' and the parts of A' in another. The products with A and B alone, and what becomes of their gradients, are in the
    compute type."""

    codes: torch.Tensor
    """(outputs, inputs + FP8_PARTS * fold)"""
    scale: torch.Tensor
    """(outputs, 1)"""
    codes_back: torch.Tensor
    """(inputs, outputs + FP8_PARTS * fold)"""
    scale_back: torch.Tensor
    """(inputs, 1)"""

    def _take(self, bases: Sequence[nn.Linear]) -> None:
        super()._take(bases)
        layers = cast(list[Fp8Linear], self._bases)
        self._join("codes", "scale", self.outputs, self.inputs, layers, dim=0)
        self._join("codes_back", "scale_back", self.inputs, self.outputs, layers, dim=1)

    def _join(self, codes: str, scale: str, rows: int, columns: int, layers: Sequence[Fp8Linear], dim: int) -> None:
        """One buffer for the layers' codes, which become views of it. Scales are powers of two, so that nothing is
        rounded again, and larger than W needs by `FP8_ROOM`."""
        scales = [getattr(layer, scale) for layer in layers]
        largest = torch.cat(scales) if dim == 0 else torch.stack(scales).amax(0)
        common = FP8_ROOM * torch.exp2(largest.log2().ceil())
        joined = getattr(layers[0], codes).new_zeros(rows, columns + FP8_PARTS * self.fold)
        start = 0
        for layer, own in zip(layers, scales, strict=True):
            place = slice(start, start + layer.out_features)
            part, its = (joined[place, :columns], common[place]) if dim == 0 else (joined[:, place], common)
            part.copy_(getattr(layer, codes).float() * (own / its))
            setattr(layer, codes, part)
            setattr(layer, scale, its)
            start += layer.out_features
        self.register_buffer(codes, joined, persistent=False)
        self.register_buffer(scale, common, persistent=False)

    def copies(self) -> Iterator[Copy]:
        yield from super().copies()
        high = self.codes[:, self.inputs :].view(self.outputs, FP8_PARTS, self.fold)
        low = self.codes_back[:, self.outputs :].view(self.inputs, FP8_PARTS, self.fold)
        for adapter in self.adapters:
            b = high[adapter.outputs, :, adapter.low].transpose(0, 1)
            yield Copy(adapter.b, b, adapter.scale, self.scale[adapter.outputs], along=0)
            yield Copy(adapter.a, low[:, :, adapter.low].permute(1, 2, 0), 1.0, self.scale_back, along=1)

    def room(self, like: torch.Tensor, width: int) -> PackedInput:
        return self._coded(like.new_empty(len(like), width))

    def around(self, x: torch.Tensor) -> PackedInput:
        # Nothing is copied: it is the codes that must lie side by side.
        wide = self._coded(x.contiguous())
        ops.copy(x, wide)
        return wide

    def _coded(self, x: torch.Tensor) -> PackedInput:
        rows, width = x.shape
        codes = x.new_empty(rows, width + FP8_PARTS * self.fold, dtype=self.codes.dtype)
        return PackedInput(x, x.new_empty(rows, self.fold), None, codes, x.new_empty(rows, 1, dtype=torch.float32))

    def _product(self, wide: PackedInput, out: torch.Tensor) -> None:
        _multiply_fp8(wide, self.codes, self.scale, out)

    def _product_back(self, d: PackedInput, out: torch.Tensor) -> None:
        _multiply_fp8(d, self.codes_back, self.scale_back, out)


def _multiply_fp8(wide: PackedInput, codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Rows and their projections as fp8, times the transpose of what the codes stand for."""
    ops.fold_in(wide)
    assert wide.codes is not None and wide.scale is not None
    if multiplies_fp8(out.device) and len(out):
        # The card rounds to bf16, and only to bf16, where rows have scales.
        y = out if out.dtype == torch.bfloat16 else out.new_empty(out.shape, dtype=torch.bfloat16)
        # Nor does it take scales that begin anywhere, as those of the second modality may.
        aligned = wide.scale.data_ptr() % SCALE_ALIGNMENT == 0
        scales = {"scale_a": wide.scale if aligned else wide.scale.clone(), "scale_b": scale.t()}
        torch._scaled_mm(wide.codes, codes.t(), **scales, out_dtype=y.dtype, use_fast_accum=True, out=y)
    else:
        y = (wide.codes.float() @ codes.float().t()) * wide.scale * scale.t()
    if y is not out:
        out.copy_(y)


def make_group(linears: Sequence[Any], *alike: Sequence[Any]) -> Group:
    """The group for layers as they are kept. It leaves as much room for adapters as the largest of those `alike` needs,
    so that rows of either can lie in one buffer."""
    base = linears[0].get_base_layer() if isinstance(linears[0], LoraLayer) else linears[0]
    fold = max(_columns(group) for group in (linears, *alike))
    if isinstance(base, Fp8Linear):
        return Fp8Group(linears, fold)
    return (UnpackedGroup if isinstance(base, QuantizedLinear) else Group)(linears, fold)


def _columns(linears: Sequence[Any]) -> int:
    """Of all adapters together, aligned."""
    ranks: int = sum(linear.r[linear.active_adapters[0]] for linear in linears if isinstance(linear, LoraLayer))
    return ranks + -ranks % FOLD_ALIGNMENT


def _product_as(dtype: torch.dtype, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A product in the type of the parameter it is a gradient of; the card's own sums are fp32 already."""
    if one.is_cuda and one.dtype != dtype == torch.float32:
        return torch.mm(one, other, out_dtype=dtype)
    return (one @ other).to(dtype)
