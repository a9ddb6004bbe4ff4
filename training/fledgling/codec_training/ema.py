"""Exponential moving average (EMA) of the codec's weights.

Adversarial training makes the weights oscillate; their average over the last thousand steps is what successors of
HiFi-GAN and diffusion models export. Codebooks are averaged with the weights that they belong to. The average is reset
whenever the codebooks are initialised anew, which happens only in the first half of a training; it follows single
restarted entries within a thousand steps. In decoder-only training it covers the decoder alone: frozen weights would
only be rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class WeightEMA:
    """Moving average of a module's state dict."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        """Keep an average of the module; a decay of 0 keeps none."""
        self.decay = decay
        self.weights = dict(module.state_dict()) if decay else {}
        self.averages = {name: tensor.detach().clone() for name, tensor in self.weights.items()}
        self.is_exported = bool(decay)
        """Whether the exported codec is the average; an evaluation of both decides."""

    def __bool__(self) -> bool:
        return bool(self.averages)

    @torch.no_grad()
    def reset(self) -> None:
        """Start from where the weights are now."""
        for name, tensor in self.weights.items():
            self.averages[name].copy_(tensor)

    @torch.no_grad()
    def update(self) -> None:
        """One step; does not synchronise with the host."""
        if self.averages:
            torch._foreach_lerp_(list(self.averages.values()), list(self.weights.values()), 1 - self.decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The module with the average in place of its weights, inside the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, tensor in self.weights.items():
            weights = tensor.clone()
            tensor.copy_(self.averages[name])
            self.averages[name].copy_(weights)
