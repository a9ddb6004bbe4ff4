"""The blocks' filters, one per channel, in the way that the device at hand is quickest at.

Libraries have kernels for such filters that are good on one card and many times slower than a copy on the next, above
all on the way back. Written as a sum over shifted copies, they are plain passes over memory, and need no turning of
axes before and behind. Which is quicker is measured, not guessed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from myna.models.mel_codec.network import Block

WARM, TIMED = 3, 10


class Shifts(nn.Conv1d):
    """The same weights under the same names, and the same results up to rounding."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        size = self.kernel_size[0]
        x, weight, bias = input.transpose(1, 2), self.weight[:, 0], self.bias
        assert bias is not None
        if torch.is_autocast_enabled(x.device.type):
            half = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(half), weight.to(half), bias.to(half)
        shifted = F.pad(x, (0, 0, size // 2, size // 2)).unfold(1, size, 1)
        return ((shifted * weight).sum(-1) + bias).transpose(1, 2)


def use_shifts(module: nn.Module) -> None:
    for block in module.modules():
        if isinstance(block, Block):
            old = block.around
            new = Shifts(old.in_channels, old.out_channels, old.kernel_size[0], groups=old.groups, device="meta")
            new.weight, new.bias = old.weight, old.bias
            block.around = new


def shifts_are_quicker(
    block: Block, clips: int, places: int, half: Callable[[], AbstractContextManager[Any]]
) -> tuple[bool, str]:
    """By forward and backward of one block of that size on its device, and what was measured."""
    device, width = block.norm.weight.device, block.norm.normalized_shape[0]
    x = torch.randn(clips, places, width, device=device, requires_grad=True)
    kernel, expansion = block.around.kernel_size[0], block.expand.out_features // width
    taken = {}
    for name in ("library", "shifts"):
        one = Block(width, kernel, expansion).to(device)
        if name == "shifts":
            use_shifts(one)
        taken[name] = 1000 * _seconds(one, x, half)
    said = ", ".join(f"{name} {milliseconds:.2f} ms" for name, milliseconds in taken.items())
    return taken["shifts"] < taken["library"], said


def _seconds(block: Block, x: torch.Tensor, half: Callable[[], AbstractContextManager[Any]]) -> float:
    """Of one pass to and fro; on a card as part of a recording, as in training, where launching costs nothing."""

    def pass_by() -> None:
        with half():
            y = block(x)
        torch.autograd.grad(y.float().sum(), [x, *block.parameters()])

    again: Callable[[], None] = pass_by
    if x.device.type == "cuda":
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM):
                pass_by()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pass_by()
        again = graph.replay
    again()
    _wait(x.device)
    began = time.perf_counter()
    for _ in range(TIMED):
        again()
    _wait(x.device)
    return (time.perf_counter() - began) / TIMED


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
