"""Harness of the training benchmark: builds, warms up and times one variant in this process."""

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
from benchmarks.baseline import ALL_PROJECTIONS, ATTENTION, LEARNING_RATE, StockStepper, make_step
from benchmarks.synthetic import (
    FULL_SIZE,
    TOY_SIZE,
    BenchmarkSize,
    RandomHiggs,
    TokenCost,
    markov_codes,
    packed_rows,
    parity_utterances,
    random_codes,
    randomize_adapter,
    utterances,
)
from benchmarks.variants import Variant

from myna.core.config import Recipe, load_recipe, override, parse_recipe
from myna.data.loader import first_fit_decreasing
from myna.models.base import RenderedSequence
from myna.models.lora import make_trainable
from myna.train.distributed import init_accelerator
from myna.train.loss import term_weights
from myna.train.memory_plan import LargestBatch, plan_memory
from myna.train.optimizer import learning_rate
from myna.train.precision import choose_precision
from myna.train.trainer import Trainer

RECIPES = Path(__file__).parent.parent / "src/myna/recipes"
CONTEXT_GIB = 0.6
"""Memory of the CUDA context, which is not available on a smaller GPU either."""
MAX_MICRO_BATCHES = 2
"""Maximum number of passes of a timed step. A recipe may have more, which takes no more memory than two."""
MARKOV_CODES = 64
"""Distinct codes of the Markov chains: few, so that there is enough of each to learn from."""
PARITY_LEARNING_RATE = 5e-4
COOL_DOWN_SECONDS = 0.5
SYNC_WARNING = "synchronizing CUDA operation"
"""Words of torch's warning about an implicit synchronization."""


class TrainStepper(Protocol):
    """A training implementation to be timed."""

    def train_step(self, step: Any, /) -> Any:
        """One optimizer step."""

    def loss_and_norm(self, result: Any, /) -> tuple[float, float]:
        """Loss and gradient norm of a step."""


@dataclass(frozen=True, slots=True)
class CollatedStep:
    """Data of an optimizer step, collated and still on the CPU."""

    data: Any
    tokens: int
    """Tokens without padding."""
    positions: int
    """Tokens with padding: the budget of the rows, or the padded batch."""
    target_seconds: float


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Device and size at which variants are measured."""

    family: RandomHiggs
    size: BenchmarkSize
    device: torch.device
    tiny: bool

    @classmethod
    def of(cls, device: str, tiny: bool) -> Benchmark:
        torch_device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        return cls(RandomHiggs.of(tiny, torch_device), TOY_SIZE if tiny else FULL_SIZE, torch_device, tiny)

    @property
    def precision(self) -> str:
        # A toy on a CPU is there to show that all variants compute the same, which fp32 shows best.
        return "fp32" if self.device.type == "cpu" else "bf16"

    @property
    def codes(self) -> tuple[int, int]:
        return self.family.delay.codebooks, self.family.delay.begin

    def measure(self, variant: Variant) -> dict[str, Any]:
        measurements = {
            "ceiling": self.ceiling,
            "stock": self.stock,
            "ours": self.ours,
            "recipe": self.ours,
            "parity": self.parity,
        }
        return {"name": variant.name, **measurements[variant.kind](variant)}

    def about(self) -> dict[str, Any]:
        """Machine and versions."""
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
        """Rate of bf16 matrix products of random numbers, which cost more power than zeros.

        Ten in a row after a pause are the ceiling. In a long row the GPU reaches its power limit and slows down, as it
        does in a training: that rate is reported too.
        """
        edge = self.size.gemm
        left, right = (torch.randn(edge, edge, device=self.device).bfloat16() for _ in range(2))

        def burst_seconds() -> float:
            time.sleep(COOL_DOWN_SECONDS)
            time_repeated(lambda: left @ right, 3, self.device)
            return time_repeated(lambda: left @ right, 10, self.device)

        burst = min(burst_seconds() for _ in range(3))
        lasting = [time_repeated(lambda: left @ right, 10, self.device) for _ in range(12)]
        work = 2 * edge**3 / 1e12
        return {"tflops": work / burst, "sustained_tflops": work / statistics.median(lasting[3:])}

    def stock(self, variant: Variant) -> dict[str, Any]:
        """The stock baseline at the first size that fits."""
        sizes = {"two": (2,), "largest": self.size.batches, "packed": self.size.packed_tokens}[variant.layout]
        too_large: list[int] = []
        for size in sizes:
            try:
                return {**self.stock_of(variant, size), "too_large": too_large}
            except torch.OutOfMemoryError:
                too_large.append(size)
            # Out of the handler, whose traceback holds on to what did not fit.
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        raise MemoryError(f"none of {sizes} fits")

    def stock_of(self, variant: Variant, size: int) -> dict[str, Any]:
        began = time.perf_counter()
        stepper = StockStepper(
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
        sizes = {"row_tokens" if packed else "batch": size, "seconds_to_load": loading}
        return {**sizes, **self.timed_row(stepper, steps, TokenCost.of(stepper.model))}

    def ours(self, variant: Variant) -> dict[str, Any]:
        """Myna's Trainer, within the memory of the GPU that a recipe is meant for."""
        memory = None if variant.gpu_gib is None else int((variant.gpu_gib - CONTEXT_GIB) * 2**30)
        if memory is not None and self.device.type == "cuda":
            whole = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(memory / whole, self.device)
        recipe = self.recipe(variant)
        micro_batches = self._own_micro_batches(recipe)
        # Counted from shapes: quantized weights do not show them any more.
        shapes = self.family.load_model(dtype=torch.bfloat16, device="meta", text_head=False)
        cost = TokenCost.of(make_trainable(shapes, self.family, recipe.adapt))
        with tempfile.TemporaryDirectory() as scratch:
            began = time.perf_counter()
            recomputed = self.recomputed(
                recipe, max(chain.from_iterable(micro_batches), key=lambda batch: sum(map(len, batch))), memory
            )
            stepper = MynaStepper(recipe, self.family, self.device, Path(scratch), recomputed)
            loading = time.perf_counter() - began
            settings = {
                "row_tokens": recipe.data.row_tokens,
                "rank": recipe.adapt.rank,
                "base": recipe.model.quantization,
                "gradient_checkpointing": recipe.train.gradient_checkpointing,
                "recomputed_layers": recomputed,
            }
            steps = [self._own_step(step, recipe) for step in micro_batches]
            return {**settings, "seconds_to_load": loading, **self.timed_row(stepper, steps, cost)}

    def recomputed(self, recipe: Recipe, longest: list[RenderedSequence], memory: int | None) -> int | None:
        """Layers that the memory plan recomputes with so much memory; None where the recipe sets it."""
        if recipe.train.gradient_checkpointing != "auto":
            return None
        precision = choose_precision(recipe.train.precision, self.device)
        planned = plan_memory(
            self.family, recipe, precision, self.device, LargestBatch(tuple(longest), max(map(len, longest)))
        )
        # The plan asks the device for its memory, and does not know of the smaller limit.
        return (planned if memory is None else replace(planned, available=memory).with_least_recomputation()).recomputed

    def recipe(self, variant: Variant) -> Recipe:
        """Recipe of a variant of ours: a shipped one, or the default with the variant's overrides."""
        size = self.size
        tokens = size.small_row_tokens if variant.small_rows else size.row_tokens * (2 if variant.long_rows else 1)
        if variant.recipe:
            toy = ["train.precision=fp32", f"data.row_tokens={tokens}", "train.device=cpu"] if self.tiny else []
            return load_recipe(RECIPES / variant.recipe, toy)
        tree: dict[str, Any] = {
            "model": {"source": self.family.source},
            "data": {"train": "synthetic", "row_tokens": tokens},
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
        """Final loss of a short training from the same start on the same data."""
        recipe = self.recipe(variant)
        family, steps = self.family, self.size.parity_steps
        codebooks, codes = self.codes
        make_codes = markov_codes(codebooks, min(MARKOV_CODES, codes))
        sequences = utterances(family, make_codes, duration_scale=self.size.duration_scale, seed=2)
        recipe = recipe.model_copy(
            update={"train": recipe.train.model_copy(update={"learning_rate": PARITY_LEARNING_RATE})}
        )
        with tempfile.TemporaryDirectory() as scratch:
            stepper = MynaStepper(recipe, family, self.device, Path(scratch))
            randomize_adapter(stepper.trainer.trainable_parameters, b_std=0.0)
            losses, began = [], time.perf_counter()
            for number, row in enumerate(islice(packed_rows(sequences, recipe.data.row_tokens), steps), start=1):
                stepper.learning_rate = learning_rate(recipe.train, number, steps)
                losses.append(stepper.loss_and_norm(stepper.train_step([family.collate(row)]))[0])
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

    def timed_row(self, stepper: TrainStepper, steps: Sequence[CollatedStep], cost: TokenCost) -> dict[str, Any]:
        """The first step, the warm-up, the timed steps, and one more in which synchronisations are counted."""
        size, device = self.size, self.device
        first, warm, measured, last = steps[0], steps[1 : 1 + size.warm_up], steps[1 + size.warm_up : -1], steps[-1]
        began = time.perf_counter()
        loss, norm = stepper.loss_and_norm(stepper.train_step(first.data))
        synchronize(device)
        to_first = time.perf_counter() - began
        for step in warm:
            stepper.train_step(step.data)
        timer = StepTimer(device)
        synchronize(device)
        began = time.perf_counter()
        timer.record()
        for step in measured:
            stepper.train_step(step.data)
            timer.record()
        synchronize(device)
        seconds = time.perf_counter() - began
        cuda = device.type == "cuda"
        peaks = (torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)) if cuda else (0, 0)
        tokens = sum(step.tokens for step in measured)
        return {
            "steps": len(measured),
            "seconds_per_step": seconds / len(measured),
            "seconds_per_step_median": statistics.median(timer.durations()),
            "target_audio_seconds_per_second": sum(step.target_seconds for step in measured) / seconds,
            "tokens_per_second": tokens / seconds,
            "model_tflops": cost.per_token * tokens / seconds / 1e12,
            "active_weights": cost.frozen,
            "active_adapters": cost.adapters,
            "peak_gib": peaks[0] / 2**30 if cuda else None,
            "reserved_gib": peaks[1] / 2**30 if cuda else None,
            "fill": tokens / sum(step.positions for step in measured),
            "seconds_to_first_step": to_first,
            "host_syncs_per_step": count_synchronizations(lambda: stepper.train_step(last.data)) if cuda else None,
            "first_loss": loss,
            "gradient_norm": norm,
        }

    @property
    def _steps(self) -> int:
        """Number of steps after the first one."""
        return self.size.warm_up + self.size.timed + 1

    def _pool(self) -> Any:
        return utterances(self.family, random_codes(*self.codes), duration_scale=self.size.duration_scale)

    def _first(self, tokens: int) -> list[RenderedSequence]:
        """Utterances of the first step, as often as they fit: repeated, they have the same mean loss."""
        few = parity_utterances(
            self.family,
            random_codes(*self.codes),
            shortest_row=self.size.small_row_tokens,
            duration_scale=self.size.duration_scale,
        )
        return few * max(1, tokens // sum(map(len, few)))

    def _own_micro_batches(self, recipe: Recipe) -> list[list[list[RenderedSequence]]]:
        """Micro-batches of every step, at most `MAX_MICRO_BATCHES` each."""
        per_micro_batch, budget = recipe.train.micro_batch_size, recipe.data.row_tokens
        per_step = min(recipe.train.batch_size, MAX_MICRO_BATCHES * per_micro_batch)
        packed = packed_rows(self._pool(), budget)
        first = self._first(budget)
        # Into one row, unless a recipe's rows are shorter than those few.
        steps = [[[first[index] for index in row] for row in first_fit_decreasing([*map(len, first)], budget)]]
        for _ in range(self._steps):
            taken = list(islice(packed, per_step))
            parts = [taken[at : at + per_micro_batch] for at in range(0, per_step, per_micro_batch)]
            steps.append([list(chain.from_iterable(part)) for part in parts])
        return steps

    def _own_step(self, micro_batches: list[list[RenderedSequence]], recipe: Recipe) -> CollatedStep:
        sequences = list(chain.from_iterable(micro_batches))
        return CollatedStep(
            data=[
                batch.pin_memory() if self.device.type == "cuda" else batch
                for batch in map(self.family.collate, micro_batches)
            ],
            tokens=sum(map(len, sequences)),
            positions=len(micro_batches) * recipe.train.micro_batch_size * recipe.data.row_tokens,
            target_seconds=sum(sequence.target_seconds for sequence in sequences),
        )

    def _padded_steps(self, batch: int) -> list[CollatedStep]:
        pool, pad = self._pool(), self.family.config.pad_token_id
        few = self._first(0)
        first = few * max(1, batch // len(few))
        steps = [[first[at : at + batch] for at in range(0, len(first), batch)]]
        steps += [[list(islice(pool, batch))] for _ in range(self._steps)]
        return [self._stock_step(step, pad) for step in steps]

    def _packed_steps(self, budget: int) -> list[CollatedStep]:
        packed = islice(packed_rows(self._pool(), budget), self._steps)
        return [self._stock_step(step, None) for step in ([self._first(budget)], *([row] for row in packed))]

    @staticmethod
    def _stock_step(micro_batches: list[list[RenderedSequence]], pad: int | None) -> CollatedStep:
        data = make_step(micro_batches, pad)
        seconds = sum(batch.target_seconds for batch in data)
        return CollatedStep(data, sum(batch.tokens for batch in data), sum(batch.positions for batch in data), seconds)


class MynaStepper:
    """Myna's Trainer, as `myna train` makes it, on random weights."""

    def __init__(
        self, recipe: Recipe, family: RandomHiggs, device: torch.device, folder: Path, recomputed: int | None = None
    ) -> None:
        precision = choose_precision(recipe.train.precision, device)
        accelerator = init_accelerator(recipe, precision, device, folder)
        self.trainer = Trainer.from_recipe(recipe, family, precision, accelerator, lambda _: None, recomputed)
        randomize_adapter(self.trainer.trainable_parameters)
        self.weights = term_weights(family.loss_terms, recipe.loss)
        self.learning_rate = LEARNING_RATE

    def train_step(self, step: Any) -> Any:
        return self.trainer.train_step(step, self.weights, self.learning_rate)

    def loss_and_norm(self, result: Any) -> tuple[float, float]:
        tally, norm = result
        return float(tally.metrics(self.trainer.family.loss_terms, self.weights)["loss"]), float(norm)


class StepTimer:
    """Time stamps of steps: CUDA events, without synchronisation, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._events: list[Any] = []

    def record(self) -> None:
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._events.append(time.perf_counter())

    def durations(self) -> list[float]:
        """Seconds between records; only after a synchronisation."""
        pairs = list(zip(self._events, self._events[1:], strict=False))
        return [a.elapsed_time(b) / 1000 for a, b in pairs] if self._on_cuda else [b - a for a, b in pairs]


def time_repeated(work: Callable[[], Any], times: int, device: torch.device) -> float:
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
    """Count how often the host waited for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(SYNC_WARNING in str(warning.message) for warning in caught)
