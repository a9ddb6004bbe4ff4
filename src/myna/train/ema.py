"""Exponential moving average of the trained weights, often a better model than the last of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from myna.core.compat import foreach_lerp


class WeightEMA:
    """Averages in fp32 of parameters, by name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self.steps = 0
        self.averages = {name: parameter.detach().clone().float() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Early on the decay is shorter, or the average would never forget the initial weights."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        # All at once: on a GPU, launching a kernel for each would take longer than the kernels do.
        weights = [parameter.detach().float() for parameter in parameters.values()]
        foreach_lerp([self.averages[name] for name in parameters], weights, 1 - decay)

    @contextmanager
    @torch.no_grad()
    def swapped_in(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """The averages replace the weights inside the block."""
        weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.copy_(self.averages[name])
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
