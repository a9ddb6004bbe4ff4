"""Small training in every precision, through the product's own trainer, on one GPU.

python benchmarks/precision.py --out FOLDER

Codes are drawn from a random walk that repeats itself four times out of five, so there is something to learn and a
floor to reach; no recording and no codec are needed. Layers are all recomputed in the backward pass, and the audio head
and embedding are trained beside the LoRA, since that is where fp16 goes wrong. Writes precision.json and precision.svg,
and fails unless every precision ends within 2 % of fp32's loss with finite gradients.
"""

from __future__ import annotations

import argparse
import gc
import math
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, get_args

import accelerate
import numpy as np
import peft
import torch
import transformers

from myna.report.page import Curve

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.figures import plot_file, save_figures

from myna.core.config import AdaptSettings, DataSettings, ModelSettings, Recipe, TrainSettings
from myna.data.conversation import AudioClip, speech_conversation
from myna.models import open_family
from myna.models.base import Batch, Family
from myna.models.higgs_v2.tiny import save_tiny
from myna.train.distributed import ProcessInfo, init_accelerator
from myna.train.loss import LossAccumulator, term_weights
from myna.train.optimizer import learning_rate
from myna.train.precision import Precision, PrecisionName, choose_precision
from myna.train.trainer import Trainer

STEPS, CODES, FRAMES, TOLERANCE = 200, 64, 40, 0.02
HIDDEN, LAYERS = 256, 4
Step = list[Batch]
"""The passes behind one optimizer step."""


def draw_steps(family: Family, steps: int, *, seed: int = 0) -> list[Step]:
    """Two passes of four utterances each, all of them new."""
    random = np.random.default_rng(seed)
    follows = np.stack([random.permutation(CODES) for _ in range(8)])

    def utterance(id: str) -> Any:
        codes = random.integers(CODES, size=(FRAMES, 8))
        for frame in range(1, FRAMES):
            kept = random.random(8) < 0.8
            codes[frame, kept] = follows[np.arange(8), codes[frame - 1]][kept]
        clip = AudioClip(id, codes.astype(np.uint16), target=True)
        return family.render(speech_conversation(f"Line {id}.", id=id, target=clip))

    return [
        [family.collate([utterance(f"{step}-{part}-{n}") for n in range(4)]) for part in range(2)]
        for step in range(steps)
    ]


def make_recipe(source: Path, name: PrecisionName, steps: int = STEPS) -> Recipe:
    return Recipe(
        model=ModelSettings(source=str(source)),
        data=DataSettings(train=Path("drawn")),
        adapt=AdaptSettings(rank=16, train_modules=("audio_head", "audio_embedding")),
        train=TrainSettings(steps=steps, learning_rate=3e-3, precision=name, gradient_checkpointing="full"),
    )


def make_trainer(recipe: Recipe, family: Family, precision: Precision, device: torch.device, folder: Path) -> Trainer:
    return Trainer.from_recipe(
        recipe, family, precision, init_accelerator(recipe, precision, device, folder), lambda _: None
    )


def gradients_are_finite(student: Trainer, step: Step, weights: torch.Tensor) -> bool:
    """Whether a backward pass reaches every trained weight with a finite gradient, before any unscaling."""
    tally = LossAccumulator.zeros(len(student.family.loss_terms))
    tally.counts = torch.stack([batch.counts for batch in step]).sum(0)
    student.backward(step, weights, tally)
    gradients = [parameter.grad for parameter in student.trainable_parameters.values()]
    finite = all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)
    student.optimizer.zero_grad(set_to_none=True)
    return finite


def learn(student: Trainer, steps: Sequence[Step]) -> dict[str, Any]:
    """One training from its first to its last step, and what it cost."""
    settings, device = student.recipe.train, student.accelerator.device
    weights = term_weights(student.family.loss_terms, student.recipe.loss)
    losses, norms, seconds = [], [], []
    for number, step in enumerate(steps, start=1):
        began = time.perf_counter()
        tally, norm = student.train_step(step, weights, learning_rate(settings, number, len(steps)))
        seconds.append(time.perf_counter() - began)
        losses.append(tally.metrics(student.family.loss_terms, weights)["loss"])
        norms.append(norm)
    return {
        "precision": student.precision.name,
        "reason": str(student.precision),
        "first_loss": statistics.fmean(losses[:10]),
        "final_loss": statistics.fmean(losses[-10:]),
        "finite_gradients": gradients_are_finite(student, steps[-1], weights)
        and all(bool(parameter.isfinite().all()) for parameter in student.trainable_parameters.values()),
        "skipped_steps": sum(not math.isfinite(norm) for norm in norms),
        "peak_mib": torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None,
        "seconds_per_step": statistics.median(seconds[len(seconds) // 5 :]),
        "losses": losses,
    }


def compare(rows: list[dict[str, Any]]) -> None:
    """Add to each row how it stands to fp32, the first of them, and whether that will do."""
    for row in rows:
        row["relative_loss"] = row["final_loss"] / rows[0]["final_loss"] - 1
        row["passed"] = (
            abs(row["relative_loss"]) <= TOLERANCE
            and row["final_loss"] < 0.8 * row["first_loss"]
            and row["finite_gradients"]
        )


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| precision | first loss | final loss | against fp32 | finite gradients | skipped | peak MiB | ms/step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peak = "n/a" if row["peak_mib"] is None else f"{row['peak_mib']:.1f}"
        lines.append(
            f"| {row['precision']} | {row['first_loss']:.4f} | {row['final_loss']:.4f} | {row['relative_loss']:+.3%} "
            f"| {'yes' if row['finite_gradients'] else 'NO'} | {row['skipped_steps']} | {peak} "
            f"| {1000 * row['seconds_per_step']:.1f} |"
        )
    return "\n".join([*lines, "", *(f"    {row['reason']}" for row in rows)])


def drawing(rows: list[dict[str, Any]]) -> str:
    """Draw each precision's loss less fp32's, step by step, in thousandths of fp32's."""
    base = rows[0]["losses"]
    curves = [
        Curve(
            row["precision"],
            [(n, 1000 * (loss / other - 1)) for n, (loss, other) in enumerate(zip(row["losses"], base, strict=True))],
            color=number,
        )
        for number, row in enumerate(rows)
    ]
    title = f"Loss against fp32 over {len(base)} steps"
    return plot_file(curves, title=title, x_label="steps", y_label="thousandths")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", nargs="+", choices=get_args(PrecisionName), default=get_args(PrecisionName))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    device = ProcessInfo.from_environment().device(asked.device)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        source = save_tiny(Path(scratch) / "tiny", hidden=HIDDEN, layers=LAYERS, codebook_size=CODES)
        family = open_family(str(source))
        steps = draw_steps(family, asked.steps)
        for name in asked.only:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            recipe = make_recipe(source, name, asked.steps)
            student = make_trainer(recipe, family, choose_precision(name, device), device, Path(scratch))
            trained = sum(parameter.numel() for parameter in student.trainable_parameters.values())
            rows.append(learn(student, steps))
            print(f"{name}: {rows[-1]['final_loss']:.4f}", flush=True)
            del student
            gc.collect()
            torch.cuda.empty_cache()
    compare(rows)
    facts = {
        "date": date.today().isoformat(),
        "command": f"python {' '.join(sys.argv)}",
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {
            "python": platform.python_version(),
            **{module.__name__: module.__version__ for module in (torch, transformers, accelerate, peft)},
        },
        "model": {"hidden": HIDDEN, "layers": LAYERS, "trained_parameters": trained},
        "data": {"steps": asked.steps, "tokens_per_step": sum(batch.tokens for batch in steps[0])},
        "recipe": recipe.model_dump(mode="json", include={"adapt", "loss", "train"}),
        "rows": rows,
    }
    measured = [{key: value for key, value in row.items() if key != "losses"} for row in rows]
    save_figures(asked.out / "precision.json", facts | {"rows": measured})
    (asked.out / "precision.svg").write_text(drawing(rows), encoding="utf-8")
    print(table(rows))
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
