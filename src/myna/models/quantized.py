"""Quantized frozen linear layers: fp8, int8 and nf4.

A LoRA training only reads most of a model. `model.quantization` says how those weights are stored: fp8, multiplied as
such, for speed; int8 or nf4, dequantized for every product, for memory. Heads and embeddings are not quantized.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import nn

from myna.core.compat import scaled_mm
from myna.core.config import Quantization
from myna.core.errors import ConfigError

E4M3 = torch.float8_e4m3fn
FP8_CAPABILITY = (8, 9)
"""First compute capability with fp8 tensor cores."""
FP8_ALIGNMENT = 16
"""Number that both sides of an fp8 weight must be multiples of."""

NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Sixteen levels of QLoRA: quantiles of a normal distribution."""
NF4_BLOCK_SIZE = 64
"""Number of weights that share a scale in NF4."""
NF4_SCALE_GROUP_SIZE = 256
"""Number of blocks whose scales are quantized to 8 bits, relative to the largest of them."""


class _FrozenMatmul(torch.autograd.Function):
    """Product with a frozen weight; no tensor is saved for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: "QuantizedLinear") -> torch.Tensor:
        ctx.layer = layer
        return layer.matmul(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.layer.matmul_backward(dy), None


class QuantizedLinear(nn.Linear):
    """Linear layer whose weight W (outputs, inputs) is packed into non-persistent buffers. As an `nn.Linear` it is
    wrapped by PEFT like any other. Its `weight` is empty and only carries device and compute type, so that multiplying
    by it fails."""

    kind: ClassVar[str]
    codes: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)  # the constructor of nn.Linear would allocate a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
        self.bias = linear.bias
        if linear.bias is not None:
            linear.bias.requires_grad_(False)

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear) -> Self:
        """Quantize a layer on its device; on the meta device the result has the right shapes and sizes."""
        layer = cls(linear)
        for name, tensor in layer._pack(linear.weight.detach()).items():
            layer.register_buffer(name, tensor, persistent=False)
        return layer

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def drop_backward(self) -> None:
        """Free buffers that only a backward pass needs."""

    def weight_sample(self) -> torch.Tensor:
        """Return a few numbers that identify the weight."""
        return self.codes.flatten()[:16].float()

    @abstractmethod
    def _pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the weight as buffers."""

    @abstractmethod
    def _unpack(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the weight in the compute type, with this scale in place of `self.scale`."""

    def dequantize(self) -> torch.Tensor:
        return self._unpack(self.scale)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W', without autograd and without bias."""
        return F.linear(x, self.dequantize())

    def matmul_backward(self, dy: torch.Tensor) -> torch.Tensor:
        """Return dy W, without autograd. Adding an empty sum (0) makes the unpacked weight depend on dy, so a compiler
        cannot reuse and keep the forward's copy."""
        return dy @ self._unpack(self.scale + dy[..., :0].sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _FrozenMatmul.apply(x.to(self.dtype), self)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kind={self.kind}"


class Fp8Linear(QuantizedLinear):
    """fp8 (e4m3) weight with a scale per row; inputs and gradients are quantized row by row. Forward and backward sum
    over different sides of W, and a scale must stay outside the sum, so W and its transpose are both stored, each with
    its own row scales. That takes as much memory as bf16; the gain is speed."""

    kind = "fp8"
    codes_back: torch.Tensor
    scale_back: torch.Tensor
    native_fp8: bool
    """Whether the device multiplies fp8. Elsewhere the same values are multiplied in fp32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.native_fp8 = self._has_native_fp8()

    def _pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        # Scales are powers of two, so that layers can be joined under one scale without rounding again.
        codes, scale = _quantize_rows(weight, powers_of_two=True)
        codes_back, scale_back = _quantize_rows(weight.t(), powers_of_two=True)
        return {"codes": codes, "scale": scale, "codes_back": codes_back, "scale_back": scale_back}

    def drop_backward(self) -> None:
        self.codes_back, self.scale_back = self.codes_back[:0].clone(), self.scale_back[:0].clone()

    def _unpack(self, scale: torch.Tensor) -> torch.Tensor:
        return (self.codes.float() * scale).to(self.dtype)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self.codes, self.scale)

    def matmul_backward(self, dy: torch.Tensor) -> torch.Tensor:
        return self._multiply(dy, self.codes_back, self.scale_back)

    def weight_sample(self) -> torch.Tensor:
        # Layers may have been joined under one scale since, which leaves the largest value of a row unchanged.
        return self.codes[:16].float().abs().amax(1) * self.scale[:16, 0]

    def _multiply(self, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        x8, x_scale = _quantize_rows(x.reshape(-1, codes.shape[1]))
        if self.native_fp8 and len(x8):
            # bf16 is the only output type with row scales.
            y = scaled_mm(x8, codes.t(), scale_a=x_scale, scale_b=scale.t(), out_dtype=torch.bfloat16)
        else:
            y = (x8.float() @ codes.float().t()) * x_scale * scale.t()
        return y.to(self.dtype).view(*x.shape[:-1], len(codes))

    def _has_native_fp8(self) -> bool:
        aligned = self.in_features % FP8_ALIGNMENT == self.out_features % FP8_ALIGNMENT == 0
        # A plan on the meta device is for a GPU that can.
        return aligned and (self.weight.is_meta or supports_fp8(self.weight.device))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.native_fp8 = self._has_native_fp8()
        return self


class Int8Linear(QuantizedLinear):
    """int8 weight with a scale per row: half the memory of bf16, dequantized for every product."""

    kind = "int8"

    def _pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        # The scale is in the compute type, so that the codes compensate its rounding.
        scale = _nonzero(weight.abs().amax(1, keepdim=True) / 127)
        codes = (weight.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
        return {"codes": codes, "scale": scale}

    def _unpack(self, scale: torch.Tensor) -> torch.Tensor:
        return self.codes.to(self.dtype) * scale


class Nf4Linear(QuantizedLinear):
    """QLoRA's nf4 weight: a quarter of the memory of bf16, dequantized for every product. A weight is the nearest of
    sixteen levels times the absmax of its block, which is itself quantized to 8 bits. Blocks run through the rows, and
    the last one is zero-padded."""

    kind = "nf4"
    block_scales: torch.Tensor
    """(groups, 256): absmax of each block, in 255ths of its group's absmax, which `scale` holds."""
    level_pairs: torch.Tensor
    """(256, 2): the two levels that a byte encodes."""

    def _pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        levels = torch.tensor(NF4_LEVELS, device=weight.device)
        flat = weight.float().flatten()
        blocks = F.pad(flat, (0, -len(flat) % NF4_BLOCK_SIZE)).view(-1, NF4_BLOCK_SIZE)
        largest = blocks.abs().amax(1)
        middles = (levels[1:] + levels[:-1]) / 2
        nearest = torch.bucketize(blocks / _nonzero(largest)[:, None], middles, out_int32=True)
        groups = F.pad(largest, (0, -len(largest) % NF4_SCALE_GROUP_SIZE)).view(-1, NF4_SCALE_GROUP_SIZE)
        scale = groups.amax(1, keepdim=True) / 255
        return {
            "codes": (nearest[:, ::2] << 4 | nearest[:, 1::2]).to(torch.uint8).flatten(),
            "scale": scale,
            "block_scales": (groups / _nonzero(scale)).round().to(torch.uint8),
            "level_pairs": torch.cartesian_prod(levels, levels).to(weight.dtype),
        }

    def _unpack(self, scale: torch.Tensor) -> torch.Tensor:
        blocks = self.level_pairs.index_select(0, self.codes.int()).view(-1, NF4_BLOCK_SIZE)
        weight = blocks.mul_(self.block_absmax(scale)[: len(blocks), None]).flatten()
        return weight[: self.out_features * self.in_features].view(self.out_features, self.in_features)

    def block_absmax(self, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Return the absmax of each block, and of the padding after the last one, in the compute type."""
        return (self.block_scales * (self.scale if scale is None else scale)).to(self.dtype).flatten()


QUANTIZED_LINEARS: dict[str, type[QuantizedLinear]] = {kind.kind: kind for kind in (Fp8Linear, Int8Linear, Nf4Linear)}


def quantize(model: nn.Module, kind: Quantization, names: Iterable[str], device: torch.device | str) -> nn.Module:
    """Quantize linear layers one by one, to limit peak memory, and move the model to the device."""
    if kind == "none":
        return model
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear), name
        model.set_submodule(name, QUANTIZED_LINEARS[kind].from_linear(linear.to(device)))
    return model.to(device)


def quantized_linears(model: nn.Module) -> Iterator[QuantizedLinear]:
    return (module for module in model.modules() if isinstance(module, QuantizedLinear))


def check_quantization(kind: Quantization, device: torch.device) -> None:
    """Refuse fp8 on a device that would emulate it slowly."""
    if kind == "fp8" and not supports_fp8(device):
        first = ".".join(map(str, FP8_CAPABILITY))
        raise ConfigError(
            f"`model.quantization: fp8` needs a GPU with 8-bit products (CUDA capability {first}), this is {device}",
            hint="--set model.quantization=nf4 for the least memory, or int8, or none",
        )


def supports_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def _quantize_rows(x: torch.Tensor, powers_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp8 codes and a scale per row. A row that is not finite becomes NaN, so that overflows are detected."""
    scale = _nonzero(x.abs().amax(-1, keepdim=True).float() / torch.finfo(E4M3).max)
    if powers_of_two:
        scale = torch.exp2(scale.log2().ceil())
    return (x.float() / scale).to(E4M3).contiguous(), scale


def _nonzero(x: torch.Tensor) -> torch.Tensor:
    """Clamp scales to the smallest normal number, so that they can be divided by."""
    return x.clamp(min=torch.finfo(x.dtype).tiny)
