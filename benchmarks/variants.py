"""Variants of the training benchmark: the rows of its table, and their tolerances."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Variant:
    """A row of the benchmark."""

    name: str
    description: str
    kind: Literal["ceiling", "stock", "ours", "recipe", "parity"]
    targets: Literal["attention", "all"] = "all"
    """Stock: the projections that get a LoRA."""
    dropout: float = 0.0
    layout: Literal["two", "largest", "packed"] = "two"
    """Stock: padded batches of two or of as many as fit, or packed rows of as many tokens as fit."""
    attention: str = "sdpa"
    compiled: bool = False
    settings: tuple[str, ...] = ()
    """Ours: overrides of a LoRA of rank 16 on all projections in rows of 16,384 tokens."""
    small_rows: bool = False
    """Ours: rows of 4,096 tokens instead."""
    long_rows: bool = False
    """Ours: rows of 32,768 tokens instead, which fit an H200."""
    recipe: str = ""
    gpu_gib: float | None = None
    """Recipe: the memory of the GPU it is meant for, which it may not exceed."""
    tolerance: float = 0.01
    """Relative tolerance of the first loss and gradient norm against the reference."""
    compares: frozenset[str] = field(default=frozenset({"first_loss", "gradient_norm"}))


REFERENCE = "stock-all"
"""The variant that the others' first loss and gradient norm are compared with."""
QUANTIZED_TOLERANCE = 0.05
"""Tolerance where the frozen weights are quantized to 8 or 4 bits."""

VARIANTS = (
    Variant(
        "stock-batch-2",
        "transformers + PEFT, q k v o, batch 2, dropout 0.1",
        "stock",
        targets="attention",
        dropout=0.1,
        # Other adapters have other gradients.
        compares=frozenset({"first_loss"}),
    ),
    Variant("stock-all", "transformers + PEFT, all projections, largest batch that fits", "stock", layout="largest"),
    Variant(
        "stock-packed-sdpa",
        "the same packed by position ids, sdpa with a mask of the whole row",
        "stock",
        layout="packed",
    ),
    Variant(
        "stock-packed-flex",
        "the same packed by position ids, flex attention",
        "stock",
        layout="packed",
        attention="flex_attention",
    ),
    Variant("ours-plain-bf16", "ours without fused LoRA, bf16", "ours", settings=("train.fused_lora=false",)),
    Variant("ours-bf16", "ours, bf16, 32,768-token rows", "ours", long_rows=True),
    Variant(
        "ours-fp8",
        "ours, frozen base in fp8, 32,768-token rows",
        "ours",
        settings=("model.quantization=fp8",),
        long_rows=True,
        tolerance=QUANTIZED_TOLERANCE,
    ),
    Variant(
        "ours-8gb",
        "recipe for a GPU of 8 GB",
        "recipe",
        recipe="higgs_v2_lora_8gb.yaml",
        gpu_gib=8,
        tolerance=QUANTIZED_TOLERANCE,
    ),
    Variant("ours-16gb", "recipe for a GPU of 16 GB", "recipe", recipe="higgs_v2_lora_16gb.yaml", gpu_gib=16),
    Variant("ours-24gb", "recipe for a GPU of 24 GB", "recipe", recipe="higgs_v2_lora_24gb.yaml", gpu_gib=24),
    Variant(
        "ours-h200", "recipe for an H200", "recipe", recipe="higgs_v2_lora_h200.yaml", tolerance=QUANTIZED_TOLERANCE
    ),
    # Last, since compilation may take long.
    Variant(
        "stock-packed-compiled",
        "the same packed by position ids, flex attention, layers compiled",
        "stock",
        layout="packed",
        attention="flex_attention",
        compiled=True,
    ),
)

PARITY = (
    Variant("parity-bf16", "200 steps, bf16", "parity", small_rows=True),
    Variant("parity-fp8", "200 steps, fp8 base", "parity", settings=("model.quantization=fp8",), small_rows=True),
    Variant("parity-nf4", "200 steps, NF4 base", "parity", settings=("model.quantization=nf4",), small_rows=True),
)

CEILINGS = (
    Variant("ceiling-before", "matrix product at the start of the run", "ceiling"),
    Variant("ceiling-after", "matrix product at its end", "ceiling"),
)

BY_NAME = {variant.name: variant for variant in (*VARIANTS, *PARITY, *CEILINGS)}
