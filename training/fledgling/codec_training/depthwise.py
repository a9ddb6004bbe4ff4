"""Depthwise convolutions of the codec's blocks, in the implementation that is faster on the device at hand.

Library kernels for depthwise convolutions are good on one GPU and many times slower than a copy on the next, above all
in the backward pass. Written as a sum over shifted copies, they are plain passes over memory and need no transposes.
Which is faster is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from myna.models.mel_codec import ConvNeXtBlock

WARM_UP_RUNS, TIMED_RUNS = 3, 10
MIN_COMPILED_GAIN = 0.75
"""Compiled blocks are used if they take less than this share of the others' time."""


class ShiftedDepthwiseConv(nn.Conv1d):
    """Depthwise Conv1d as a sum of shifted copies: same parameters, same results up to rounding."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        size = self.kernel_size[0]
        x, weight, bias = input.transpose(1, 2), self.weight[:, 0], self.bias
        assert bias is not None
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
        padded = F.pad(x, (0, 0, size // 2, size // 2))
        if torch.compiler.is_compiling():  # slices become one kernel, and so do their gradients
            total = bias + sum(padded[:, n : n + x.shape[1]] * weight[:, n] for n in range(size))
            return total.transpose(1, 2)
        return ((padded.unfold(1, size, 1) * weight).sum(-1) + bias).transpose(1, 2)


def use_shifted_convs(module: nn.Module) -> None:
    for block in module.modules():
        if isinstance(block, ConvNeXtBlock):
            old = block.around
            new = ShiftedDepthwiseConv(
                old.in_channels, old.out_channels, old.kernel_size[0], groups=old.groups, device="meta"
            )
            new.weight, new.bias = old.weight, old.bias
            block.around = new


def compile_blocks(module: nn.Module) -> None:
    """Shifted convolutions, with each block at the rate of subframes compiled to a few kernels. Blocks at the rate of
    frames have a quarter of the work, and each of their shapes would cost seconds of compilation."""
    use_shifted_convs(module)
    for name, block in module.named_modules():
        if isinstance(block, ConvNeXtBlock) and (not name or "fine" in name.split(".")):
            block.compile(dynamic=False)


def fastest_convs(
    block: ConvNeXtBlock, clips: int, places: int, autocast: Callable[[], AbstractContextManager[Any]]
) -> tuple[str, str]:
    """The fastest of `library`, `shifts` and `compiled` in forward and backward of such a block, and the timings as
    text. Compilation takes some 20 s in all, so that a small gain does not count."""
    device, width = block.norm.weight.device, block.norm.normalized_shape[0]
    x = torch.randn(clips, places, width, device=device, requires_grad=True)
    kernel, expansion = block.around.kernel_size[0], block.expand.out_features // width
    timings = {}
    for name, change in (("library", None), ("shifts", use_shifted_convs), ("compiled", compile_blocks)):
        block_copy = ConvNeXtBlock(width, kernel, expansion).to(device)
        if change is not None:
            change(block_copy)
        try:
            timings[name] = 1000 * _seconds(block_copy, x, autocast)
        except RuntimeError as error:
            if name != "compiled":
                raise
            print(f"blocks are not compiled, since one could not be: {str(error).splitlines()[0]}")
    summary = ", ".join(f"{name} {milliseconds:.2f} ms" for name, milliseconds in timings.items())
    best = min(("library", "shifts"), key=timings.__getitem__)
    if timings.get("compiled", math.inf) < MIN_COMPILED_GAIN * timings[best]:
        best = "compiled"
    return best, summary


def _seconds(block: ConvNeXtBlock, x: torch.Tensor, autocast: Callable[[], AbstractContextManager[Any]]) -> float:
    """Seconds of one forward and backward pass; on CUDA as a replayed graph, as in training, where launching costs
    nothing."""

    def forward_backward() -> None:
        with autocast():
            y = block(x)
        torch.autograd.grad(y.float().sum(), [x, *block.parameters()])

    run: Callable[[], None] = forward_backward
    if x.device.type == "cuda":
        side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(WARM_UP_RUNS):
                forward_backward()
        torch.cuda.current_stream().wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward_backward()
        run = graph.replay
    run()
    _wait(x.device)
    began = time.perf_counter()
    for _ in range(TIMED_RUNS):
        run()
    _wait(x.device)
    return (time.perf_counter() - began) / TIMED_RUNS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
