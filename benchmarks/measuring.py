"""One row of the training benchmark, measured in this process: built, warmed up, timed, and counted."""

from __future__ import annotations

import gc
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import accelerate
import peft
import torch
import transformers
from benchmarks.drawn import (
    TOY_SIZE,
    TRUE_SIZE,
    DrawnHiggs,
    Size,
    Work,
    checked,
    draw_adapter,
    noise,
    rows,
    utterances,
    walk,
)
from benchmarks.peers import ALL_PROJECTIONS, ATTENTION, RATE, Peer, make_step
from benchmarks.variants import Variant

from myna.config import Recipe, load_recipe, override, parse_recipe
from myna.data.packing import first_fit_decreasing
from myna.models.base import RenderedSequence
from myna.train.distributed import start
from myna.train.lora import adapt
from myna.train.loss import stream_weights
from myna.train.memory_plan import Pass, plan
from myna.train.precision import decide
from myna.train.schedule import learning_rate
from myna.train.trainer import Trainer

RECIPES = Path(__file__).parent.parent / "recipes"
CONTEXT_GIB = 0.6
"""What the driver takes of a card before we allocate anything, and so is not there for us on a smaller one."""
PASSES = 2
"""Passes behind one timed step at most. A recipe may have more, which takes no more memory than two."""
WALK_CODES = 64
"""Codes that occur in the walks: few, so that there is enough of each to learn from."""
PARITY_RATE = 5e-4
REST = 0.5
"""Seconds in which a card cools off."""
SYNCHRONIZES = "synchronizing CUDA operation"
"""What torch's warning about a hidden synchronisation says."""


class Learner(Protocol):
    def learn(self, step: Any, /) -> Any:
        """One optimizer step."""

    def read(self, result: Any, /) -> tuple[float, float]:
        """Loss and gradient norm of a step."""


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step that waits to be learned, collated and still on the CPU."""

    data: Any
    tokens: int
    """Real ones."""
    room: int
    """Positions that were paid for: the budget of the rows, or the padded batch."""
    target_seconds: float


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and at what size all variants are measured."""

    family: DrawnHiggs
    size: Size
    device: torch.device
    tiny: bool

    @classmethod
    def of(cls, device: str, tiny: bool) -> Bench:
        where = torch.device(device, 0) if device == "cuda" else torch.device(device)
        return cls(DrawnHiggs.of(tiny, where), TOY_SIZE if tiny else TRUE_SIZE, where, tiny)

    @property
    def precision(self) -> str:
        # A toy on a CPU is there to show that all variants compute the same, which fp32 shows best.
        return "fp32" if self.device.type == "cpu" else "bf16"

    @property
    def codes(self) -> tuple[int, int]:
        return self.family.delay.codebooks, self.family.delay.begin

    def measure(self, variant: Variant) -> dict[str, Any]:
        how = {
            "ceiling": self.ceiling,
            "stock": self.stock,
            "ours": self.ours,
            "recipe": self.ours,
            "parity": self.parity,
        }
        return {"name": variant.name, **how[variant.kind](variant)}

    def about(self) -> dict[str, Any]:
        """What it was measured on."""
        cuda = self.device.type == "cuda"
        modules = (torch, transformers, accelerate, peft)
        return {
            "machine": torch.cuda.get_device_name(self.device) if cuda else platform.machine(),
            "versions": {
                "python": platform.python_version(),
                **{module.__name__: module.__version__ for module in modules},
            },
        }

    def ceiling(self, _: Variant) -> dict[str, Any]:
        """bf16 matrix products of random numbers, which cost more power than zeros.

        Ten in a row after a rest are the ceiling. In a long row the card comes to the limit of its power and slows
        down, as it does in a training: that rate is told too.
        """
        edge = self.size.gemm
        left, right = (torch.randn(edge, edge, device=self.device).bfloat16() for _ in range(2))

        def after_a_rest() -> float:
            time.sleep(REST)
            timed(lambda: left @ right, 3, self.device)
            return timed(lambda: left @ right, 10, self.device)

        burst = min(after_a_rest() for _ in range(3))
        lasting = [timed(lambda: left @ right, 10, self.device) for _ in range(12)]
        work = 2 * edge**3 / 1e12
        return {"tflops": work / burst, "sustained_tflops": work / statistics.median(lasting[3:])}

    def stock(self, variant: Variant) -> dict[str, Any]:
        """A peer at the first size that fits."""
        sizes = {"two": (2,), "largest": self.size.batches, "packed": self.size.packed_tokens}[variant.layout]
        refused: list[int] = []
        for size in sizes:
            try:
                return {**self.stock_of(variant, size), "too_large": refused}
            except torch.OutOfMemoryError:
                refused.append(size)
            # Out of the handler, whose traceback holds on to what did not fit.
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        raise MemoryError(f"none of {sizes} fits")

    def stock_of(self, variant: Variant, size: int) -> dict[str, Any]:
        began = time.perf_counter()
        peer = Peer(
            self.family.config,
            targets=ATTENTION if variant.targets == "attention" else ALL_PROJECTIONS,
            dropout=variant.dropout,
            device=self.device,
            dtype=torch.float32 if self.precision == "fp32" else torch.bfloat16,
            attention=variant.attention,
            compiled=variant.compiled,
        )
        loading = time.perf_counter() - began
        packed = variant.layout == "packed"
        steps = self._packed_steps(size) if packed else self._padded_steps(size)
        asked = {"row_tokens" if packed else "batch": size, "seconds_to_load": loading}
        return {**asked, **self.timed_row(peer, steps, Work.of(peer.model))}

    def ours(self, variant: Variant) -> dict[str, Any]:
        """The product, within the memory of the card that a recipe is meant for."""
        room = None if variant.card_gib is None else int((variant.card_gib - CONTEXT_GIB) * 2**30)
        if room is not None and self.device.type == "cuda":
            whole = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(room / whole, self.device)
        recipe = self.recipe(variant)
        passes = self._own_passes(recipe)
        # Counted from shapes: a base that is rounded does not show them any more.
        shapes = self.family.load_model(dtype=torch.bfloat16, device="meta", text_head=False)
        work = Work.of(adapt(shapes, self.family, recipe.adapt))
        with tempfile.TemporaryDirectory() as scratch:
            began = time.perf_counter()
            recomputed = self.recomputed(
                recipe, max(chain.from_iterable(passes), key=lambda one: sum(map(len, one))), room
            )
            learner = Ours(recipe, self.family, self.device, Path(scratch), recomputed)
            loading = time.perf_counter() - began
            asked = {
                "row_tokens": recipe.data.row_tokens,
                "rank": recipe.adapt.rank,
                "base": recipe.model.quantization,
                "gradient_checkpointing": recipe.train.gradient_checkpointing,
                "recomputed_layers": recomputed,
            }
            steps = [self._own_step(one, recipe) for one in passes]
            return {**asked, "seconds_to_load": loading, **self.timed_row(learner, steps, work)}

    def recomputed(self, recipe: Recipe, longest: list[RenderedSequence], room: int | None) -> int | None:
        """The layers that the memory plan would have recomputed on such a card; None where the recipe says it."""
        if recipe.train.gradient_checkpointing != "auto":
            return None
        precision = decide(recipe.train.precision, self.device)
        planned = plan(self.family, recipe, precision, self.device, Pass(tuple(longest), max(map(len, longest))))
        # The plan asks the device how much room there is, and does not know of the smaller card.
        return (planned if room is None else replace(planned, room=room).with_least_recomputed()).recomputed

    def recipe(self, variant: Variant) -> Recipe:
        """The settings of a row of ours: a shipped recipe, or the plain case with what the variant changes."""
        size = self.size
        tokens = size.small_row_tokens if variant.small_rows else size.row_tokens * (2 if variant.long_rows else 1)
        if variant.recipe:
            toy = ["train.precision=fp32", f"data.row_tokens={tokens}", "train.device=cpu"] if self.tiny else []
            return load_recipe(RECIPES / variant.recipe, toy)
        tree: dict[str, Any] = {
            "model": {"source": self.family.source},
            "data": {"train": "drawn", "row_tokens": tokens},
            "adapt": {"rank": 16, "alpha": 32},
            "train": {
                "steps": size.parity_steps,
                "batch_size": 1,
                "precision": self.precision,
                "gradient_checkpointing": "none",
            },
        }
        for setting in variant.settings:
            override(tree, setting)
        return parse_recipe(tree, where=variant.name)

    def parity(self, variant: Variant) -> dict[str, Any]:
        """A short training from the same start on the same data: where does the loss end?"""
        recipe = self.recipe(variant)
        family, steps = self.family, self.size.parity_steps
        codebooks, codes = self.codes
        make = walk(codebooks, min(WALK_CODES, codes))
        drawn = utterances(family, make, pace=self.size.pace, seed=2)
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"learning_rate": PARITY_RATE})})
        with tempfile.TemporaryDirectory() as scratch:
            learner = Ours(recipe, family, self.device, Path(scratch))
            draw_adapter(learner.student.trainables, high=0.0)
            losses, began = [], time.perf_counter()
            for number, row in enumerate(islice(rows(drawn, recipe.data.row_tokens), steps), start=1):
                learner.rate = learning_rate(recipe.train, number, steps)
                losses.append(learner.read(learner.learn([family.collate(row)]))[0])
            seconds = time.perf_counter() - began
        last = losses[-10:]
        return {
            "steps": len(losses),
            "row_tokens": recipe.data.row_tokens,
            "first_loss": losses[0],
            "final_loss": statistics.fmean(last),
            "seconds": seconds,
            "losses": losses,
        }

    def timed_row(self, learner: Learner, steps: Sequence[Step], work: Work) -> dict[str, Any]:
        """The first step, the warm-up, the timed steps, and one more in which synchronisations are counted."""
        size, device = self.size, self.device
        first, warm, measured, last = steps[0], steps[1 : 1 + size.warm_up], steps[1 + size.warm_up : -1], steps[-1]
        began = time.perf_counter()
        loss, norm = learner.read(learner.learn(first.data))
        synchronize(device)
        to_first = time.perf_counter() - began
        for step in warm:
            learner.learn(step.data)
        marks = Marks(device)
        synchronize(device)
        began = time.perf_counter()
        marks.set()
        for step in measured:
            learner.learn(step.data)
            marks.set()
        synchronize(device)
        seconds = time.perf_counter() - began
        cuda = device.type == "cuda"
        peaks = (torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)) if cuda else (0, 0)
        tokens = sum(step.tokens for step in measured)
        return {
            "steps": len(measured),
            "seconds_per_step": seconds / len(measured),
            "seconds_per_step_median": statistics.median(marks.between()),
            "target_audio_seconds_per_second": sum(step.target_seconds for step in measured) / seconds,
            "tokens_per_second": tokens / seconds,
            "model_tflops": work.per_token * tokens / seconds / 1e12,
            "active_weights": work.frozen,
            "active_adapters": work.adapters,
            "peak_gib": peaks[0] / 2**30 if cuda else None,
            "reserved_gib": peaks[1] / 2**30 if cuda else None,
            "fill": tokens / sum(step.room for step in measured),
            "seconds_to_first_step": to_first,
            "host_syncs_per_step": count_synchronizations(lambda: learner.learn(last.data)) if cuda else None,
            "first_loss": loss,
            "gradient_norm": norm,
        }

    @property
    def _steps(self) -> int:
        """After the first one."""
        return self.size.warm_up + self.size.timed + 1

    def _pool(self) -> Any:
        return utterances(self.family, noise(*self.codes), pace=self.size.pace)

    def _first(self, room: int) -> list[RenderedSequence]:
        """The utterances that all begin with, as often as they fit: repeated, they have the same mean loss."""
        few = checked(self.family, noise(*self.codes), shortest_row=self.size.small_row_tokens, pace=self.size.pace)
        return few * max(1, room // sum(map(len, few)))

    def _own_passes(self, recipe: Recipe) -> list[list[list[RenderedSequence]]]:
        """The passes of every step, cut to so many as it takes to see what a step costs."""
        per_pass, budget = recipe.train.micro_batch_size, recipe.data.row_tokens
        per_step = min(recipe.train.batch_size, PASSES * per_pass)
        packed = rows(self._pool(), budget)
        first = self._first(budget)
        # Into one row, unless a recipe's rows are shorter than those few.
        steps = [[[first[index] for index in row] for row in first_fit_decreasing([*map(len, first)], budget)]]
        for _ in range(self._steps):
            taken = list(islice(packed, per_step))
            parts = [taken[at : at + per_pass] for at in range(0, per_step, per_pass)]
            steps.append([list(chain.from_iterable(part)) for part in parts])
        return steps

    def _own_step(self, passes: list[list[RenderedSequence]], recipe: Recipe) -> Step:
        sequences = list(chain.from_iterable(passes))
        return Step(
            data=[batch.pin() if self.device.type == "cuda" else batch for batch in map(self.family.collate, passes)],
            tokens=sum(map(len, sequences)),
            room=len(passes) * recipe.train.micro_batch_size * recipe.data.row_tokens,
            target_seconds=sum(sequence.target_seconds for sequence in sequences),
        )

    def _padded_steps(self, batch: int) -> list[Step]:
        pool, pad = self._pool(), self.family.config.pad_token_id
        few = self._first(0)
        first = few * max(1, batch // len(few))
        steps = [[first[at : at + batch] for at in range(0, len(first), batch)]]
        steps += [[list(islice(pool, batch))] for _ in range(self._steps)]
        return [self._peer_step(step, pad) for step in steps]

    def _packed_steps(self, budget: int) -> list[Step]:
        packed = islice(rows(self._pool(), budget), self._steps)
        return [self._peer_step(step, None) for step in ([self._first(budget)], *([row] for row in packed))]

    @staticmethod
    def _peer_step(passes: list[list[RenderedSequence]], pad: int | None) -> Step:
        data = make_step(passes, pad)
        seconds = sum(one.target_seconds for one in data)
        return Step(data, sum(one.tokens for one in data), sum(one.positions for one in data), seconds)


class Ours:
    """The product: its Student, as `myna train` makes it, on drawn weights."""

    def __init__(
        self, recipe: Recipe, family: DrawnHiggs, device: torch.device, folder: Path, recomputed: int | None = None
    ) -> None:
        precision = decide(recipe.train.precision, device)
        accelerator = start(recipe, precision, device, folder)
        self.student = Trainer.make(recipe, family, precision, accelerator, lambda _: None, recomputed)
        draw_adapter(self.student.trainables)
        self.weights = stream_weights(family.streams, recipe.loss)
        self.rate = RATE

    def learn(self, step: Any) -> Any:
        return self.student.learn(step, self.weights, self.rate)

    def read(self, result: Any) -> tuple[float, float]:
        tally, norm = result
        return float(tally.row(self.student.family.streams, self.weights)["loss"]), float(norm)


class Marks:
    """Points in time on the device, where it has a time of its own, so that nobody waits to set them."""

    def __init__(self, device: torch.device) -> None:
        self._on_card = device.type == "cuda"
        self._events: list[Any] = []

    def set(self) -> None:
        if self._on_card:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._events.append(time.perf_counter())

    def between(self) -> list[float]:
        """Seconds from mark to mark; only after everything is done."""
        pairs = list(zip(self._events, self._events[1:], strict=False))
        return [a.elapsed_time(b) / 1000 for a, b in pairs] if self._on_card else [b - a for a, b in pairs]


def timed(work: Callable[[], Any], times: int, device: torch.device) -> float:
    """Seconds of one of `times` in a row."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return (time.perf_counter() - began) / times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def count_synchronizations(work: Callable[[], Any]) -> int:
    """How often the host waited for the card."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(SYNCHRONIZES in str(warning.message) for warning in caught)
