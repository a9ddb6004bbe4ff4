"""A running mean of the trained weights, which is often a better model than the last of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


class Ema:
    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self.decay = decay
        self.steps = 0
        self.means = {name: parameter.detach().clone().float() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Early on the decay is shorter, or the mean would remember the start for ever."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        # All at once: on a card, starting a kernel for each would take longer than the kernels do.
        weights = [parameter.detach().float() for parameter in parameters.values()]
        torch._foreach_lerp_([self.means[name] for name in parameters], weights, 1 - decay)

    @contextmanager
    def in_place(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """The means stand in for the weights inside the block."""
        own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self.means[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(own[name])
