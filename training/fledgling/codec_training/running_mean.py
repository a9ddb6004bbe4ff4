"""The mean of the codec over its last steps, which is calmer than any one of them.

Critics push the weights to and fro as long as they learn. The mean of the last thousand steps stands in the middle, and
is what others ship (HiFi-GAN's successors, diffusion models). Codebooks are averaged with the weights that they belong
to. The mean begins anew whenever the codebooks are laid out, which is only in the first half of a training; single
entries that are put elsewhere later take it along within a thousand steps. Where the decoder learns alone, the mean is
of the decoder: what does not move would only be rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class RunningMean:
    def __init__(self, module: nn.Module, kept: float) -> None:
        """`kept` is how much of the mean stays at each step; with 0 there is no mean."""
        self.kept = kept
        self.followed = dict(module.state_dict()) if kept else {}
        self.means = {name: tensor.detach().clone() for name, tensor in self.followed.items()}
        self.ships = bool(kept)
        """Whether it is what is kept as the codec. Who has listened to both may decide otherwise."""

    def __bool__(self) -> bool:
        return bool(self.means)

    @torch.no_grad()
    def begin(self) -> None:
        """Start from where the weights are now."""
        for name, tensor in self.followed.items():
            self.means[name].copy_(tensor)

    @torch.no_grad()
    def follow(self) -> None:
        """One step further; asks the host nothing."""
        if self.means:
            torch._foreach_lerp_(list(self.means.values()), list(self.followed.values()), 1 - self.kept)

    @contextmanager
    def instead(self) -> Iterator[None]:
        """The module with the mean in place of its weights, for as long as this lasts."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, tensor in self.followed.items():
            aside = tensor.clone()
            tensor.copy_(self.means[name])
            self.means[name].copy_(aside)
