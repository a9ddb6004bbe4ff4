"""Benchmark of the recipe `pronunciation_paper_r64` at full size, on random weights, within 24 GB of GPU memory.

python benchmarks/pronunciation.py --out FOLDER         on a GPU: two rows, some two minutes on an H200
python benchmarks/pronunciation.py --tiny --device cpu --out FOLDER

Myna's Trainer trains Phi-4-multimodal in fp16 with a gradient scaler, 64 utterances a step in micro-batches of eight,
with the memory of a 24 GB GPU. The first row recomputes every layer, the second as many as the memory plan says.
Weights are generated on the device. Writes full_size.json after each row, and fails if steps keep being skipped
or an adapter gets no gradient.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

SCRIPT = Path(__file__).resolve()
ROOT = SCRIPT.parent.parent
if str(ROOT) not in sys.path:  # run as a script, which knows only its own folder
    sys.path.insert(0, str(ROOT))

from benchmarks.figures import save_figures  # noqa: E402
from benchmarks.harness import CONTEXT_GIB, Benchmark, synchronize  # noqa: E402
from benchmarks.synthetic import random_weight  # noqa: E402

from myna.core.config import Recipe, load_recipe  # noqa: E402
from myna.models.base import IGNORE_INDEX, Batch, RenderedSequence, TokenSpan  # noqa: E402
from myna.models.phi4.checkpoint import meta_model  # noqa: E402
from myna.models.phi4.codec import CODES_PER_UNIT, MAX_CODE  # noqa: E402
from myna.models.phi4.family import Phi4  # noqa: E402
from myna.models.phi4.tiny import tiny_config  # noqa: E402
from myna.train.distributed import init_accelerator  # noqa: E402
from myna.train.loss import LossAccumulator, term_weights  # noqa: E402
from myna.train.memory_plan import LargestBatch, plan_memory  # noqa: E402
from myna.train.precision import choose_precision  # noqa: E402
from myna.train.trainer import Trainer  # noqa: E402

RECIPE = ROOT / "src/myna/recipes" / "pronunciation_paper_r64.yaml"
GPU_GIB = 24.0
PREDECESSOR_SECONDS = 15.3
"""An optimizer step of the system that this replaces, on a TITAN RTX."""
MEDIAN_SECONDS, LOG_STD, MIN_SECONDS, MAX_SECONDS = 3.9, 0.4, 1.5, 12.0
"""Length of utterances as in SpeechOcean762, which last 4 s in the mean."""
PROMPT_TOKENS, ANSWER_TOKENS = 40, 130
"""Tokens, about what a sentence of it takes."""
WARM_UP_STEPS, TIMED_STEPS = 2, 8
ROWS = {"every-layer-recomputed": "full", "as-planned": "auto"}


class RandomPhi4(Phi4):
    """The full-size model, or a toy of it, with random weights instead of a checkpoint."""

    rng_device: torch.device

    @classmethod
    def of(cls, tiny: bool, rng_device: torch.device) -> RandomPhi4:
        config = tiny_config() if tiny else Phi4.builtin_config()
        family = cls("synthetic", config, None)
        family.rng_device = rng_device
        return family

    def load_model(self, *, dtype: torch.dtype | None, device: torch.device | str, text_head: bool) -> nn.Module:  # noqa: ARG002
        model: Any = meta_model(self.config, dtype=dtype)
        if torch.device(device).type == "meta":
            return model  # type: ignore[no-any-return]
        weights = {name: self._weight(name, like).to(device) for name, like in model.state_dict().items()}
        if self.config.tie_word_embeddings:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        model.load_state_dict(weights, strict=True, assign=True)
        if self.config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
        # What is computed and never stored is still on the meta device.
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
        return model  # type: ignore[no-any-return]

    def _weight(self, name: str, like: torch.Tensor) -> torch.Tensor:
        if name.endswith("bias"):
            return torch.zeros(like.shape, dtype=like.dtype, device=self.rng_device)
        return random_weight(name, like, self.rng_device)


def utterances(family: Phi4, seed: int = 0) -> Iterator[RenderedSequence]:
    """Endless samples: a prompt with a clip in it, and the supervised answer."""
    config, audio = family.config, family.config.audio_config
    # Below the special tokens, and so never a placeholder.
    words = min(audio.audio_token_id, config.pad_token_id)
    lengths, stream, number = random.Random(seed), np.random.default_rng(seed), 0
    while True:
        seconds = min(MAX_SECONDS, max(MIN_SECONDS, lengths.lognormvariate(math.log(MEDIAN_SECONDS), LOG_STD)))
        audio_positions = int(seconds * 100 / audio.time_reduction)
        ids = stream.integers(words, size=PROMPT_TOKENS + audio_positions + ANSWER_TOKENS)
        ids[PROMPT_TOKENS // 2 : PROMPT_TOKENS // 2 + audio_positions] = audio.audio_token_id
        labels = np.where(np.arange(len(ids)) < PROMPT_TOKENS + audio_positions, IGNORE_INDEX, ids)
        features = stream.normal(10, 4, size=(audio_positions, audio.time_reduction * audio.input_size))
        codes = np.clip(np.rint(features * CODES_PER_UNIT), 0, MAX_CODE).astype(np.int64)
        piece = TokenSpan("audio", PROMPT_TOKENS // 2, PROMPT_TOKENS // 2 + audio_positions, "", supervised=False)
        unlearned = np.broadcast_to(np.int64(IGNORE_INDEX), codes.shape)
        yield RenderedSequence(f"synthetic-{number}", ids, codes, labels, unlearned, (piece,), seconds)
        number += 1


def make_recipe(checkpointing: str, device: torch.device) -> Recipe:
    """The paper's recipe in fp16, as older GPUs need it; a CPU has no fp16."""
    precision = "fp16" if device.type == "cuda" else "fp32"
    return load_recipe(
        RECIPE,
        [
            f"train.precision={precision}",
            f"train.gradient_checkpointing={checkpointing}",
            f"train.device={device.type}",
        ],
    )


def random_steps(family: Phi4, recipe: Recipe, count: int) -> list[list[list[RenderedSequence]]]:
    """Steps of micro-batches of utterances."""
    pool, train = utterances(family), recipe.train
    micro_batches = train.batch_size // train.micro_batch_size
    return [[list(islice(pool, train.micro_batch_size)) for _ in range(micro_batches)] for _ in range(count)]


def limit_memory(gib: float, device: torch.device) -> int:
    """Limit torch to the memory of a GPU of this size."""
    memory = int((gib - CONTEXT_GIB) * 2**30)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(
            memory / torch.cuda.get_device_properties(device).total_memory, device
        )
    return memory


def measure(name: str, family: RandomPhi4, device: torch.device, memory: int, timed: int) -> dict[str, Any]:
    """Measure one row."""
    cuda = device.type == "cuda"
    recipe = make_recipe(ROWS[name], device)
    precision = choose_precision(recipe.train.precision, device)
    steps = random_steps(family, recipe, WARM_UP_STEPS + timed)
    began = time.perf_counter()
    longest = tuple(max((batch for step in steps for batch in step), key=lambda batch: sum(map(len, batch))))
    planned = plan_memory(family, recipe, precision, device, LargestBatch(longest, max(map(len, longest))))
    if recipe.train.gradient_checkpointing == "auto":
        planned = replace(planned, available=memory).with_least_recomputation()
    with tempfile.TemporaryDirectory() as scratch:
        accelerator = init_accelerator(recipe, precision, device, Path(scratch))
        trainer = Trainer.from_recipe(recipe, family, precision, accelerator, lambda _: None, planned.recomputed)
        loading = time.perf_counter() - began
        results = run_steps(trainer, [[_pinned(family.collate(batch), cuda) for batch in step] for step in steps])
    return {
        "name": name,
        "precision": str(precision),
        "rank": recipe.adapt.rank,
        "batch": f"{recipe.train.batch_size // recipe.train.micro_batch_size} x {recipe.train.micro_batch_size}",
        "recomputed_layers": planned.recomputed,
        "planned_gib": planned.total / 2**30,
        "seconds_to_load": loading,
        "trained_weights": sum(parameter.numel() for parameter in trainer.trainable_parameters.values()),
        **results,
    }


def run_steps(trainer: Trainer, steps: Sequence[list[Batch]]) -> dict[str, Any]:
    """Run warm-up and timed steps, and one more backward pass to check every gradient."""
    device, settings = trainer.accelerator.device, trainer.recipe.train
    weights = term_weights(trainer.family.loss_terms, trainer.recipe.loss)
    losses, norms, seconds = [], [], []
    for step in steps:
        synchronize(device)
        began = time.perf_counter()
        tally, norm = trainer.train_step(step, weights, settings.learning_rate)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
        losses.append(tally.metrics(trainer.family.loss_terms, weights)["loss"])
        norms.append(norm)
    measured, cuda = seconds[WARM_UP_STEPS:], device.type == "cuda"
    tokens = sum(batch.tokens for step in steps[WARM_UP_STEPS:] for batch in step)
    scaler = trainer.accelerator.scaler
    return {
        "steps": len(measured),
        "seconds_per_step": statistics.fmean(measured),
        "tokens_per_second": tokens / sum(measured),
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30 if cuda else None,
        # Near the limit the allocator frees its cache and retries, which takes long and is not visible otherwise.
        "allocator_retries": torch.cuda.memory_stats(device)["num_alloc_retries"] if cuda else None,
        "skipped_steps": sum(not math.isfinite(norm) for norm in norms),
        "skipped_after_warm_up": sum(not math.isfinite(norm) for norm in norms[WARM_UP_STEPS:]),
        "scale": scaler.get_scale() if scaler is not None else None,
        "losses": losses,
        **count_gradients(trainer, steps[-1], weights),
    }


def count_gradients(trainer: Trainer, step: list[Batch], weights: torch.Tensor) -> dict[str, int]:
    """Number of adapters with a finite gradient, and with a nonzero one."""
    tally = LossAccumulator.zeros(len(trainer.family.loss_terms))
    tally.counts = torch.stack([batch.counts for batch in step]).sum(0)
    trainer.backward(step, weights, tally)
    grads = [parameter.grad for parameter in trainer.trainable_parameters.values()]
    finite = sum(gradient is not None and bool(gradient.isfinite().all()) for gradient in grads)
    nonzero = sum(gradient is not None and bool((gradient != 0).any()) for gradient in grads)
    trainer.optimizer.zero_grad(set_to_none=True)
    return {"adapters": len(grads), "finite_gradients": finite, "gradients_not_zero": nonzero}


def is_valid(row: dict[str, Any]) -> bool:
    every = row["adapters"] == row["finite_gradients"] == row["gradients_not_zero"]
    return every and all(map(math.isfinite, row["losses"])) and row["skipped_after_warm_up"] <= row["steps"] // 2


def _pinned(batch: Batch, cuda: bool) -> Batch:
    return batch.pin_memory() if cuda else batch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy size")
    parser.add_argument("--steps", type=int, default=TIMED_STEPS, help="timed ones")
    parser.add_argument("--gib", type=float, default=GPU_GIB, help="GPU memory")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    memory = limit_memory(args.gib, device)
    family = RandomPhi4.of(args.tiny, device)
    facts: dict[str, Any] = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python {' '.join(sys.argv)}",
        **Benchmark.of(args.device, tiny=True).about(),
        "gpu_gib": args.gib,
        "tiny": args.tiny,
        "old_system_seconds_per_step": PREDECESSOR_SECONDS,
        "rows": [],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.rows:
        row = measure(name, family, device, memory, args.steps)
        facts["rows"].append({**row, "valid": is_valid(row)})
        save_figures(args.out / "full_size.json", facts)
        shown = "n/a" if row["peak_gib"] is None else f"{row['peak_gib']:.1f} GiB"
        print(f"{name}: {row['seconds_per_step']:.2f} s a step, {shown}, skipped {row['skipped_steps']}", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return 0 if all(row["valid"] for row in facts["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
