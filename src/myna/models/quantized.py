"""Linear layers that do not learn, kept in fewer bits.

Under a LoRA most of a model is only read. `model.quantization` says in what: 8-bit floats that are multiplied as such
(fp8, for speed), 8-bit integers (int8) or four bits a weight (nf4), both for room. Heads and embeddings stay as they came.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import nn

from myna.config import Quantization
from myna.errors import ConfigError

E4M3 = torch.float8_e4m3fn
FP8_CAPABILITY = (8, 9)
"""The first compute capability that multiplies 8-bit floats."""
FP8_ALIGNMENT = 16
"""What both sides of a weight must be multiples of, or the card does not multiply it in 8 bits."""

NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""QLoRA's sixteen levels: about as many weights of a normal distribution fall to each."""
BLOCK = 64
"""Weights that share a scale in NF4."""
GROUP = 256
"""Blocks whose scales are kept in 8 bits, in relation to the largest of them."""


class _Product(torch.autograd.Function):
    """A product with a weight that has no gradient. Nothing is kept for the backward pass but the layer itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
        ctx.layer = layer
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.layer.product_back(dy), None


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight W (outputs, inputs) is packed into buffers, which no checkpoint carries.

    It is an `nn.Linear`, so PEFT wraps it like any other. Its `weight` is empty: it only tells device and compute type,
    and whoever would multiply by it meets a wrong shape instead of a wrong number.
    """

    kind: ClassVar[str]
    codes: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which would allocate a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
        self.bias = linear.bias
        if linear.bias is not None:
            linear.bias.requires_grad_(False)

    @classmethod
    @torch.no_grad()
    def of(cls, linear: nn.Linear) -> Self:
        """Quantise a layer, where it is. On the meta device only shapes come out, of the right size."""
        layer = cls(linear)
        for name, tensor in layer._pack(linear.weight.detach()).items():
            layer.register_buffer(name, tensor, persistent=False)
        return layer

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return self.weight.dtype

    @property
    def packed(self) -> list[torch.Tensor]:
        """What stands for the weight."""
        return list(self.buffers(recurse=False))

    def known_by(self) -> torch.Tensor:
        """A few numbers that tell this weight from another."""
        return self.codes.flatten()[:16].float()

    @abstractmethod
    def _pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The weight as buffers."""

    @abstractmethod
    def _unpack(self, scale: torch.Tensor) -> torch.Tensor:
        """The weight, in the compute type, from the other buffers and this in place of `self.scale`."""

    def plain(self) -> torch.Tensor:
        """The weight that is multiplied by, in the compute type."""
        return self._unpack(self.scale)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x W', without autograd and without bias."""
        return F.linear(x, self.plain())

    def product_back(self, dy: torch.Tensor) -> torch.Tensor:
        """dy W, without autograd.

        Left to itself a compiler sees that both passes unpack the same weight, and keeps the forward pass's for the
        backward pass, of every layer at once. A weight that hangs on dy cannot be there earlier: a sum over nothing is
        a zero that costs nothing.
        """
        return dy @ self._unpack(self.scale + dy[..., :0].sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Product.apply(x.to(self.dtype), self)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kind={self.kind}"


class Fp8Linear(QuantizedLinear):
    """8-bit floats (e4m3) with a scale per row, multiplied as such; inputs and gradients become such row by row.

    Forward and backward sum over different sides of W, and a scale can only stand outside the sum, so W and its
    transpose are both kept, each scaled by its own rows. That takes as much room as bf16; what it gains is speed.
    """

    kind = "fp8"
    codes_back: torch.Tensor
    scale_back: torch.Tensor
    multiplies: bool
    """Whether the device multiplies these numbers itself. Elsewhere the same numbers are multiplied in fp32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.multiplies = self._can_multiply()

    def _pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        # Powers of two, so that layers can be put together under one scale without rounding them again.
        codes, scale = _by_rows(weight, powers_of_two=True)
        codes_back, scale_back = _by_rows(weight.t(), powers_of_two=True)
        return {"codes": codes, "scale": scale, "codes_back": codes_back, "scale_back": scale_back}

    def _unpack(self, scale: torch.Tensor) -> torch.Tensor:
        return (self.codes.float() * scale).to(self.dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self.codes, self.scale)

    def product_back(self, dy: torch.Tensor) -> torch.Tensor:
        return self._multiply(dy, self.codes_back, self.scale_back)

    def known_by(self) -> torch.Tensor:
        # Layers may have been put together under one scale since: the largest of a row stays what it was.
        return self.codes[:16].float().abs().amax(1) * self.scale[:16, 0]

    def _multiply(self, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """x times the transpose of what the codes stand for."""
        x8, x_scale = _by_rows(x.reshape(-1, codes.shape[1]))
        if self.multiplies and len(x8):
            y = torch._scaled_mm(
                x8,
                codes.t(),
                scale_a=x_scale,
                scale_b=scale.t(),
                out_dtype=torch.bfloat16,  # the only type that comes out where rows have scales
                use_fast_accum=True,
            )
        else:
            y = (x8.float() @ codes.float().t()) * x_scale * scale.t()
        return y.to(self.dtype).view(*x.shape[:-1], len(codes))

    def _can_multiply(self) -> bool:
        aligned = self.in_features % FP8_ALIGNMENT == self.out_features % FP8_ALIGNMENT == 0
        # Shapes without contents stand for a device that can.
        return aligned and (self.weight.is_meta or multiplies_fp8(self.weight.device))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.multiplies = self._can_multiply()
        return self


class Int8Linear(QuantizedLinear):
    """8-bit integers with a scale per row, half the room of bf16, turned into the compute type for every product."""

    kind = "int8"

    def _pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        # In the compute type already, so that the codes make up for its rounding.
        scale = _not_zero(weight.abs().amax(1, keepdim=True) / 127)
        codes = (weight.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
        return {"codes": codes, "scale": scale}

    def _unpack(self, scale: torch.Tensor) -> torch.Tensor:
        return self.codes.to(self.dtype) * scale


class Nf4Linear(QuantizedLinear):
    """QLoRA's four bits a weight, a quarter of the room of bf16, turned back into the compute type for every product.

    A weight is the nearest of sixteen levels times the largest of its block, and that is kept in 8 bits in its turn.
    Blocks run through the rows, and the last one is filled up with zeros.
    """

    kind = "nf4"
    shares: torch.Tensor
    """(groups, 256): the largest of each block, in 255ths of the largest of its group, which is what `scale` holds."""
    pairs: torch.Tensor
    """(256, 2): the two levels a byte stands for."""

    def _pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        levels = torch.tensor(NF4_LEVELS, device=weight.device)
        flat = weight.float().flatten()
        blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        largest = blocks.abs().amax(1)
        middles = (levels[1:] + levels[:-1]) / 2
        nearest = torch.bucketize(blocks / _not_zero(largest)[:, None], middles, out_int32=True)
        groups = F.pad(largest, (0, -len(largest) % GROUP)).view(-1, GROUP)
        scale = groups.amax(1, keepdim=True) / 255
        return {
            "codes": (nearest[:, ::2] << 4 | nearest[:, 1::2]).to(torch.uint8).flatten(),
            "scale": scale,
            "shares": (groups / _not_zero(scale)).round().to(torch.uint8),
            "pairs": torch.cartesian_prod(levels, levels).to(weight.dtype),
        }

    def _unpack(self, scale: torch.Tensor) -> torch.Tensor:
        blocks = self.pairs.index_select(0, self.codes.int()).view(-1, BLOCK)
        largest = (self.shares * scale).to(self.dtype).view(-1, 1)[: len(blocks)]
        weight = blocks.mul_(largest).flatten()
        return weight[: self.out_features * self.in_features].view(self.out_features, self.in_features)


KINDS: dict[str, type[QuantizedLinear]] = {kind.kind: kind for kind in (Fp8Linear, Int8Linear, Nf4Linear)}


def quantize(model: nn.Module, kind: Quantization, names: Iterable[str], device: torch.device | str) -> nn.Module:
    """Keep the linear layers of these names in fewer bits, and bring the model to the device.

    One layer after another: neither here nor there is there ever more than the model and one weight. With `compute`
    the model stays as it is, and where it is.
    """
    if kind == "none":
        return model
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), name
        model.set_submodule(name, KINDS[kind].of(linear.to(device)))
    return model.to(device)


def frozen_linears(model: nn.Module) -> Iterator[QuantizedLinear]:
    return (module for module in model.modules() if isinstance(module, QuantizedLinear))


def check_quantization(kind: Quantization, device: torch.device) -> None:
    """Refuse what the device would only imitate, and slowly."""
    if kind == "fp8" and not multiplies_fp8(device):
        first = ".".join(map(str, FP8_CAPABILITY))
        raise ConfigError(
            f"`model.quantization: fp8` needs a GPU with 8-bit products (CUDA capability {first}), this is {device}",
            hint="--set model.quantization=nf4 for the least memory, or int8, or none",
        )


def multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def _by_rows(x: torch.Tensor, powers_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers as 8-bit floats, and a scale per row that makes its largest number their largest, or near it.

    What is not finite stays so: the row becomes not a number, and whoever looks for overflows finds one.
    """
    scale = _not_zero(x.abs().amax(-1, keepdim=True).float() / torch.finfo(E4M3).max)
    if powers_of_two:
        scale = torch.exp2(scale.log2().ceil())
    return (x.float() / scale).to(E4M3).contiguous(), scale


def _not_zero(x: torch.Tensor) -> torch.Tensor:
    """Numbers to divide by: what is all zeros stays so, and no gradient is too small to have a scale."""
    return x.clamp(min=torch.finfo(x.dtype).tiny)
