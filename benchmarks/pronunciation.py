"""`recipes/pronunciation_paper_r64.yaml` at the true size, on random weights, within the memory of a small card.

python benchmarks/pronunciation.py --out FOLDER         on a CUDA card: two rows, some two minutes on an H200
python benchmarks/pronunciation.py --tiny --device cpu --out FOLDER

The product's own Student trains Phi-4-multimodal in fp16 with a gradient scaler, a batch of 64 utterances a step in
passes of eight. torch is held to what a card of 24 GB leaves us. The first row recomputes every layer, the second as
many as the memory plan asks for. Weights are drawn on the card: the host never holds them.
Writes true_size.json after each row, and fails if a step lost its scale for good or an adapter its gradient.
"""

from __future__ import annotations

import argparse
import gc
import json
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

from benchmarks.drawn import draw_weight  # noqa: E402
from benchmarks.measuring import CONTEXT_GIB, Bench, synchronize  # noqa: E402

from myna.config import Recipe, load_recipe  # noqa: E402
from myna.io import replacing  # noqa: E402
from myna.models.base import IGNORED, Batch, RenderedSequence, TokenSpan  # noqa: E402
from myna.models.phi4.checkpoint import meta_model  # noqa: E402
from myna.models.phi4.codec import LARGEST, STEPS  # noqa: E402
from myna.models.phi4.family import Phi4  # noqa: E402
from myna.models.phi4.tiny import tiny_config  # noqa: E402
from myna.train.distributed import start  # noqa: E402
from myna.train.loss import LossAccumulator, stream_weights  # noqa: E402
from myna.train.memory_plan import Pass, plan  # noqa: E402
from myna.train.precision import decide  # noqa: E402
from myna.train.trainer import Trainer  # noqa: E402

RECIPE = ROOT / "recipes" / "pronunciation_paper_r64.yaml"
CARD_GIB = 24.0
OLD_SECONDS = 15.3
"""An optimizer step of the system that this replaces, on its TITAN RTX."""
MEDIAN_SECONDS, SPREAD, SHORTEST, LONGEST = 3.9, 0.4, 1.5, 12.0
"""Of utterances as in SpeechOcean762, which last 4 s in the mean."""
PROMPT, ANSWER = 40, 130
"""Tokens, about what a sentence of it takes."""
WARM_UP, TIMED = 2, 8
ROWS = {"every-layer-recomputed": "full", "as-planned": "auto"}


class DrawnPhi(Phi4):
    """The true-size model, or a toy of it, whose checkpoint is a random stream."""

    drawn_on: torch.device

    @classmethod
    def of(cls, tiny: bool, drawn_on: torch.device) -> DrawnPhi:
        config = tiny_config() if tiny else Phi4.builtin("phi-4-multimodal").config
        family = cls("drawn", config, None)
        family.drawn_on = drawn_on
        return family

    def load_model(self, *, dtype: torch.dtype, device: torch.device | str, text_head: bool) -> nn.Module:  # noqa: ARG002
        model: Any = meta_model(self.config, dtype=dtype)
        if torch.device(device).type == "meta":
            return model  # type: ignore[no-any-return]
        drawn = {name: self._weight(name, like).to(device) for name, like in model.state_dict().items()}
        if self.config.tie_word_embeddings:
            drawn["lm_head.weight"] = drawn["model.embed_tokens.weight"]
        model.load_state_dict(drawn, strict=True, assign=True)
        if self.config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
        # What is computed and never stored is still on the meta device.
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
        return model  # type: ignore[no-any-return]

    def _weight(self, name: str, like: torch.Tensor) -> torch.Tensor:
        if name.endswith("bias"):
            return torch.zeros(like.shape, dtype=like.dtype, device=self.drawn_on)
        return draw_weight(name, like, self.drawn_on)


def utterances(family: Phi4, seed: int = 0) -> Iterator[RenderedSequence]:
    """Learners for ever: a prompt with a clip in it, and an answer, the only thing supervised."""
    config, audio = family.config, family.config.audio_config
    # Below the special tokens, and so never a placeholder.
    words = min(audio.audio_token_id, config.pad_token_id)
    lengths, stream, number = random.Random(seed), np.random.default_rng(seed), 0
    while True:
        seconds = min(LONGEST, max(SHORTEST, lengths.lognormvariate(math.log(MEDIAN_SECONDS), SPREAD)))
        sound = int(seconds * 100 / audio.time_reduction)
        ids = stream.integers(words, size=PROMPT + sound + ANSWER)
        ids[PROMPT // 2 : PROMPT // 2 + sound] = audio.audio_token_id
        labels = np.where(np.arange(len(ids)) < PROMPT + sound, IGNORED, ids)
        features = stream.normal(10, 4, size=(sound, audio.time_reduction * audio.input_size))
        codes = np.clip(np.rint(features * STEPS), 0, LARGEST).astype(np.int64)
        piece = TokenSpan("audio", PROMPT // 2, PROMPT // 2 + sound, "", supervised=False)
        unlearned = np.broadcast_to(np.int64(IGNORED), codes.shape)
        yield RenderedSequence(f"drawn-{number}", ids, codes, labels, unlearned, (piece,), seconds)
        number += 1


def make_recipe(checkpointing: str, device: torch.device) -> Recipe:
    """The paper's, as a card has to run it that knows fp16 alone. A CPU knows no fp16."""
    precision = "fp16" if device.type == "cuda" else "fp32"
    return load_recipe(
        RECIPE,
        [
            f"train.precision={precision}",
            f"train.gradient_checkpointing={checkpointing}",
            f"train.device={device.type}",
        ],
    )


def draw_steps(family: Phi4, recipe: Recipe, count: int) -> list[list[list[RenderedSequence]]]:
    """Steps of passes of utterances."""
    pool, train = utterances(family), recipe.train
    passes = train.batch_size // train.micro_batch_size
    return [[list(islice(pool, train.micro_batch_size)) for _ in range(passes)] for _ in range(count)]


def hold_to(gib: float, device: torch.device) -> int:
    """Leave torch what a card of this size would leave it."""
    room = int((gib - CONTEXT_GIB) * 2**30)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(device).total_memory, device)
    return room


def measure(name: str, family: DrawnPhi, device: torch.device, room: int, timed: int) -> dict[str, Any]:
    """One row: made, warmed up, timed, and looked at."""
    cuda = device.type == "cuda"
    recipe = make_recipe(ROWS[name], device)
    precision = decide(recipe.train.precision, device)
    steps = draw_steps(family, recipe, WARM_UP + timed)
    began = time.perf_counter()
    longest = tuple(max((one for step in steps for one in step), key=lambda one: sum(map(len, one))))
    planned = plan(family, recipe, precision, device, Pass(longest, max(map(len, longest))))
    if recipe.train.gradient_checkpointing == "auto":
        planned = replace(planned, room=room).with_least_recomputed()
    with tempfile.TemporaryDirectory() as scratch:
        accelerator = start(recipe, precision, device, Path(scratch))
        student = Trainer.make(recipe, family, precision, accelerator, lambda _: None, planned.recomputed)
        loading = time.perf_counter() - began
        told = learn(student, [[_pinned(family.collate(one), cuda) for one in step] for step in steps])
    return {
        "name": name,
        "precision": str(precision),
        "rank": recipe.adapt.rank,
        "batch": f"{recipe.train.batch_size // recipe.train.micro_batch_size} x {recipe.train.micro_batch_size}",
        "recomputed_layers": planned.recomputed,
        "planned_gib": planned.total / 2**30,
        "seconds_to_load": loading,
        "trained_weights": sum(parameter.numel() for parameter in student.trainables.values()),
        **told,
    }


def learn(student: Trainer, steps: Sequence[list[Batch]]) -> dict[str, Any]:
    """Warm-up, the timed steps, and one more backward pass for a look at every gradient."""
    device, settings = student.accelerator.device, student.recipe.train
    weights = stream_weights(student.family.streams, student.recipe.loss)
    losses, norms, seconds = [], [], []
    for step in steps:
        synchronize(device)
        began = time.perf_counter()
        tally, norm = student.learn(step, weights, settings.learning_rate)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
        losses.append(tally.row(student.family.streams, weights)["loss"])
        norms.append(norm)
    measured, cuda = seconds[WARM_UP:], device.type == "cuda"
    tokens = sum(batch.tokens for step in steps[WARM_UP:] for batch in step)
    scaler = student.accelerator.scaler
    return {
        "steps": len(measured),
        "seconds_per_step": statistics.fmean(measured),
        "seconds_per_step_each": measured,
        "tokens_per_second": tokens / sum(measured),
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if cuda else None,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30 if cuda else None,
        # Near the limit the allocator gives back what it keeps and asks again, which takes long and looks like nothing.
        "allocator_retries": torch.cuda.memory_stats(device)["num_alloc_retries"] if cuda else None,
        "skipped_steps": sum(not math.isfinite(norm) for norm in norms),
        "skipped_after_warm_up": sum(not math.isfinite(norm) for norm in norms[WARM_UP:]),
        "scale": scaler.get_scale() if scaler is not None else None,
        "gradient_norms": [norm if math.isfinite(norm) else None for norm in norms],
        "losses": losses,
        **gradients(student, steps[-1], weights),
    }


def gradients(student: Trainer, step: list[Batch], weights: torch.Tensor) -> dict[str, int]:
    """How many adapters got a gradient that is finite, and one that is not nothing, as the scaler hands them on."""
    tally = LossAccumulator.of(len(student.family.streams))
    tally.counts = torch.stack([batch.counts for batch in step]).sum(0)
    student.backward(step, weights, tally)
    found = [parameter.grad for parameter in student.trainables.values()]
    finite = sum(gradient is not None and bool(gradient.isfinite().all()) for gradient in found)
    there = sum(gradient is not None and bool((gradient != 0).any()) for gradient in found)
    student.optimizer.zero_grad(set_to_none=True)
    return {"adapters": len(found), "finite_gradients": finite, "gradients_not_zero": there}


def is_sound(row: dict[str, Any]) -> bool:
    every = row["adapters"] == row["finite_gradients"] == row["gradients_not_zero"]
    return every and all(map(math.isfinite, row["losses"])) and row["skipped_after_warm_up"] <= row["steps"] // 2


def _pinned(batch: Batch, cuda: bool) -> Batch:
    return batch.pin() if cuda else batch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy of the model, to see that everything runs")
    parser.add_argument("--steps", type=int, default=TIMED, help="timed ones")
    parser.add_argument("--gib", type=float, default=CARD_GIB, help="of the card that is meant")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    asked = parser.parse_args()
    device = torch.device(asked.device, 0) if asked.device == "cuda" else torch.device(asked.device)
    room = hold_to(asked.gib, device)
    family = DrawnPhi.of(asked.tiny, device)
    facts: dict[str, Any] = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python {' '.join(sys.argv)}",
        **Bench.of(asked.device, tiny=True).about(),
        "card_gib": asked.gib,
        "tiny": asked.tiny,
        "old_system_seconds_per_step": OLD_SECONDS,
        "rows": [],
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    for name in asked.rows:
        row = measure(name, family, device, room, asked.steps)
        facts["rows"].append({**row, "sound": is_sound(row)})
        with replacing(asked.out / "true_size.json") as temporary:
            temporary.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        shown = "n/a" if row["peak_gib"] is None else f"{row['peak_gib']:.1f} GiB"
        print(f"{name}: {row['seconds_per_step']:.2f} s a step, {shown}, skipped {row['skipped_steps']}", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
    return 0 if all(row["sound"] for row in facts["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
