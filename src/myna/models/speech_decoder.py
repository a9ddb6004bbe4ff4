"""Interface of a decoding batch: rows of a fixed cache that generate one frame of codes each a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from myna.models.base import RenderedSequence, Sampling


class StepResult(NamedTuple):
    """One frame of the first rows, on the host."""

    codes: torch.Tensor
    """(rows, codebooks), as the model reads them: under its delay pattern."""
    log_probs: torch.Tensor
    """(rows, codebooks): of the codes, under the model's own distribution."""
    active: torch.Tensor
    """(rows,): 0 where this was the row's last frame, or where it had ended before."""

    def result(self) -> StepResult:
        return self


class PendingStep(Protocol):
    """A step that may still be running."""

    def result(self) -> StepResult:
        """Wait for it."""


Number = TypeVar("Number", bound=np.generic)
StepHistory = list[npt.NDArray[Number]]
"""Codes of one row, or their log-probabilities, step by step: (codebooks,) each."""
LoraMatrices = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Full module name -> A (rank, inputs) and B (outputs, rank), the scaling in B."""


class AdapterSlots(Protocol):
    """Adapters of a decoding batch, by name: every row may use another one."""

    capacity: int

    @property
    def names(self) -> tuple[str, ...]: ...

    def load(self, name: str, matrices: LoraMatrices) -> None:
        """Take an adapter in while requests go on."""

    def unload(self, name: str) -> None:
        """Forget a name. Requests that use the adapter go on with it."""

    def acquire(self, name: str) -> int:
        """The slot of an adapter, kept for a request until it is released."""

    def release(self, slot: int) -> None: ...


class SpeechDecoder(Protocol):
    """Decoding batch of a speaking family.

    A row is filled by `prefill` or `copy_prompt`, started by `begin`, and generates with every `step` until its result
    says that it ended. Only the first rows of a batch are processed, so a row that ended is replaced by the last one
    with `move_row`.
    """

    rows: int
    max_positions: int
    steps_ahead: int
    """How many steps may be enqueued before the result of the first is read; 0 where a step is over when it returns."""

    @property
    def adapters(self) -> AdapterSlots | None:
        """Adapters that its rows may use."""

    def warm_up(self) -> None:
        """Compile and capture what prompts of usual sizes need, before the first comes; no row may be in use."""

    def use_adapter(self, row: int, slot: int, strength: float) -> None:
        """Let a row use an adapter, from its prefill on until it ends; slot -1 is none."""

    def prefill(self, row: int, prompt: RenderedSequence) -> None:
        """Process a prompt into a row of the cache."""

    def copy_prompt(self, source: int, target: int, positions: int) -> None:
        """Copy so many positions of a row's cache to another row."""

    def begin(self, row: int, positions: int, sampling: Sampling, max_frames: int) -> None:
        """Let a row generate after a prompt of so many positions, with the random stream of `sampling.seed`."""

    def move_row(self, source: int, target: int, positions: int) -> None:
        """Copy a row with its state; `positions` is how much of its cache counts."""

    def end(self, row: int) -> None:
        """Stop a row: it generates nothing more, and costs as little as possible until it is used again."""

    def bucket(self, rows: int) -> int:
        """The batch size that so many rows run as: all rows up to it make a step, if they have begun."""

    def step(self, rows: int, longest: int) -> PendingStep:
        """Generate a frame of the first rows, whose longest context so far is `longest`."""

    def positions(self, prompt: RenderedSequence, max_frames: int) -> int:
        """The most positions that a request takes."""

    def frames(self, delayed: StepHistory[Any], ended: bool) -> int:
        """How many whole frames of codes a row's step results hold so far."""

    def undelay(self, delayed: StepHistory[Number], start: int, stop: int) -> npt.NDArray[Number]:
        """(frames, codebooks): frames of a row's step results, the delay undone. The ends of stream are the frame after
        the last."""
