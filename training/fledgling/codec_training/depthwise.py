"""Depthwise convolutions of the codec's blocks, in the implementation that is faster on the device at hand.

Library kernels for depthwise convolutions are good on one GPU and many times slower than a copy on the next, above all
in the backward pass. Written as a sum over shifted copies, they are plain passes over memory and need no transposes.
Which is faster is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from myna.models.mel_codec.network import ConvNeXtBlock

WARM_UP_RUNS, TIMED_RUNS = 3, 10


class ShiftedDepthwiseConv(nn.Conv1d):
    """Depthwise Conv1d as a sum of shifted copies: same parameters, same results up to rounding."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        size = self.kernel_size[0]
        x, weight, bias = input.transpose(1, 2), self.weight[:, 0], self.bias
        assert bias is not None
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
        shifted = F.pad(x, (0, 0, size // 2, size // 2)).unfold(1, size, 1)
        return ((shifted * weight).sum(-1) + bias).transpose(1, 2)


def use_shifted_convs(module: nn.Module) -> None:
    for block in module.modules():
        if isinstance(block, ConvNeXtBlock):
            old = block.around
            new = ShiftedDepthwiseConv(
                old.in_channels, old.out_channels, old.kernel_size[0], groups=old.groups, device="meta"
            )
            new.weight, new.bias = old.weight, old.bias
            block.around = new


def shifted_convs_are_faster(
    block: ConvNeXtBlock, clips: int, places: int, autocast: Callable[[], AbstractContextManager[Any]]
) -> tuple[bool, str]:
    """Whether shifted convolutions are faster in forward and backward of such a block, and the timings as text."""
    device, width = block.norm.weight.device, block.norm.normalized_shape[0]
    x = torch.randn(clips, places, width, device=device, requires_grad=True)
    kernel, expansion = block.around.kernel_size[0], block.expand.out_features // width
    timings = {}
    for name in ("library", "shifts"):
        block_copy = ConvNeXtBlock(width, kernel, expansion).to(device)
        if name == "shifts":
            use_shifted_convs(block_copy)
        timings[name] = 1000 * _seconds(block_copy, x, autocast)
    summary = ", ".join(f"{name} {milliseconds:.2f} ms" for name, milliseconds in timings.items())
    return timings["shifts"] < timings["library"], summary


def _seconds(block: ConvNeXtBlock, x: torch.Tensor, autocast: Callable[[], AbstractContextManager[Any]]) -> float:
    """Of one forward and backward pass; on CUDA as a replayed graph, as in training, where launching costs nothing."""

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
